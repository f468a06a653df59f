"""Advantage estimators: a group's rewards in, one number a rollout out (every sampled token of the rollout gets it).

In the flow: leased groups -> advantages -> batch. Baselines count each rollout once, however many rows it has: fan-out into sub-agents
never moves a baseline. Pure numpy. Add one by `advantage.name = "file.py:function"` with the signature of `Estimator`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rlagent.errors import LearnerError
from rlagent.loading import load_function
from rlagent.trainer.config import AdvantageConfig
from rlagent.types import Group

FloatArray = npt.NDArray[np.float64]
# (rewards [n], lengths [n]: sampled tokens of each rollout, epsilon) -> advantages [n]
Estimator = Callable[[FloatArray, FloatArray, float], FloatArray]


def grpo(rewards: FloatArray, lengths: FloatArray, epsilon: float) -> FloatArray:
    """(R - mean) / (std + eps), std with ddof 1 (DeepSeekMath, arXiv 2402.03300, sec. 4.1.2). 0 without variance."""
    centred = dr_grpo(rewards, lengths, epsilon)
    std = rewards.std(ddof=1) if centred.any() else 0.0
    if not std:  # also of rewards so close that the squares of their differences underflow
        return np.zeros_like(rewards)
    scaled: FloatArray = centred / (std + epsilon)
    return scaled


def dr_grpo(rewards: FloatArray, lengths: FloatArray, epsilon: float) -> FloatArray:
    """R - mean (Dr. GRPO, arXiv 2503.20783, eq. 3)."""
    del lengths, epsilon
    if len(rewards) < 2 or (rewards == rewards[0]).all():  # exactly 0, not what rounding leaves
        return np.zeros_like(rewards)
    centred: FloatArray = rewards - rewards.mean()
    return centred


def rloo(rewards: FloatArray, lengths: FloatArray, epsilon: float) -> FloatArray:
    """R minus the mean of the others = n / (n - 1) (R - mean) (RLOO, arXiv 2402.14740, eq. 8)."""
    n = len(rewards)
    return dr_grpo(rewards, lengths, epsilon) * (n / max(1, n - 1))


def opo(rewards: FloatArray, lengths: FloatArray, epsilon: float) -> FloatArray:
    """R - sum(L R) / sum(L): the length-weighted optimal baseline (OPO, arXiv 2505.23585, eq. 8)."""
    del epsilon
    if len(rewards) < 2 or (rewards == rewards[0]).all() or not lengths.any():
        return np.zeros_like(rewards)
    centred: FloatArray = rewards - (lengths @ rewards) / lengths.sum()
    return centred


# Whitened over all rollouts of the batch after the group baseline, below.
_WHITENED: Final[Mapping[str, Estimator]] = {"reinforce_pp_baseline": dr_grpo}
_BY_NAME: Final[Mapping[str, Estimator]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "opo": opo, **_WHITENED}


def advantages(groups: Sequence[Group], config: AdvantageConfig) -> dict[str, float]:
    """Advantage of each rollout by its id.

    Ungrouped bundles share one baseline over all of them in the batch, or are refused, by config.ungrouped.
    """
    estimator = _BY_NAME.get(config.name) or load_function(
        config.name, what=f"advantage estimator (known by name: {', '.join(sorted(_BY_NAME))}; else file.py:function)"
    )
    loose = [rollout for group in groups if group.ungrouped for rollout in group.rollouts]
    if loose and config.ungrouped == "error":
        raise LearnerError(
            f"{len(loose)} rollouts of this batch name no group, and learner.advantage.ungrouped = 'error'; give their "
            "sessions a group_id, or set it to 'batch_mean'"
        )
    compared = [group.rollouts for group in groups if not group.ungrouped] + ([loose] if loose else [])
    found: dict[str, float] = {}
    for rollouts in compared:
        rewards = np.array([rollout.reward.total for rollout in rollouts], dtype=np.float64)
        lengths = np.array([sum(int(row.loss_mask.sum()) for row in r.rows) for r in rollouts], dtype=np.float64)
        values = estimator(rewards, lengths, config.epsilon)
        if values.shape != rewards.shape or not np.isfinite(values).all():
            raise LearnerError(f"advantage estimator {config.name!r} gave {values!r} for rewards {rewards!r}")
        found |= {rollout.rollout_id: float(value) for rollout, value in zip(rollouts, values, strict=True)}
    return _whiten(found, groups, config.epsilon) if config.name in _WHITENED else found


def _whiten(values: dict[str, float], groups: Sequence[Group], epsilon: float) -> dict[str, float]:
    """Divide by the standard deviation over all sampled tokens of the batch (REINFORCE++, arXiv 2501.03262, eq. 10)."""
    lengths = {r.rollout_id: sum(int(row.loss_mask.sum()) for row in r.rows) for g in groups for r in g.rollouts}
    weights = np.array([lengths[rollout_id] for rollout_id in values], dtype=np.float64)
    a = np.array(list(values.values()))
    if not weights.sum() or not a.any():
        return values
    mean = weights @ a / weights.sum()
    std = np.sqrt(weights @ (a - mean) ** 2 / weights.sum())
    if not std:  # one rollout holds all the tokens
        return dict.fromkeys(values, 0.0)
    return {rollout_id: float((value - mean) / (std + epsilon)) for rollout_id, value in values.items()}
