"""Records to database rows and back: equal, arrays bit for bit; blobs too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.buffer.blobs import MIN_COMPRESSED_BYTES, pack, unpack
from rlagent.buffer.records import (
    add_rewards,
    decode_call,
    decode_session,
    encode_call,
    encode_reward,
    encode_session,
)
from rlagent.errors import StoreError
from rlagent.types import Call, Choice, ParentRef, Reward, Sampling, Session, VersionSpan

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300)


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    ids = draw(IDS)
    logprobs = draw(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=len(ids), max_size=len(ids))
    )
    cut = draw(st.integers(0, len(ids)))
    return Choice(
        output_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=(VersionSpan(version=3, start=0, end=cut), VersionSpan(version=4, start=cut, end=len(ids))),
        finish_reason=draw(st.sampled_from(("stop", "length", "abort"))),
        matched_stop=draw(st.none() | st.integers(0, 9) | st.text(max_size=3)),
        parse_status=draw(st.sampled_from(("text", "tool_calls", "malformed"))),
        trainable=draw(st.booleans()),
    )


@st.composite
def routed(draw: st.DrawFn, choice: Choice, num_suffix: int) -> Choice:
    """The choice with experts of a narrow or a wide mixture, or without any."""
    if draw(st.booleans()):
        return choice
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shape = (num_suffix + len(choice.output_ids), draw(st.integers(1, 3)))
    return replace(choice, experts=rng.integers(-1, draw(st.sampled_from((4, 254, 255, 400))), shape, np.int16))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    parent = draw(st.none() | st.builds(ParentRef, call_id=st.text(), choice=st.integers(0, 3)))
    suffix = np.array(draw(IDS), np.int32)
    drawn = draw(st.lists(choices(), max_size=3))
    return Call(
        call_id="c",
        session_id="s",
        index=draw(st.integers(0, 99)),
        dialect="chat",
        model=draw(st.text()),
        parent=parent,
        origin="fresh" if parent is None else "extended",
        reason=draw(st.text()),
        prompt_suffix=suffix,
        prompt_len=draw(st.integers(0, 10**6)),
        choices=tuple(draw(routed(choice, len(suffix))) for choice in drawn),
        sampling=Sampling(
            stop=tuple(draw(st.lists(st.text(), max_size=2))), seed=draw(st.none() | st.integers(0, 2**31))
        ),
        messages=draw(st.binary(max_size=600)),
        served=draw(st.binary(max_size=600)),
        client=draw(st.binary(max_size=600)),
        started_at=1.25,
        finished_at=2.5,
        delivery="delivered",
        body_digest="d",
    )


def plain(call: Call) -> object:
    """The call with bytes in place of arrays, so that == compares bits."""
    return (
        replace(call, prompt_suffix=np.zeros(0, np.int32), choices=()),
        call.prompt_suffix.tobytes(),
        [
            (
                replace(c, output_ids=None, logprobs=None, experts=None),
                c.output_ids.tobytes(),
                c.logprobs.tobytes(),
                None if c.experts is None else (c.experts.dtype, c.experts.tolist()),
            )
            for c in call.choices
        ],
    )


@settings(max_examples=80, deadline=None)
@given(calls())
def test_a_call_comes_back_equal(call: Call) -> None:
    found = decode_call(encode_call(call))
    first, second = plain(call), plain(found)
    assert str(first) == str(second)
    assert [c.output_ids.dtype for c in found.choices] == [np.int32] * len(call.choices)
    assert [c.logprobs.dtype for c in found.choices] == [np.float32] * len(call.choices)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
    st.dictionaries(st.text(), st.text() | st.integers(-9, 9) | st.lists(st.booleans())),
)
def test_a_session_comes_back_equal(numbers: dict[str, float], metadata: dict[str, object]) -> None:
    session = Session(
        session_id="s",
        key_hash="k",
        task_id="t",
        group_id="g",
        group_size=4,
        train=False,
        sampling={"temperature": 0.5, "max_tokens": 7},
        metadata=metadata,
        created_at=1.5,
        deadline_at=2.5,
        expires_at=3.5,
        reward=Reward(components=numbers, calls=numbers),
    )
    assert decode_session(encode_session(session)) == session


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=2000))
def test_a_blob_unpacks_to_the_same_bytes_and_never_grows_by_more_than_its_tag(body: bytes) -> None:
    assert unpack(pack(body)) == body
    assert len(pack(body)) <= len(body) + 1


def test_token_ids_shrink() -> None:
    assert len(pack(b"the same again " * MIN_COMPRESSED_BYTES)) < MIN_COMPRESSED_BYTES


def test_rewards_add_by_component_and_by_call() -> None:
    both = add_rewards(
        Reward(components={"a": 1.0}, calls={"c": 2.0}), Reward(components={"a": 0.5, "b": 3.0}, calls={"c": 1.0})
    )
    assert both == Reward(components={"a": 1.5, "b": 3.0}, calls={"c": 3.0})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(number: float) -> None:
    with pytest.raises(StoreError, match=r"'speed' is .*; a reward must be a finite number"):
        encode_reward(Reward(components={"speed": number}))


def one_choice(**changes: object) -> Call:
    choice = Choice(
        output_ids=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=(VersionSpan(version=0, start=0, end=3),),
        finish_reason="stop",
    )
    return Call(
        call_id="c",
        session_id="s",
        index=0,
        dialect="chat",
        model="m",
        parent=None,
        origin="fresh",
        reason="first",
        prompt_suffix=np.zeros(0, np.int32),
        prompt_len=0,
        choices=(replace(choice, **changes),),  # type: ignore[arg-type]
        sampling=Sampling(),
        messages=b"",
        served=b"",
        started_at=0.0,
        finished_at=0.0,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": np.zeros(2, np.float32)},
        {"logprobs": np.array([0, np.nan, 0], np.float32)},
        {"versions": ()},
        {"versions": (VersionSpan(version=0, start=0, end=2),)},
        {"versions": (VersionSpan(version=0, start=0, end=2), VersionSpan(version=1, start=1, end=3))},
    ],
)
def test_a_call_whose_pieces_do_not_fit_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(StoreError):
        encode_call(one_choice(**changes))
