"""Images as they are read, recorded, matched and found again in a prompt."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vision_model import png, uri

from rlagent.errors import RecordingError
from rlagent.router.conversation import Message, match_key
from rlagent.router.errors import ApiError
from rlagent.router.images import expanded, kind_of, placeholder_of, read_base64, read_url, recorded

PAD = 9
RED = png(255)


def message(*parts: str | bytes) -> Message:
    text, images = "", []
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            images.append(read_base64(base64.b64encode(part).decode(), len(text), "messages.0"))
    return Message(role="user", content=text, images=tuple(images))


def test_the_same_bytes_are_the_same_image_however_they_were_written() -> None:
    plain = read_url(uri(RED), 0, "messages.0")
    text = base64.b64encode(RED).decode()
    spaced = read_url(f"DATA:image/webp;BASE64,{text[:20]}\n  {text[20:]}", 0, "messages.0")
    assert plain == spaced
    assert (plain.media_type, plain.size_bytes, plain.data) == ("image/png", len(RED), RED)
    assert read_url(plain.uri, 0, "x") == plain


@given(st.lists(st.sampled_from(["a", "bc", png(1), png(2)]), max_size=6))
def test_a_recorded_message_has_its_parts_in_order(parts: list[str | bytes]) -> None:
    sent = message(*parts)
    again = Message.from_json(sent.to_json())
    assert again == sent
    assert match_key(again) == match_key(sent)
    assert [part if isinstance(part, str) else part.digest for part in again.parts] == [
        part if isinstance(part, str) else part.digest for part in sent.parts
    ]


def test_order_place_and_content_of_images_tell_messages_apart() -> None:
    one, two = png(1), png(2)
    said: list[list[Any]] = [
        ["ab"],
        [one, "ab"],
        ["a", one, "b"],
        ["ab", one],
        [two, "ab"],
        [one, two, "ab"],
        [two, one, "ab"],
    ]
    assert len({match_key(message(*parts)) for parts in said}) == len(said)


@pytest.mark.parametrize(
    "found", [None, 5, "https://a/b.png", "file:///a.png", "data:image/png;base64,", "data:,x", "a.png"]
)
def test_what_is_no_image_is_refused(found: object) -> None:
    with pytest.raises(ApiError) as refused:
        read_url(found, 0, "messages.0.content.1.image_url.url")
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_kinds_are_told_by_the_first_bytes() -> None:
    found = [
        kind_of(data) for data in (RED, b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF0000WEBPVP8 ", b"RIFF0000WAVE", b"<svg")
    ]
    assert found == ["image/png", "image/jpeg", "image/gif", "image/webp", None, None]


def test_a_models_placeholder_is_read_from_its_config() -> None:
    assert placeholder_of({"vision_config": {}, "image_token_id": 5}) == 5
    assert placeholder_of({"vision_config": {}, "image_token_index": 6}) == 6
    assert placeholder_of({"vision_config": {}, "media_placeholder_token_id": 7}) == 7
    assert placeholder_of({"image_token_id": 5}) is None
    assert placeholder_of({"vision_config": {}}) is None


@given(st.lists(st.tuples(st.lists(st.integers(0, 8), min_size=1), st.integers(1, 5)), min_size=1, max_size=4))
def test_what_an_engine_repeated_is_counted(pieces: list[tuple[list[int], int]]) -> None:
    ids = np.array([token for text, _ in pieces for token in [*text, PAD]], np.int32)
    told = [token for text, count in pieces for token in [*text, *[PAD] * count]]
    counts = expanded(ids, told, PAD)
    assert counts == [count for _, count in pieces]
    image = read_base64(base64.b64encode(RED).decode(), 0, "x")
    for found in recorded([image] * len(counts), ids, PAD, counts):
        assert ids[found.position] == PAD


@pytest.mark.parametrize(
    "told", [[], [1, PAD, PAD], [1, 2], [1, PAD, 2, 2], [2, PAD, 2], [1, 1, PAD, 2], [1, PAD, 3, 2]]
)
def test_a_prompt_that_the_engine_changed_is_told(told: list[int]) -> None:
    with pytest.raises(RecordingError, match="the engine"):
        expanded(np.array([1, PAD, 2], np.int32), told, PAD)
