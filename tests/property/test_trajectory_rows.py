"""Rows of random call forests: ownership, prefix identity, lengths, determinism; and the export rules of calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.trajectory import full_prompt_ids, head_of, kept_calls, rows
from rlagent.types import Call, Choice, Delivery, ParentRef, Reward, Sampling, Session, VersionSpan

SESSION = Session(session_id="s", key_hash="k", group_id="g", reward=Reward(components={"a": 1.0, "b": 0.5}))


def make_call(
    index: int,
    parent: ParentRef | None,
    prompt_len: int,
    suffix: list[int],
    outputs: list[list[int]],
    *,
    delivery: Delivery = "delivered",
    trainable: bool = True,
    split: int = 0,
    temperature: float = 1.0,
    finish_reason: str = "stop",
) -> Call:
    choices = tuple(
        Choice(
            output_ids=np.array(ids, np.int32),
            logprobs=-1.0 - np.arange(len(ids), dtype=np.float32) - 100 * index - 10 * number,
            versions=(
                VersionSpan(version=index, start=0, end=min(split, len(ids))),
                VersionSpan(version=index + 1, start=min(split, len(ids)), end=len(ids)),
            ),
            finish_reason="length" if finish_reason == "length" else "stop",
            trainable=trainable,
        )
        for number, ids in enumerate(outputs)
    )
    return Call(
        call_id=f"c{index}",
        session_id="s",
        index=index,
        dialect="chat",
        model="m",
        parent=parent,
        origin="fresh" if parent is None else "extended",
        reason="first" if parent is None else "",
        prompt_suffix=np.array(suffix, np.int32),
        prompt_len=prompt_len,
        choices=choices,
        sampling=Sampling(temperature=temperature),
        messages=b"[]",
        served=b"[]",
        started_at=0.0,
        finished_at=0.0,
        delivery=delivery,
    )


@st.composite
def forests(draw: st.DrawFn) -> list[Call]:
    calls: list[Call] = []
    ids = st.lists(st.integers(0, 3), max_size=4)
    for index in range(draw(st.integers(0, 8))):
        parent, length = None, 0
        if calls and draw(st.booleans()):
            above = draw(st.sampled_from(calls))
            choice = draw(st.integers(0, len(above.choices) - 1))
            parent = ParentRef(call_id=above.call_id, choice=choice)
            length = above.prompt_len + len(above.choices[choice].output_ids)
        suffix = draw(ids)
        calls.append(
            make_call(
                index,
                parent,
                length + len(suffix),
                suffix,
                draw(st.lists(ids, min_size=1, max_size=3)),
                delivery=draw(st.sampled_from(("committed", "delivered", "orphan"))),
                trainable=draw(st.booleans()),
                split=draw(st.integers(0, 4)),
                temperature=draw(st.sampled_from((0.5, 1.0))),
            )
        )
    return calls


def expected_tokens(call: Call, choice: int, by_id: dict[str, Call]) -> list[int]:
    """The ids of a path by definition: its parent's ids, the suffix, the output."""
    own = [*call.prompt_suffix.tolist(), *call.choices[choice].output_ids.tolist()]
    if call.parent is None:
        return own
    return expected_tokens(by_id[call.parent.call_id], call.parent.choice, by_id) + own


@settings(max_examples=150, deadline=None)
@given(forests())
def test_each_sampled_token_of_a_kept_trainable_choice_is_owned_by_exactly_one_row(calls: list[Call]) -> None:
    kept = kept_calls(map(head_of, calls))
    owned: list[float] = []
    for row in rows(SESSION, calls):
        assert (row.logprobs[row.loss_mask] < 0).all(), "a token that was not sampled has mask True"
        owned += list(zip(row.logprobs[row.loss_mask].tolist(), row.versions[row.loss_mask].tolist(), strict=True))
    wanted = []
    for call in calls:
        for choice in call.choices:
            if call.call_id in kept and choice.trainable:
                for span in choice.versions:
                    wanted += [(float(x), span.version) for x in choice.logprobs[span.start : span.end]]
    assert sorted(owned) == sorted(wanted)  # make_call gives every token of a forest its own logprob


@settings(max_examples=150, deadline=None)
@given(forests())
def test_a_row_is_the_concatenation_along_its_path(calls: list[Call]) -> None:
    by_id = {call.call_id: call for call in calls}
    kept = kept_calls(map(head_of, calls))
    inner = {(c.parent.call_id, c.parent.choice) for c in calls if c.parent is not None and c.call_id in kept}
    leaves = [
        (call, number)
        for call in calls
        for number in range(len(call.choices))
        if call.call_id in kept and (call.call_id, number) not in inner
    ]
    found = rows(SESSION, calls)
    assert len(found) == len(leaves)
    for row, (leaf, number) in zip(found, leaves, strict=True):
        assert row.call_ids[-1] == leaf.call_id
        assert row.token_ids.tolist() == expected_tokens(leaf, number, by_id)
        prompt = full_prompt_ids(leaf.call_id, by_id)
        assert len(prompt) == leaf.prompt_len
        assert row.token_ids.tolist() == [*prompt.tolist(), *leaf.choices[number].output_ids.tolist()]
        ends = [by_id[c].prompt_len for c in row.call_ids]
        for turn, call_id in enumerate(row.call_ids):  # the tokens of a turn start where the one before ended
            assert (row.turn == turn).sum() >= len(by_id[call_id].prompt_suffix)
            assert (row.turn[: ends[turn]] <= turn).all()


@settings(max_examples=100, deadline=None)
@given(forests())
def test_arrays_have_one_length_and_defaults_where_nothing_was_sampled(calls: list[Call]) -> None:
    for row in rows(SESSION, calls):
        arrays = (row.token_ids, row.loss_mask, row.logprobs, row.temperature, row.versions, row.turn)
        assert {len(array) for array in arrays} == {len(row)}
        dtypes = [array.dtype for array in arrays]
        assert dtypes == [np.int32, np.bool_, np.float32, np.float32, np.int32, np.int32]
        unsampled = row.versions == -1
        assert (row.logprobs[unsampled] == 0).all()
        assert (row.temperature[unsampled] == 1).all()
        assert not row.loss_mask[unsampled].any()
        assert (row.reward, row.group_id, row.rollout_id) == (1.5, "g", "s")


@settings(max_examples=50, deadline=None)
@given(forests(), st.randoms())
def test_rows_depend_on_the_calls_alone_not_on_their_order(calls: list[Call], random: object) -> None:
    shuffled = calls[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = rows(SESSION, calls), rows(SESSION, shuffled)
    assert [row.call_ids for row in first] == [row.call_ids for row in second]
    for one, other in zip(first, second, strict=True):
        assert (one.token_ids == other.token_ids).all()
        assert (one.loss_mask == other.loss_mask).all()


@settings(max_examples=50, deadline=None)
@given(forests())
def test_an_untrained_session_has_rows_without_mask(calls: list[Call]) -> None:
    trained, untrained = rows(SESSION, calls), rows(replace(SESSION, train=False), calls)
    assert [row.token_ids.tolist() for row in trained] == [row.token_ids.tolist() for row in untrained]
    assert not any(row.loss_mask.any() for row in untrained)


@settings(max_examples=150, deadline=None)
@given(forests())
def test_kept_calls_are_closed_under_parents_and_lose_no_delivered_call(calls: list[Call]) -> None:
    kept = kept_calls(map(head_of, calls))
    extended = {c.parent.call_id for c in calls if c.parent is not None and c.call_id in kept}
    assert extended <= kept
    for call in calls:
        twins = [
            c
            for c in calls
            if c.parent == call.parent and c.prompt_suffix.tobytes() == call.prompt_suffix.tobytes() and c is not call
        ]
        if call.delivery == "delivered" or call.call_id in extended:
            assert call.call_id in kept
        elif call.delivery == "orphan":
            assert call.call_id not in kept
        else:
            seen = any(t.delivery == "delivered" or t.call_id in extended for t in twins)
            later = any(t.delivery == "committed" and t.index > call.index for t in twins)
            assert (call.call_id in kept) == (not seen and not later)


def test_turns_of_a_chat_with_a_retry_an_orphan_and_a_fork() -> None:
    first = make_call(0, None, 2, [1, 2], [[7, 8]])
    lost = make_call(1, ParentRef(call_id="c0", choice=0), 5, [3], [[9]], delivery="committed")  # the SDK tried again
    retry = make_call(2, ParentRef(call_id="c0", choice=0), 5, [3], [[6]])
    orphan = make_call(3, ParentRef(call_id="c2", choice=0), 7, [4], [[5]], delivery="orphan")
    fork = make_call(4, ParentRef(call_id="c0", choice=0), 5, [0], [[5, 5]], finish_reason="length")
    found = rows(SESSION, [first, lost, retry, orphan, fork])
    assert [row.token_ids.tolist() for row in found] == [[1, 2, 7, 8, 3, 6], [1, 2, 7, 8, 0, 5, 5]]
    assert [row.loss_mask.tolist() for row in found] == [
        [False, False, True, True, False, True],
        [False, False, False, False, False, True, True],
    ]
    assert [row.turn.tolist() for row in found] == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1]]
    assert [row.truncated for row in found] == [False, True]


def test_n_choices_are_siblings_with_a_row_each() -> None:
    call = make_call(0, None, 1, [1], [[2], [3], [4], [5]])
    assert [row.token_ids.tolist() for row in rows(SESSION, [call])] == [[1, 2], [1, 3], [1, 4], [1, 5]]
    assert all(row.loss_mask.tolist() == [False, True] for row in rows(SESSION, [call]))


def test_parallel_calls_of_one_prompt_are_both_kept_when_both_were_delivered() -> None:
    calls = [make_call(i, None, 1, [1], [[2 + i]]) for i in range(2)]
    assert [row.token_ids.tolist() for row in rows(SESSION, calls)] == [[1, 2], [1, 3]]


def test_an_orphan_that_was_extended_is_part_of_the_path() -> None:
    calls = [
        make_call(0, None, 1, [1], [[2]], delivery="orphan"),
        make_call(1, ParentRef(call_id="c0", choice=0), 3, [3], [[4]]),
    ]
    assert [row.token_ids.tolist() for row in rows(SESSION, calls)] == [[1, 2, 3, 4]]


def test_a_long_chain_builds_in_linear_work() -> None:
    calls: list[Call] = []
    for index in range(2000):
        parent = ParentRef(call_id=f"c{index - 1}", choice=0) if index else None
        calls.append(make_call(index, parent, 20 * index + 10, [1] * 10, [[2] * 10]))
    (row,) = rows(SESSION, calls)
    assert len(row) == 40_000
    assert row.loss_mask.sum() == 20_000
