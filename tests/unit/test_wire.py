"""A lease over the wire: equal after the round trip, and RouterError for anything that is not one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import orjson
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.errors import RouterError
from rlagent.types import Group, Lease, Reward, Rollout, Trajectory
from rlagent.wire import ARRAYS, FORMAT, decode_lease, encode_lease


@st.composite
def rows(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 20))
    seed = np.random.default_rng(draw(st.integers(0, 99)))
    return Trajectory(
        token_ids=seed.integers(0, 2**31 - 1, length, np.int32),
        loss_mask=seed.random(length) < 0.5,
        logprobs=seed.standard_normal(length, np.float32),
        temperature=seed.random(length, np.float32),
        versions=seed.integers(-1, 9, length, np.int32),
        turn=seed.integers(0, 9, length, np.int32),
        call_ids=tuple(draw(st.lists(st.text(max_size=3), max_size=3))),
        rollout_id=draw(st.text(max_size=3)),
        group_id=draw(st.none() | st.text(max_size=3)),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        truncated=draw(st.booleans()),
        experts=draw(st.sampled_from((None, seed.integers(-1, 9, (length, 4)).astype(np.int16)))),
    )


NUMBERS = st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=2)
ROLLOUTS = st.builds(
    Rollout,
    rollout_id=st.text(max_size=3),
    task_id=st.none() | st.text(max_size=3),
    reward=st.builds(Reward, components=NUMBERS, calls=NUMBERS),
    rows=st.lists(rows(), max_size=3).map(tuple),
)
GROUPS = st.builds(
    Group,
    group_id=st.text(max_size=3),
    rollouts=st.lists(ROLLOUTS, max_size=3).map(tuple),
    num_missing=st.integers(0, 3),
    ungrouped=st.booleans(),
)
LEASES = st.builds(
    Lease,
    lease_id=st.text(max_size=3),
    step=st.integers(0, 10**6),
    groups=st.lists(GROUPS, max_size=3).map(tuple),
    expires_at=st.floats(0, 1e10),
    redelivered=st.booleans(),
)


def plain(lease: Lease) -> str:
    """Everything in a lease as text, arrays as dtype and bytes, so that == compares bits."""

    def show(value: object) -> object:
        if isinstance(value, np.ndarray):
            return str(value.dtype), value.tobytes()
        if isinstance(value, tuple):
            return [show(item) for item in value]
        if hasattr(value, "__dataclass_fields__"):
            return {name: show(getattr(value, name)) for name in value.__dataclass_fields__}
        return value

    return repr(show(lease))


@settings(max_examples=80, deadline=None)
@given(LEASES)
def test_a_lease_comes_back_equal(lease: Lease) -> None:
    assert plain(decode_lease(encode_lease(lease))) == plain(lease)


def example() -> Lease:
    row = Trajectory(
        token_ids=np.arange(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0, -1, -2], np.float32),
        temperature=np.ones(3, np.float32),
        versions=np.array([-1, 4, 4], np.int32),
        turn=np.zeros(3, np.int32),
        call_ids=("c",),
        rollout_id="r",
        group_id="g",
        reward=1.0,
    )
    rollout = Rollout(rollout_id="r", task_id=None, reward=Reward(components={"a": 1.0}), rows=(row, row))
    return Lease(
        lease_id="l", step=3, groups=(Group(group_id="g", rollouts=(rollout,)),), expires_at=9.0, lags={3: 0, 1: 2}
    )


def rebuilt(change: Callable[[dict[str, np.ndarray], dict[str, str]], None]) -> bytes:
    """The example's body after a change to its arrays or its metadata."""
    body = encode_lease(example())
    size = int.from_bytes(body[:8], "little")
    metadata = orjson.loads(body[8 : 8 + size])["__metadata__"]
    arrays = safetensors.numpy.load(body)
    change(arrays, metadata)
    return safetensors.numpy.save(arrays, metadata=metadata)


def put(name: str, array: np.ndarray) -> Callable[[dict[str, np.ndarray], dict[str, str]], None]:
    return lambda arrays, _: arrays.__setitem__(name, array)


def cut_rows(number: int) -> Callable[[dict[str, np.ndarray], dict[str, str]], None]:
    def change(_arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        header = orjson.loads(metadata["lease"])
        named = header["groups"][0]["rollouts"][0]["rows"]
        header["groups"][0]["rollouts"][0]["rows"] = (named * 2)[:number]
        metadata["lease"] = orjson.dumps(header).decode()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("token_ids", np.zeros(6, np.int64)), "token_ids is int64"),
        (put("logprobs", np.zeros(5, np.float32)), r"logprobs is float32\[5\], not float32\[6\]"),
        (put("loss_mask", np.zeros(6, np.uint8)), "loss_mask is uint8"),
        (put("row_offsets", np.array([0, 4, 3, 6])), "increasing"),
        (put("row_offsets", np.array([1, 6])), "starts at 0"),
        (put("row_offsets", np.array([0, 7])), r"not int32\[7\]"),
        (lambda arrays, _: arrays.pop("turn"), "KeyError: 'turn'"),
        (lambda _, metadata: metadata.update(format="other"), "format 'other'"),
        (lambda _, metadata: metadata.update(lease="[]"), "not a lease"),
        (lambda _, metadata: metadata.update(lease="{"), "not a lease"),
        (lambda _, metadata: metadata.pop("lease"), "KeyError: 'lease'"),
        (cut_rows(1), "1 rows in the header, 2 in the arrays"),
        (cut_rows(3), "3 rows in the header, 2 in the arrays"),
    ],
)
def test_a_body_that_does_not_fit_is_refused(
    change: Callable[[dict[str, np.ndarray], dict[str, str]], None], message: str
) -> None:
    with pytest.raises(RouterError, match=message):
        decode_lease(rebuilt(change))


@pytest.mark.parametrize("body", [b"", b"{}", b"\x80\x04pickle", b"\xff" * 100, encode_lease(example())[:-1]])
def test_bytes_that_are_no_lease_are_refused(body: bytes) -> None:
    with pytest.raises(RouterError, match="not a lease"):
        decode_lease(body)


def test_the_format_names_every_array_of_a_row() -> None:
    fields = [name for name, value in vars(Trajectory).items() if not name.startswith("_")]
    arrays = [
        name
        for name in Trajectory.__dataclass_fields__
        if isinstance(getattr(example().groups[0].rollouts[0].rows[0], name), np.ndarray)
    ]
    assert list(ARRAYS) == arrays
    assert FORMAT.startswith("rlagent-lease-")
    assert set(ARRAYS) <= set(fields)
