"""How a per-token loss becomes one number: a weight for each sampled token, computed once for the whole step.

With the weights folded into the batch, microbatches and ranks only sum; so no split of the work changes the objective.
Invariant: a row or rollout without a sampled token is in no denominator.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from jaxtyping import Float32, Int64

from rlagent.types import Float32Array, Int64Array

RowIndex = Int64[Int64Array, " rows"]
RowWeight = Float32[Float32Array, " rows"]
# (sampled tokens of each row, not all 0; rollout of each row; constant length) -> weight of a row's tokens
Aggregation = Callable[[RowIndex, RowIndex, int], RowWeight]


def token_mean(lengths: RowIndex, rollouts: RowIndex, constant: int) -> RowWeight:
    """Every sampled token of the step counts the same (DAPO, arXiv 2503.14476, sec. 3.3)."""
    del rollouts, constant
    return np.full(len(lengths), 1.0 / lengths.sum(), dtype=np.float32)


def seq_mean_token_sum(lengths: RowIndex, rollouts: RowIndex, constant: int) -> RowWeight:
    """Sum over a row's tokens, mean over rows."""
    del rollouts, constant
    return np.full(len(lengths), 1.0 / np.count_nonzero(lengths), dtype=np.float32)


def seq_mean_token_mean(lengths: RowIndex, rollouts: RowIndex, constant: int) -> RowWeight:
    """Mean over a row's tokens, mean over rows (GRPO, arXiv 2402.03300, eq. 3)."""
    del rollouts, constant
    return (1.0 / (np.count_nonzero(lengths) * np.maximum(1, lengths))).astype(np.float32)


def constant_length(lengths: RowIndex, rollouts: RowIndex, constant: int) -> RowWeight:
    """Sum over a row's tokens divided by a constant, mean over rows (Dr. GRPO, arXiv 2503.20783, sec. 3.2)."""
    del rollouts
    return np.full(len(lengths), 1.0 / (np.count_nonzero(lengths) * constant), dtype=np.float32)


def rollout_mean(lengths: RowIndex, rollouts: RowIndex, constant: int) -> RowWeight:
    """Mean over a rollout's tokens, mean over rollouts: one that is split into k rows counts once."""
    del constant
    totals = np.bincount(rollouts, weights=lengths)
    return (1.0 / (np.count_nonzero(totals) * np.maximum(1, totals[rollouts]))).astype(np.float32)


AGGREGATIONS: Final[Mapping[str, Aggregation]] = {
    "token_mean": token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_mean": seq_mean_token_mean,
    "constant_length": constant_length,
    "rollout_mean": rollout_mean,
}
