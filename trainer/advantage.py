"""Advantage estimators that give a rollout one number (every sampled token gets it); those by token are in `credit_rows`.

In the flow: leased groups -> advantages -> batch. Baselines count each rollout once, however many rows it has: fan-out into sub-agents
never moves a baseline. Pure numpy. Add one by `advantage.name = "file.py:function"` with the signature of `Estimator`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

from rlagent.errors import LearnerError
from rlagent.loading import load_function
from rlagent.trainer.config import AdvantageConfig, OverlongConfig
from rlagent.types import GREEDY, Group, Rollout

FloatArray = npt.NDArray[np.float64]
PerRollout = Float64[FloatArray, " rollouts"]
# (rewards, lengths: sampled tokens of each rollout, epsilon) -> advantages
Estimator = Callable[[PerRollout, PerRollout, float], PerRollout]


def grpo(rewards: PerRollout, lengths: PerRollout, epsilon: float) -> PerRollout:
    """(R - mean) / (std + eps), std with ddof 1 (DeepSeekMath, arXiv 2402.03300, sec. 4.1.2). 0 without variance."""
    centred = dr_grpo(rewards, lengths, epsilon)
    std = rewards.std(ddof=1) if centred.any() else 0.0
    if not std:  # also of rewards so close that the squares of their differences underflow
        return np.zeros_like(rewards)
    scaled: PerRollout = centred / (std + epsilon)
    return scaled


def dr_grpo(rewards: PerRollout, lengths: PerRollout, epsilon: float) -> PerRollout:
    """R - mean (Dr. GRPO, arXiv 2503.20783, sec. 3.2)."""
    del lengths, epsilon
    if len(rewards) < 2 or (rewards == rewards[0]).all():  # exactly 0, not what rounding leaves
        return np.zeros_like(rewards)
    centred: PerRollout = rewards - rewards.mean()
    return centred


def rloo(rewards: PerRollout, lengths: PerRollout, epsilon: float) -> PerRollout:
    """R minus the mean of the others = n / (n - 1) (R - mean) (RLOO, arXiv 2402.14740, sec. 2.3)."""
    n = len(rewards)
    return dr_grpo(rewards, lengths, epsilon) * (n / max(1, n - 1))


def opo(rewards: PerRollout, lengths: PerRollout, epsilon: float) -> PerRollout:
    """R - sum(L R) / sum(L): the length-weighted optimal baseline (OPO, arXiv 2505.23585)."""
    del epsilon
    if len(rewards) < 2 or (rewards == rewards[0]).all() or not lengths.any():
        return np.zeros_like(rewards)
    centred: PerRollout = rewards - (lengths @ rewards) / lengths.sum()
    return centred


def preference(rewards: PerRollout, lengths: PerRollout, epsilon: float) -> PerRollout:
    """+1 for the best rollout of the group, -1 for the worst, 0 for the rest: the pair of DPO. 0 without variance."""
    del lengths, epsilon
    found = np.zeros_like(rewards)
    if len(rewards) > 1 and not (rewards == rewards[0]).all():
        found[rewards.argmax()], found[rewards.argmin()] = 1.0, -1.0
    return found


# Whitened over all rollouts of the batch after the group baseline, below.
_WHITENED: Final[Mapping[str, Estimator]] = {"reinforce_pp_baseline": dr_grpo}
_BY_NAME: Final[Mapping[str, Estimator]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "opo": opo,
                                               "preference": preference, **_WHITENED}  # fmt: skip


def shaped(rollout: Rollout, config: OverlongConfig) -> Rollout:
    """The rollout with one more reward component, "overlong", where it is too long (DAPO, arXiv 2503.14476, eq. 13).

    min(-(L - (Lmax - buffer)) / buffer * penalty, 0), and -penalty beyond Lmax.
    """
    if config.max_tokens is None:
        return rollout
    over = (sampled_tokens(rollout) - (config.max_tokens - config.buffer)) / config.buffer
    punishment = -config.penalty * min(1.0, max(0.0, over))
    if not punishment:
        return rollout
    components = {**rollout.reward.components, "overlong": punishment}
    return replace(rollout, reward=replace(rollout.reward, components=components))


def sampled_tokens(rollout: Rollout) -> int:
    """Sampled tokens of all of a rollout's rows."""
    return sum(int(row.loss_mask.sum()) for row in rollout.rows)


def compared(groups: Sequence[Group], config: AdvantageConfig) -> list[list[Rollout]]:
    """The rollouts that are compared with one another, their rewards shaped.

    Ungrouped bundles share one baseline over all of them in the batch, or are refused, by config.ungrouped.
    """
    loose = [shaped(rollout, config.overlong) for group in groups if group.ungrouped for rollout in group.rollouts]
    if loose and config.ungrouped == "error":
        raise LearnerError(
            f"{len(loose)} rollouts of this batch name no group, and learner.advantage.ungrouped = 'error'; give their "
            "sessions a group_id, or set it to 'batch_mean'"
        )
    named = [[shaped(r, config.overlong) for r in group.rollouts] for group in groups if not group.ungrouped]
    return named + ([loose] if loose else [])


def advantages(groups: Sequence[Group], config: AdvantageConfig) -> dict[str, float]:
    """Advantage of each rollout by its id."""
    found: dict[str, float] = {}
    for rollouts in compared(groups, config):
        lengths = np.array([sampled_tokens(rollout) for rollout in rollouts], dtype=np.float64)
        values = _of_group(rollouts, lengths, config)
        rewards = [rollout.reward.total for rollout in rollouts]
        if values.shape != lengths.shape or not np.isfinite(values).all():
            raise LearnerError(f"advantage estimator {config.name!r} gave {values!r} for rewards {rewards!r}")
        found |= {rollout.rollout_id: float(value) for rollout, value in zip(rollouts, values, strict=True)}
    whitened = config.name in _WHITENED or config.name == "gdpo"
    return _whiten(found, groups, config.epsilon) if whitened else found


def estimator(name: str) -> Estimator:
    """That of a name, or by file.py:function. LoadError when there is none there."""
    return _BY_NAME.get(name) or load_function(name, what="learner.advantage.name")


def _of_group(rollouts: Sequence[Rollout], lengths: PerRollout, config: AdvantageConfig) -> FloatArray:
    rewards = np.array([rollout.reward.total for rollout in rollouts], dtype=np.float64)
    if config.name == "remax":
        return rewards - _greedy(rollouts)
    if config.name == "gdpo":
        return _gdpo(rollouts, config)
    values: FloatArray = estimator(config.name)(rewards, lengths, config.epsilon)
    return values


def _greedy(rollouts: Sequence[Rollout]) -> FloatArray:
    """R_greedy of each rollout's task, the baseline of ReMax (arXiv 2310.10505): R - R_greedy."""
    missing = [rollout.rollout_id for rollout in rollouts if GREEDY not in rollout.reward.calls]
    if missing:
        raise LearnerError(
            f"learner.advantage.name = 'remax', but {len(missing)} rollouts (first: {missing[0]}) have no reward of their "
            f"task's greedy rollout; give it as the reward of the call {GREEDY!r}, as rollout.function does by itself"
        )
    return np.array([rollout.reward.calls[GREEDY] for rollout in rollouts], dtype=np.float64)


def _gdpo(rollouts: Sequence[Rollout], config: AdvantageConfig) -> FloatArray:
    """Each reward component's z-score within the group, then their weighted sum (GDPO, arXiv 2601.05242)."""
    names = sorted(config.components or {name for rollout in rollouts for name in rollout.reward.components})
    found = np.zeros(len(rollouts))
    for name in names:
        rewards = np.array([rollout.reward.components.get(name, 0.0) for rollout in rollouts], dtype=np.float64)
        found += config.components.get(name, 1.0) * grpo(rewards, rewards, config.epsilon)
    return found


def _whiten(values: dict[str, float], groups: Sequence[Group], epsilon: float) -> dict[str, float]:
    """Divide by the standard deviation over all sampled tokens of the batch (REINFORCE++, arXiv 2501.03262)."""
    lengths = {rollout.rollout_id: sampled_tokens(rollout) for group in groups for rollout in group.rollouts}
    weights = np.array([lengths[rollout_id] for rollout_id in values], dtype=np.float64)
    a = np.array(list(values.values()))
    if not weights.sum() or not a.any():
        return values
    mean = weights @ a / weights.sum()
    std = np.sqrt(weights @ (a - mean) ** 2 / weights.sum())
    if not std:  # one rollout holds all the tokens
        return dict.fromkeys(values, 0.0)
    return {rollout_id: float((value - mean) / (std + epsilon)) for rollout_id, value in values.items()}
