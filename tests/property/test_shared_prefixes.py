"""Shared prefixes: every token of every row is the computed one that it says it is, and rows that share are planned together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import batch_of_rows

from rlagent.errors import LearnerError
from rlagent.trainer.shared_prefixes import plan_rows, shared_tokens
from rlagent.types import Batch

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=10)
LONG_ROWS = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=30), min_size=1, max_size=40)


def columns(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32).reshape(-1, 1) for row in rows]


def prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}


@given(ROWS)
def test_each_distinct_prefix_is_computed_once_and_every_token_finds_its_own(rows: list[list[int]]) -> None:
    computed, source = shared_tokens(columns(rows))
    histories = [tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)]  # of each token, itself included
    of_computed = [history for history, one in zip(histories, computed, strict=True) if one]
    assert sorted(of_computed) == sorted(prefixes(rows))
    assert [of_computed[at] for at in source] == histories


def test_tokens_that_were_routed_differently_are_not_shared() -> None:
    one, other = np.array([[5, 0], [6, 1], [7, 0]]), np.array([[5, 0], [6, 2], [7, 0]])
    computed, source = shared_tokens([one.astype(np.int32), other.astype(np.int32)])
    assert computed.tolist() == [True, True, True, False, True, True]
    assert source.tolist() == [0, 1, 2, 0, 3, 4]


@given(LONG_ROWS, st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_every_row_is_planned_once_within_the_budget(rows: list[list[int]], ranks: int, share: bool) -> None:
    budget = 64
    planned = plan_rows(batch_of_rows(rows), budget=budget, ranks=ranks, share=share)
    assert len({len(rank) for rank in planned}) == 1
    assert sorted(itertools.chain(*itertools.chain(*planned))) == list(range(len(rows)))
    for microbatch in itertools.chain(*planned):
        assert shared_tokens(columns([rows[row] for row in microbatch]))[0].sum() <= budget


def group_batch() -> Batch:
    """Eight groups of eight rows, in a random order: prompts of 40 tokens that begin alike, and answers of 10."""
    rng = np.random.default_rng(0)
    prompts = [[1, 1, *rng.integers(0, 50, 38).tolist()] for _ in range(8)]
    return batch_of_rows([prompts[number % 8] + rng.integers(0, 50, 10).tolist() for number in rng.permutation(64)])


def test_rows_of_a_group_are_computed_together() -> None:
    batch = group_batch()
    counts = []
    for share in (True, False):
        planned = plan_rows(batch, budget=1000, ranks=1, share=share)
        ids = [batch.token_ids[a:b].tolist() for a, b in itertools.pairwise(batch.cu_seqlens)]
        counts.append(sum(shared_tokens(columns([ids[row] for row in rows]))[0].sum() for rows in planned[0]))
    assert counts[0] < 8 * 40 * 1.7 + 64 * 10  # few groups are cut in two
    assert counts[0] < 0.7 * counts[1]


def test_sharing_keeps_ranks_balanced() -> None:
    batch = group_batch()
    ids = [batch.token_ids[a:b].tolist() for a, b in itertools.pairwise(batch.cu_seqlens)]
    loads = [
        sum(shared_tokens(columns([ids[row] for row in rows]))[0].sum() for rows in rank)
        for rank in plan_rows(batch, budget=1000, ranks=2, share=True)
    ]
    assert max(loads) / min(loads) < 1.2


def test_a_row_over_the_budget_is_named_by_its_own_number() -> None:
    with pytest.raises(LearnerError, match=r"row 2 has 9 tokens"):
        plan_rows(batch_of_rows([[1, 2], [1, 3], [1] * 9]), budget=8, ranks=1, share=True)
