"""Packing by hand: aggregation weights, what is dropped, splits into updates, and no torch in the driver."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from groups import group

from rlagent.errors import LearnerError
from rlagent.trainer.batch import PackResult, pack, select, split, weigh
from rlagent.trainer.config import AdvantageConfig, LossConfig
from rlagent.trainer.metrics import data_metrics
from rlagent.types import Batch, Group

EXPECTED = {
    # rollout 0: rows of 3 and 1 sampled tokens; rollout 1: a row of 2
    "token_mean": [1 / 6] * 6,
    "seq_mean_token_sum": [1 / 3] * 6,
    "seq_mean_token_mean": [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2,
    "constant_length": [1 / 30] * 6,
    "rollout_mean": [1 / 8] * 4 + [1 / 4] * 2,
}
MASKS = [[[0, 1, 1, 1], [0, 1]], [[0, 1, 1]]]


def loss(aggregation: Any = "token_mean") -> LossConfig:
    return LossConfig(aggregation=aggregation, constant_length=10)


def packed(groups: list[Group], aggregation: str = "token_mean", limit: int = 100) -> PackResult:
    return pack(groups, advantage=AdvantageConfig(name="dr_grpo"), loss=loss(aggregation), max_row_tokens=limit)


UNSET = ("rewards", "values", "returns", "teacher_logprobs", "version", "experts")


def test_every_field_of_a_packed_batch() -> None:
    batch = packed([group([1.0, 0.0], rows=MASKS)]).batch
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 1, 2, 1, 2, 3]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 9]
    assert batch.loss_mask.tolist() == [bool(bit) for bit in (0, 1, 1, 1, 0, 1, 0, 1, 1)]
    assert batch.rollout_logprobs.tolist() == [0, -1, -1, -1, 0, -1, 0, -1, -1]
    assert batch.temperature.tolist() == [1.0] * 9
    assert batch.advantages.tolist() == [0, 0.5, 0.5, 0.5, 0, 0.5, 0, -0.5, -0.5]
    assert batch.versions.tolist() == [-1, 0, 0, 0, -1, 0, -1, 0, 0]
    assert batch.rollout_index.tolist() == [0, 0, 1]
    assert (batch.num_sampled, batch.num_rows, batch.num_tokens) == (6, 3, 9)
    assert all(getattr(batch, name) is None for name in UNSET)
    arrays = set(Batch.__dataclass_fields__) - {"num_sampled", *UNSET}
    types = {name: getattr(batch, name).dtype.name for name in arrays}
    integers = dict.fromkeys(
        ("token_ids", "position_ids", "cu_seqlens", "versions", "rollout_index", "group_index"), "int32"
    )
    floats = dict.fromkeys(("rollout_logprobs", "temperature", "advantages", "weight"), "float32")
    assert types == {**integers, **floats, "loss_mask": "bool"}


def test_rows_without_recorded_experts_have_unknown_ones_beside_those_that_have() -> None:
    first, second = group([1.0, 0.0], rows=MASKS).rollouts
    known = replace(first.rows[0], experts=np.arange(8, dtype=np.int16).reshape(4, 2))
    rollouts = (replace(first, rows=(known, *first.rows[1:])), second)
    mixed = replace(group([1.0, 0.0], rows=MASKS), rollouts=rollouts)
    batch = packed([mixed]).batch
    assert batch.experts is not None
    assert batch.experts.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], *[[-1, -1]] * 5]
    assert select(batch, [2, 0]).experts.tolist() == [*[[-1, -1]] * 3, [0, 1], [2, 3], [4, 5], [6, 7]]
    other = replace(second.rows[0], experts=np.zeros((3, 4), np.int16))
    differing = replace(mixed, rollouts=(rollouts[0], replace(second, rows=(other,))))
    with pytest.raises(LearnerError, match="different models"):
        packed([differing])


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_aggregations_by_hand(aggregation: str) -> None:
    batch = packed([group([1.0, 0.0], rows=MASKS)], aggregation).batch
    assert batch.weight[batch.loss_mask] == pytest.approx(EXPECTED[aggregation])
    assert not batch.weight[~batch.loss_mask].any()


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_a_row_without_a_sampled_token_is_in_no_denominator(aggregation: str) -> None:
    # A bug others shipped: a truncated row, masked out, was still counted as a sequence.
    with_empty = [[*MASKS[0], [0, 0, 0]], *MASKS[1:], [[0, 0]]]
    result = packed([group([1.0, 0.0, 0.0], rows=with_empty)], aggregation)
    assert result.dropped == {"nothing_sampled": 2}
    assert result.batch.weight[result.batch.loss_mask] == pytest.approx(EXPECTED[aggregation])
    # The same where such a row is in the batch.
    batch = packed([group([1.0, 0.0], rows=MASKS)]).batch
    longer = replace(
        batch,
        **{
            name: np.concatenate((getattr(batch, name), getattr(batch, name)[:1]))
            for name in ("token_ids", "position_ids", "loss_mask", "rollout_logprobs", "temperature", "advantages",
                         "weight", "versions")
        },
        cu_seqlens=np.append(batch.cu_seqlens, batch.cu_seqlens[-1] + 1).astype(np.int32),
        rollout_index=np.append(batch.rollout_index, 2).astype(np.int32),
    )  # fmt: skip
    found = weigh(longer, loss(aggregation))
    assert found.weight[found.loss_mask] == pytest.approx(EXPECTED[aggregation])


def test_invariant_22_a_rollout_split_into_rows_weighs_the_same() -> None:
    whole = packed([group([1.0, 0.0], rows=[[[0, 1, 1, 1, 1]], [[0, 1]]])], "rollout_mean").batch
    parts = packed([group([1.0, 0.0], rows=[[[0, 1, 1], [0, 1, 1]], [[0, 1]]])], "rollout_mean").batch
    assert whole.weight[whole.loss_mask] == pytest.approx(parts.weight[parts.loss_mask])
    assert whole.advantages[whole.loss_mask] == pytest.approx(parts.advantages[parts.loss_mask])


def test_rows_that_are_too_long_are_dropped_counted_and_kept_in_the_baseline() -> None:
    result = packed([group([1.0, 0.0], rows=[[[0, 1, 1, 1]], [[0, 1]]])], limit=3)
    assert result.dropped == {"too_long": 1}
    assert result.batch.weight[result.batch.loss_mask].tolist() == [1.0]  # it left the denominator
    assert result.batch.advantages[result.batch.loss_mask].tolist() == [-0.5]  # but the baseline counts it


def test_rollouts_of_different_groups_do_not_share_an_index() -> None:
    batch = packed([group([1.0, 0.0], name="a"), group([1.0, 0.0], name="b")]).batch
    assert batch.rollout_index.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_an_empty_batch_is_a_batch(aggregation: str) -> None:
    groups = [group([1.0], rows=[[[0, 0]]])]
    for given in (groups, []):
        batch = packed(given, aggregation).batch
        assert (batch.num_tokens, batch.num_rows, batch.num_sampled) == (0, 0, 0)
        assert batch.cu_seqlens.tolist() == [0]
        assert batch.token_ids.dtype == np.int32
        assert len(split(batch, 3, loss(aggregation))) == 1
    assert data_metrics(groups, packed(groups).batch)["data/num_rollouts"] == 1


def test_updates_of_a_step_are_weighed_like_steps_of_their_own() -> None:
    batch = packed([group([1.0, 0.0, 0.0], rows=[*MASKS, [[0, 1]]])], "constant_length").batch
    first, second = split(batch, 2, loss("constant_length"))
    assert (first.rollout_index.tolist(), second.rollout_index.tolist()) == ([0, 0, 1], [2])
    assert first.weight[first.loss_mask] == pytest.approx(EXPECTED["constant_length"])
    assert second.weight[second.loss_mask] == pytest.approx([1 / 10])
    assert second.advantages[second.loss_mask] == pytest.approx([-1 / 3])  # the group's baseline is the step's


def test_no_more_updates_than_rollouts() -> None:
    batch = packed([group([1.0, 0.0])]).batch
    assert [part.num_rows for part in split(batch, 5, loss())] == [1, 1]
    with pytest.raises(LearnerError, match="at least 1 part"):
        split(batch, 0, loss())


def test_selecting_no_rows() -> None:
    none = select(packed([group([1.0, 0.0])]).batch, [])
    assert (none.num_rows, none.num_tokens, none.num_sampled) == (0, 0, 0)


def test_the_driver_needs_no_torch() -> None:
    modules = (
        "rlagent.loading, rlagent.trainer.advantage, rlagent.trainer.aggregation, rlagent.trainer.batch, "
        "rlagent.trainer.metrics, rlagent.trainer.plan, rlagent.train, rlagent.cli"
    )
    code = f"import sys, {modules}; sys.exit(7 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
