"""Images in messages: read from what a client sent, known by their content, placed among a prompt's ids.

In the flow: dialects read them, conversation.py matches histories by their digests, render.py lets the template place
them, generate.py hands their bytes to engines. The router fetches nothing: a URL's content may change, and the record
would not be exact. Invariant: a prompt goes to an engine only with one placeholder id for each of its images, in order.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from rlagent.errors import RecordingError
from rlagent.router.errors import ApiError, invalid
from rlagent.types import Int32Array, PromptImage

# The first bytes of what vision models are trained on, and the APIs take.
_MAGIC: Final = (
    ("image/png", b"\x89PNG\r\n\x1a\n"),
    ("image/jpeg", b"\xff\xd8\xff"),
    ("image/gif", b"GIF87a"),
    ("image/gif", b"GIF89a"),
)
_FIX: Final = (
    "send the image itself, as base64 (a data: URI); the router fetches nothing, so that what it records is exact"
)
# Under which names a model's config.json has the id of an image's placeholder.
_PLACEHOLDERS: Final = ("image_token_id", "image_token_index", "media_placeholder_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image. `at`: how many characters of its message's text stand before it. `data` is empty until it is looked up."""

    digest: str  # sha256 hex of the bytes
    media_type: str
    size_bytes: int
    at: int
    data: bytes = field(default=b"", repr=False, compare=False)

    @property
    def uri(self) -> str:
        """As engines take it."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    def with_data(self, data: bytes) -> Image:
        """The same with its bytes."""
        return replace(self, data=data)

    def to_json(self) -> dict[str, Any]:
        """A part of a recorded message; the bytes are recorded once, under the digest."""
        return {
            "type": "image", "digest": self.digest, "media_type": self.media_type, "size_bytes": self.size_bytes
        }  # fmt: skip

    @classmethod
    def from_json(cls, body: Mapping[str, Any], at: int) -> Image:
        """The inverse of to_json, without the bytes."""
        return cls(digest=body["digest"], media_type=body["media_type"], size_bytes=body["size_bytes"], at=at)


def read_url(found: object, at: int, where: str) -> Image:
    """An image from a data: URI. ApiError for any other URL."""
    field = where.partition(".")[0]
    if not isinstance(found, str):
        raise invalid(f"{where} is not a string; {_FIX}", field)
    scheme, _, rest = found.partition(":")
    if scheme.lower() != "data":
        raise invalid(f"{where} is {found[:80]!r}: {_FIX}", field)
    head, comma, text = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise invalid(f"{where} is not of the form data:image/png;base64,...", field)
    return read_base64(text, at, where)


def read_base64(found: object, at: int, where: str) -> Image:
    """An image from its base64. ApiError where it is none."""
    field = where.partition(".")[0]
    try:
        data = base64.b64decode("".join(str(found).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"{where} is not valid base64: {error}", field) from error
    kind = kind_of(data)
    if kind is None:
        raise invalid(f"{where} is no PNG, JPEG, GIF or WebP image", field)
    return Image(
        digest=hashlib.sha256(data).hexdigest(), media_type=kind, size_bytes=len(data), at=at, data=data
    )  # fmt: skip


def kind_of(data: bytes) -> str | None:
    """The media type of an image by its first bytes; None where it is none that models read."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for kind, magic in _MAGIC if data.startswith(magic)), None)


def check_limits(images: Sequence[Image], *, max_images: int, max_image_bytes: int, max_body_bytes: int) -> None:
    """Refuse what is too many, or too large: each, and all together, which a request may have named by a response's id."""
    if len(images) > max_images:
        raise invalid(
            f"the messages hold {len(images)} images, router.max_images is {max_images}; send fewer, or raise it",
            "messages",
            "too_many_images",
        )
    largest, total = max((image.size_bytes for image in images), default=0), sum(image.size_bytes for image in images)
    if largest > max_image_bytes:
        raise _too_large(f"an image has {largest} bytes, router.max_image_bytes is {max_image_bytes}")
    if total > max_body_bytes:
        raise _too_large(f"the images have {total} bytes, router.max_body_bytes is {max_body_bytes}")


def _too_large(what: str) -> ApiError:
    message = f"{what}; send smaller ones, or raise it"
    return ApiError(413, message, param="messages", code="image_too_large", retry=False)


def placeholder_of(model: Mapping[str, Any]) -> int | None:
    """The id that stands for an image in a prompt of the model of this config.json; None for a text model."""
    if not isinstance(model.get("vision_config"), Mapping):
        return None
    return next((model[name] for name in _PLACEHOLDERS if isinstance(model.get(name), int)), None)


def places(ids: Int32Array, placeholder: int) -> list[int]:
    """Where a prompt's images stand."""
    found: list[int] = np.flatnonzero(ids == placeholder).tolist()
    return found


def expanded(ids: Int32Array, told: Sequence[int], placeholder: int) -> list[int]:
    """Into how many tokens an engine made each placeholder of a prompt.

    told: the prompt as the engine says that its model saw it. RecordingError where that differs in anything else.
    """
    counts: list[int] = []
    at = 0
    for token in ids.tolist():
        start = at
        if token == placeholder:
            while at < len(told) and told[at] == placeholder:
                at += 1
            counts.append(at - start)
        elif at < len(told) and told[at] == token:
            at += 1
        if at == start:
            raise RecordingError(
                f"the engine changed the prompt with images: {len(ids)} ids were sent, and its model saw others from number "
                f"{start} on; a model whose processor writes more than repeats of its image's placeholder is not supported, and "
                "SGLang must run with SGLANG_MM_AVOID_RETOKENIZE=1 (its default)"
            )
    if at != len(told):
        raise RecordingError(
            f"the engine's model saw {len(told) - at} ids behind the prompt with images that it was given"
        )
    return counts


def recorded(
    images: Sequence[Image], ids: Int32Array, placeholder: int, counts: Sequence[int]
) -> tuple[PromptImage, ...]:
    """The images of a whole prompt as they are recorded."""
    return tuple(
        PromptImage(digest=image.digest, position=position, num_tokens=count)
        for image, position, count in zip(images, places(ids, placeholder), counts, strict=True)
    )
