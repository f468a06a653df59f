"""Groups to a Batch: advantages, then packing, then the aggregation's weights. Pure numpy; runs in the driver.

Invariant: a row that holds no sampled token, or is too long, leaves the batch only after the advantages were computed, so
dropping it moves no baseline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlagent.errors import LearnerError
from rlagent.trainer.aggregation import AGGREGATIONS
from rlagent.trainer.config import AdvantageConfig, LossConfig
from rlagent.trainer.credit_rows import credit, token_rewards
from rlagent.types import Batch, Group, Int16Array, Trajectory

_TOKEN_FIELDS = ("token_ids", "position_ids", "loss_mask", "rollout_logprobs", "temperature", "advantages", "weight",
                 "versions")  # fmt: skip
_OPTIONAL_TOKEN_FIELDS = ("rewards", "values", "returns", "teacher_logprobs", "experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """A step's batch, and how many rows were left out of it, by reason."""

    batch: Batch
    dropped: Mapping[str, int]


def pack(
    groups: Sequence[Group],
    *,
    advantage: AdvantageConfig,
    loss: LossConfig,
    max_row_tokens: int,
    version: int | None = None,
) -> PackResult:
    """All trainable rows of the groups, in order, with advantages and weights. version: what the learner stands at."""
    values = credit(groups, advantage)
    rollouts = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    rows: list[Trajectory] = []
    owners: list[int] = []
    spread: list[float | npt.NDArray[np.float64]] = []
    rewards: list[npt.NDArray[np.float64]] = []
    dropped: dict[str, int] = {}
    for index, (_, rollout) in enumerate(rollouts):
        earned = token_rewards(rollout, advantage) if advantage.name == "gae" else []
        for place, row in enumerate(rollout.rows):
            reason = "too_long" if len(row) > max_row_tokens else "" if row.loss_mask.any() else "nothing_sampled"
            if reason:
                dropped[reason] = dropped.get(reason, 0) + 1
                continue
            rows.append(row)
            owners.append(index)
            spread.append(values[rollout.rollout_id][place])
            rewards += earned[place : place + 1]
    batch = replace(
        _concatenate(rows, owners, spread),
        group_index=np.array([rollouts[owner][0] for owner in owners], dtype=np.int32),
        rewards=np.concatenate(rewards).astype(np.float32) if rewards else None,
        version=version,
    )
    return PackResult(batch=weigh(batch, loss), dropped=dropped)


def weigh(batch: Batch, loss: LossConfig) -> Batch:
    """Fold the aggregation into `weight`: afterwards the objective is sum(weight * per-token loss)."""
    if not batch.num_sampled:
        return batch
    lengths = row_sums(batch, batch.loss_mask.astype(np.int64))
    per_row = AGGREGATIONS[loss.aggregation](lengths, batch.rollout_index.astype(np.int64), loss.constant_length)
    per_token = np.repeat(per_row, np.diff(batch.cu_seqlens))
    return replace(batch, weight=np.where(batch.loss_mask, per_token, np.float32(0)))


def row_sums(batch: Batch, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sum of a per-token integer over each row, [B]."""
    total = np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))
    return total[batch.cu_seqlens[1:]] - total[batch.cu_seqlens[:-1]]


def select(batch: Batch, rows: Sequence[int]) -> Batch:
    """The batch of some rows only, in the order given; weights stay, so that parts of one step still sum to it."""
    index = np.asarray(rows, dtype=np.int64)
    lengths = np.diff(batch.cu_seqlens)[index]
    pieces = [np.arange(batch.cu_seqlens[row], batch.cu_seqlens[row + 1]) for row in index]
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
    taken = {name: getattr(batch, name)[tokens] for name in _TOKEN_FIELDS}
    optional: dict[str, Any] = {name: _at(getattr(batch, name), tokens) for name in _OPTIONAL_TOKEN_FIELDS}
    return replace(
        batch,
        **taken,
        **optional,
        group_index=None if batch.group_index is None else batch.group_index[index],
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        rollout_index=batch.rollout_index[index],
        num_sampled=int(taken["loss_mask"].sum()),
    )


def _at(values: npt.NDArray[Any] | None, tokens: npt.NDArray[np.int64]) -> npt.NDArray[Any] | None:
    return None if values is None else values[tokens]


def split(batch: Batch, parts: int, loss: LossConfig) -> list[Batch]:
    """Up to `parts` batches, each an update of its own and weighed like a whole step.

    A rollout's rows stay together, rollouts keep their order.
    """
    if parts < 1:
        raise LearnerError(f"a batch is split into at least 1 part, not {parts}")
    ids = np.unique(batch.rollout_index)
    chunks = np.array_split(ids, min(parts, max(1, len(ids))))
    rows = [np.flatnonzero(np.isin(batch.rollout_index, chunk)).tolist() for chunk in chunks]
    return [weigh(select(batch, chosen), loss) for chosen in rows]


def _concatenate(
    rows: Sequence[Trajectory], owners: Sequence[int], values: Sequence[float | npt.NDArray[np.float64]]
) -> Batch:
    lengths = [len(row) for row in rows]

    def join(pieces: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype=dtype)

    mask = join([row.loss_mask for row in rows], np.bool_).astype(np.bool_)
    each = [np.broadcast_to(np.asarray(value, dtype=np.float32), n) for value, n in zip(values, lengths, strict=True)]
    spread = join(list(each), np.float32).astype(np.float32, copy=False)
    return Batch(
        token_ids=join([row.token_ids for row in rows], np.int32).astype(np.int32, copy=False),
        position_ids=join([np.arange(n, dtype=np.int32) for n in lengths], np.int32).astype(np.int32, copy=False),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=join([row.logprobs for row in rows], np.float32).astype(np.float32, copy=False),
        temperature=join([row.temperature for row in rows], np.float32).astype(np.float32, copy=False),
        advantages=np.where(mask, spread, np.float32(0)),
        weight=np.zeros(len(mask), dtype=np.float32),
        versions=join([row.versions for row in rows], np.int32).astype(np.int32, copy=False),
        rollout_index=np.asarray(owners, dtype=np.int32),
        num_sampled=int(mask.sum()),
        experts=_experts(rows),
    )


def _experts(rows: Sequence[Trajectory]) -> Int16Array | None:
    """Of all rows, -1 where a row has none; None where no row has any."""
    widths = {row.experts.shape[1] for row in rows if row.experts is not None}
    if not widths:
        return None
    if len(widths) > 1:
        raise LearnerError(f"rows hold {sorted(widths)} expert ids a token: they are of engines of different models")
    (width,) = widths
    unknown = [np.full((len(row), width), -1, np.int16) if row.experts is None else row.experts for row in rows]
    return np.concatenate(unknown)
