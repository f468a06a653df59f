"""Packing, weights, splitting and planning: each token and row exactly once, however the work is cut."""

import subprocess
import sys

import numpy as np
import pytest
from groups import group
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.errors import LearnerError
from rlagent.trainer.batch import pack, select, split
from rlagent.trainer.config import AdvantageConfig, LossConfig
from rlagent.trainer.metrics import data_metrics
from rlagent.trainer.plan import cost, plan
from rlagent.types import Batch, Group

MASK = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda tail: [0, *tail])
GROUPS = st.lists(st.lists(st.lists(MASK, min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=4)
AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length", "rollout_mean")


def make(masks: list[list[list[list[int]]]]) -> list[Group]:
    return [group([float(i % 2) for i in range(len(rows))], rows=rows, name=f"g{n}") for n, rows in enumerate(masks)]


def packed(groups: list[Group], aggregation: str = "token_mean", limit: int = 100) -> Batch:
    loss = LossConfig(aggregation=aggregation, constant_length=10)  # type: ignore[arg-type]
    return pack(groups, advantage=AdvantageConfig(name="dr_grpo"), loss=loss, max_row_tokens=limit).batch


@given(GROUPS)
@settings(deadline=None, max_examples=60)
def test_packing_keeps_every_trainable_row_in_order(masks: list[list[list[list[int]]]]) -> None:
    batch = packed(make(masks))
    rows = [row for rollouts in masks for rollout in rollouts for row in rollout if any(row)]
    assert batch.num_rows == len(rows)
    assert np.diff(batch.cu_seqlens).tolist() == [len(row) for row in rows]
    assert batch.loss_mask.tolist() == [bool(bit) for row in rows for bit in row]
    assert batch.position_ids.tolist() == [i for row in rows for i in range(len(row))]
    assert batch.num_sampled == sum(map(sum, rows))
    assert not batch.weight[~batch.loss_mask].any()
    assert not batch.advantages[~batch.loss_mask].any()


@given(GROUPS, st.sampled_from(["token_mean", "seq_mean_token_mean", "rollout_mean"]))
@settings(deadline=None, max_examples=60)
def test_means_weigh_one_in_all(masks: list[list[list[list[int]]]], aggregation: str) -> None:
    batch = packed(make(masks), aggregation)
    assert batch.weight.sum() == pytest.approx(1.0 if batch.num_sampled else 0.0, rel=1e-5)


def test_aggregations_by_hand() -> None:
    masks = [[[[0, 1, 1, 1], [0, 1]], [[0, 1, 1]]]]  # rollout 0: rows of 3 and 1 tokens; rollout 1: a row of 2
    expected = {
        "token_mean": [1 / 6] * 6,
        "seq_mean_token_sum": [1 / 3] * 6,
        "seq_mean_token_mean": [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2,
        "constant_length": [1 / 30] * 6,
        "rollout_mean": [1 / 8] * 4 + [1 / 4] * 2,
    }
    for name, weights in expected.items():
        batch = packed(make(masks), name)
        assert batch.weight[batch.loss_mask] == pytest.approx(weights), name


def test_invariant_22_a_rollout_split_into_rows_weighs_the_same() -> None:
    whole = packed(make([[[[0, 1, 1, 1, 1]], [[0, 1]]]]), "rollout_mean")
    parts = packed(make([[[[0, 1, 1], [0, 1, 1]], [[0, 1]]]]), "rollout_mean")
    assert whole.weight[whole.loss_mask] == pytest.approx(parts.weight[parts.loss_mask])


def test_rows_that_are_too_long_are_dropped_and_counted() -> None:
    result = pack(make([[[[0, 1, 1, 1]], [[0, 1]]]]), advantage=AdvantageConfig(), loss=LossConfig(), max_row_tokens=3)
    assert result.dropped == {"too_long": 1}
    assert result.batch.weight[result.batch.loss_mask].tolist() == [1.0]  # it left the denominator too


def test_an_empty_batch_is_a_batch() -> None:
    batch = packed(make([[[[0, 0]]]]))
    assert (batch.num_tokens, batch.num_rows, batch.num_sampled) == (0, 0, 0)
    assert data_metrics(make([[[[0, 0]]]]), batch)["data/num_rollouts"] == 1


@given(GROUPS, st.integers(1, 4), st.sampled_from(AGGREGATIONS))
@settings(deadline=None, max_examples=60)
def test_split_keeps_rollouts_whole_and_weighs_each_part_like_a_step(
    masks: list[list[list[list[int]]]], parts: int, aggregation: str
) -> None:
    batch = packed(make(masks), aggregation)
    loss = LossConfig(aggregation=aggregation, constant_length=10)  # type: ignore[arg-type]
    found = split(batch, parts, loss)
    assert sum(part.num_rows for part in found) == batch.num_rows
    owners = [set(part.rollout_index.tolist()) for part in found]
    assert sum(map(len, owners)) == len(set().union(*owners))
    for part in filter(lambda part: part.num_rows, found):
        rows = np.split(part.loss_mask, part.cu_seqlens[1:-1])
        sums = [float(w.sum()) for w in np.split(part.weight, part.cu_seqlens[1:-1])]
        lengths = [int(row.sum()) for row in rows]
        expected = {
            "token_mean": [n / sum(lengths) for n in lengths],
            "seq_mean_token_sum": [n / len(rows) for n in lengths],
            "seq_mean_token_mean": [1 / len(rows)] * len(rows),
            "constant_length": [n / (10 * len(rows)) for n in lengths],
        }.get(aggregation)
        if expected is None:
            assert sum(sums) == pytest.approx(1, rel=1e-5)
        else:
            assert sums == pytest.approx(expected, rel=1e-5)


@given(GROUPS, st.randoms())
@settings(deadline=None, max_examples=40)
def test_select_takes_rows_as_they_are(masks: list[list[list[list[int]]]], random: object) -> None:
    batch = packed(make(masks))
    rows = list(range(batch.num_rows))[::-2]
    chosen = select(batch, rows)
    for at, row in enumerate(rows):
        a, b = batch.cu_seqlens[row : row + 2]
        c, d = chosen.cu_seqlens[at : at + 2]
        for name in ("token_ids", "loss_mask", "weight", "advantages", "rollout_logprobs"):
            assert (getattr(batch, name)[a:b] == getattr(chosen, name)[c:d]).all()


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(100, 300), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_the_plan_holds_each_row_once_within_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    found = plan(lengths, budget=budget, ranks=ranks)
    assert sorted(row for rank in found for microbatch in rank for row in microbatch) == list(range(len(lengths)))
    assert len(found) == ranks
    assert len({len(rank) for rank in found}) == 1
    assert all(sum(lengths[row] for row in microbatch) <= budget for rank in found for microbatch in rank)
    assert found == plan(lengths, budget=budget, ranks=ranks)


def test_the_plan_balances_cost() -> None:
    lengths = [100] * 8 + [10] * 8
    loads = [
        sum(cost(lengths[row]) for microbatch in rank for row in microbatch)
        for rank in plan(lengths, budget=250, ranks=2)
    ]
    assert max(loads) / min(loads) < 1.05


def test_a_row_over_the_budget_is_named() -> None:
    with pytest.raises(LearnerError, match=r"row 1 has 50 tokens.*learner\.batch\.tokens"):
        plan([10, 50], budget=40, ranks=1)


def test_the_driver_needs_no_torch() -> None:
    code = "import sys, rlagent.trainer.batch, rlagent.trainer.metrics, rlagent.train, rlagent.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
