"""Prompts with images: whether the policy can see them, their bytes for the engines, and what the model saw in their stead.

In the flow: the recorder asks before it plans, hands a `Sight` to the generator, and records what the engine then told.
Invariant: a call with images is recorded only when the engine told the very prompt that its model saw, and that prompt is
the ids that were sent with nothing but the placeholders repeated.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlagent.buffer import Buffer
from rlagent.errors import RecordingError, StoreError
from rlagent.router.config import RouterConfig
from rlagent.router.conversation import Conversation
from rlagent.router.errors import invalid
from rlagent.router.generate import Generator
from rlagent.router.images import Image, check_limits, expanded, recorded
from rlagent.router.plan import Plan
from rlagent.types import Int32Array, PromptImage, Sampling, Session


@dataclass(slots=True, kw_only=True)
class Sight:
    """The images of one call. `counts` is what became of each, once an engine has told."""

    images: tuple[Image, ...]
    uris: Sequence[str]
    ids: Int32Array
    placeholder: int
    heard: Callable[[int], None]  # gets the prompt's length as the model saw it
    counts: list[int] = field(default_factory=list)

    def told(self, ids: Int32Array, seen: Sequence[int] | None) -> None:
        """What an engine says that its model saw of the prompt, or of the prompt and a part of the output (`ids`).

        RecordingError where that is not the ids with their placeholders repeated, each time alike.
        """
        if seen is None:
            raise RecordingError("the engine does not tell how its model saw a prompt with images (prompt_token_ids)")
        counts = expanded(ids, seen, self.placeholder)
        if self.counts and counts != self.counts:
            raise RecordingError(f"one image was {self.counts} tokens to an engine, and {counts} to another")
        self.counts = counts
        self.heard(self.num_fed)

    @property
    def num_fed(self) -> int:
        """Length of the prompt as the model saw it."""
        return len(self.ids) - len(self.counts) + sum(self.counts)

    def behind(self, start: int) -> tuple[PromptImage, ...]:
        """The images from id number `start` on."""
        whole = recorded(self.images, self.ids, self.placeholder, self.counts)
        return tuple(image for image in whole if image.position >= start)

    @property
    def blobs(self) -> dict[str, bytes]:
        """The bytes that came with the request."""
        return {image.digest: image.data for image in self.images if image.data}


class Vision:
    """What the policy of one router can see."""

    def __init__(self, buffer: Buffer, generator: Generator, placeholder: int | None, config: RouterConfig) -> None:
        self._buffer = buffer
        self._generator = generator
        self._placeholder = placeholder
        self._config = config

    async def check(self, conversation: Conversation) -> None:
        """ApiError for images that are too many, too large, or cannot be seen here."""
        images = conversation.images
        if not images:
            return
        if self._placeholder is None:
            raise invalid("the policy is a text model and reads no images; leave them out", "messages", "no_vision")
        limits = self._config
        check_limits(
            images,
            max_images=limits.max_images,
            max_image_bytes=limits.max_image_bytes,
            max_body_bytes=limits.max_body_bytes,
        )
        if not await self._generator.sees_images():
            raise invalid(
                "the policy's model reads images, and an engine that runs it does not; leave them out, or serve it with SGLang",
                "messages",
                "no_vision",
            )

    async def sight(self, plan: Plan, heard: Callable[[int], None]) -> Sight | None:
        """The images of a prompt with their bytes; None where it has none."""
        if not plan.images:
            return None
        assert self._placeholder is not None
        uris = await asyncio.gather(*map(self._uri, plan.images))
        return Sight(images=plan.images, uris=uris, ids=plan.ids, placeholder=self._placeholder, heard=heard)

    async def _uri(self, image: Image) -> str:
        if image.data:
            return image.uri
        data = await self._buffer.image(image.digest)
        if data is None:
            raise StoreError(f"the data buffer lost the image {image.digest}")
        return image.with_data(data).uri

    async def measure(self, session: Session, plan: Plan) -> int:
        """How long a prompt with images is for the model, which an engine is asked to begin with."""
        sight = await self.sight(plan, lambda _: None)
        assert sight is not None
        await self._generator.choice(
            f"measure-{uuid.uuid4().hex}",
            session.session_id,
            session.group_id,
            plan.ids,
            Sampling(max_tokens=1),
            num_new=len(plan.suffix),
            trainable=False,
            shown=sight,
        )
        return sight.num_fed
