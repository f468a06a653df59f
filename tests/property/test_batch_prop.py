"""Packing, weights, splitting and selecting: each token exactly once, however the work is cut."""

from typing import Any

import numpy as np
import pytest
from groups import group
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.trainer.batch import pack, select, split, weigh
from rlagent.trainer.config import AdvantageConfig, LossConfig
from rlagent.types import Batch, Group

MASK = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda tail: [0, *tail])
GROUPS = st.lists(st.lists(st.lists(MASK, min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=4)
AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length", "rollout_mean")
Masks = list[list[list[list[int]]]]


def make(masks: Masks) -> list[Group]:
    return [group([float(i % 2) for i in range(len(rows))], rows=rows, name=f"g{n}") for n, rows in enumerate(masks)]


def configured(aggregation: Any = "token_mean") -> LossConfig:
    return LossConfig(aggregation=aggregation, constant_length=10)


def packed(groups: list[Group], aggregation: str = "token_mean", limit: int = 100) -> Batch:
    advantage = AdvantageConfig(name="dr_grpo")
    return pack(groups, advantage=advantage, loss=configured(aggregation), max_row_tokens=limit).batch


@given(GROUPS)
@settings(deadline=None, max_examples=60)
def test_packing_keeps_every_trainable_row_in_order(masks: Masks) -> None:
    batch = packed(make(masks))
    rows = [row for rollouts in masks for rollout in rollouts for row in rollout if any(row)]
    assert batch.num_rows == len(rows)
    assert np.diff(batch.cu_seqlens).tolist() == [len(row) for row in rows]
    assert batch.loss_mask.tolist() == [bool(bit) for row in rows for bit in row]
    assert batch.position_ids.tolist() == [i for row in rows for i in range(len(row))]
    assert batch.num_sampled == sum(map(sum, rows))
    assert not batch.weight[~batch.loss_mask].any()
    assert not batch.advantages[~batch.loss_mask].any()


@given(GROUPS, st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_every_row_is_packed_or_counted_as_dropped(masks: Masks, limit: int) -> None:
    result = pack(make(masks), advantage=AdvantageConfig(), loss=LossConfig(), max_row_tokens=limit)
    assert result.batch.num_rows + sum(result.dropped.values()) == sum(len(r) for rows in masks for r in rows)
    assert result.batch.num_rows == 0 or np.diff(result.batch.cu_seqlens).max() <= limit


@given(GROUPS, st.sampled_from(["token_mean", "seq_mean_token_mean", "rollout_mean"]))
@settings(deadline=None, max_examples=60)
def test_means_weigh_one_in_all(masks: Masks, aggregation: str) -> None:
    batch = packed(make(masks), aggregation)
    assert batch.weight.sum() == pytest.approx(1.0 if batch.num_sampled else 0.0, rel=1e-5)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_invariant_22_splitting_a_rollout_into_rows_changes_no_token(ours: list[int], theirs: list[int]) -> None:
    other = [[0, *[1] * n] for n in theirs]
    whole = packed([group([1.0, 0.0], rows=[[[0, *[1] * sum(ours)]], other])], "rollout_mean")
    cut = packed([group([1.0, 0.0], rows=[[[0, *[1] * n] for n in ours], other])], "rollout_mean")
    for name in ("weight", "advantages"):
        one, many = (getattr(batch, name)[batch.loss_mask] for batch in (whole, cut))
        assert one == pytest.approx(many, rel=1e-5)


@given(GROUPS, st.integers(1, 4), st.sampled_from(AGGREGATIONS))
@settings(deadline=None, max_examples=60)
def test_split_keeps_rollouts_whole_and_weighs_each_part_like_a_step(
    masks: Masks, parts: int, aggregation: str
) -> None:
    batch = packed(make(masks), aggregation)
    found = split(batch, parts, configured(aggregation))
    assert np.concatenate([part.token_ids for part in found]).tolist() == batch.token_ids.tolist()
    owners = [set(part.rollout_index.tolist()) for part in found]
    assert sum(map(len, owners)) == len(set().union(*owners))
    for part in filter(lambda part: part.num_rows, found):
        sums = [float(w.sum()) for w in np.split(part.weight, part.cu_seqlens[1:-1])]
        lengths = [int(row.sum()) for row in np.split(part.loss_mask, part.cu_seqlens[1:-1])]
        expected = {
            "token_mean": [n / sum(lengths) for n in lengths],
            "seq_mean_token_sum": [n / len(lengths) for n in lengths],
            "seq_mean_token_mean": [1 / len(lengths)] * len(lengths),
            "constant_length": [n / (10 * len(lengths)) for n in lengths],
        }.get(aggregation)
        if expected is None:
            assert sum(sums) == pytest.approx(1, rel=1e-5)
        else:
            assert sums == pytest.approx(expected, rel=1e-5)


@given(GROUPS, st.sampled_from(AGGREGATIONS), st.randoms())
@settings(deadline=None, max_examples=40)
def test_invariant_5_the_order_of_rows_changes_no_rows_weight(masks: Masks, aggregation: str, random: Any) -> None:
    batch = packed(make(masks), aggregation)
    order = list(range(batch.num_rows))
    random.shuffle(order)
    moved = select(batch, order)
    again = weigh(moved, configured(aggregation))
    assert again.weight == pytest.approx(moved.weight, rel=1e-5)


@given(GROUPS)
@settings(deadline=None, max_examples=40)
def test_select_takes_rows_as_they_are(masks: Masks) -> None:
    batch = packed(make(masks))
    rows = list(range(batch.num_rows))[::-2]
    chosen = select(batch, rows)
    assert chosen.num_sampled == chosen.loss_mask.sum()
    for at, row in enumerate(rows):
        a, b = batch.cu_seqlens[row : row + 2]
        c, d = chosen.cu_seqlens[at : at + 2]
        assert chosen.rollout_index[at] == batch.rollout_index[row]
        for name in ("token_ids", "loss_mask", "weight", "advantages", "rollout_logprobs"):
            assert (getattr(batch, name)[a:b] == getattr(chosen, name)[c:d]).all()
