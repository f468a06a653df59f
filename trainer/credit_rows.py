"""Credit by token, from rewards alone: what each row of a batch is given where a rollout's one number is not enough.

In the flow: `batch.pack` asks for every row's advantages, and for the rewards by token that gae needs. Pure numpy.
Invariant: a group whose rollouts do not differ in any reward gives 0 (but for reinforce_pp, whose baseline is the batch's).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from rlagent.trainer.advantage import FloatArray, advantages, compared, dr_grpo, shaped
from rlagent.trainer.config import AdvantageConfig
from rlagent.types import Group, Rollout, Trajectory

# By rollout id, of each of its rows in order: a number for all of its tokens, or one a token [T].
RowCredit = Mapping[str, Sequence[float | FloatArray]]
_BY_THE_LEARNER: Final = "gae"  # needs the critic's values: `rlagent.trainer.credit`


def credit(groups: Sequence[Group], config: AdvantageConfig) -> RowCredit:
    """Advantages of every row. Those of gae are 0 here: the learner has the values."""
    if config.name == "reinforce_pp":
        return _reinforce_pp(groups, config)
    if config.name == "turn_level":
        return _turn_level(groups, config)
    if config.name == _BY_THE_LEARNER:
        return {r.rollout_id: [0.0] * len(r.rows) for group in groups for r in group.rollouts}
    values = advantages(groups, config)
    return {r.rollout_id: [values[r.rollout_id]] * len(r.rows) for group in groups for r in group.rollouts}


def token_rewards(rollout: Rollout, config: AdvantageConfig) -> list[FloatArray]:
    """Of each row [T]: a call's own reward at its last sampled token, the rollout's total at the row's last."""
    total = shaped(rollout, config.overlong).reward.total
    return [_earned(row, rollout.reward.calls, total) for row in rollout.rows]


def _earned(row: Trajectory, calls: Mapping[str, float], total: float) -> FloatArray:
    found = np.zeros(len(row))
    places = np.flatnonzero(row.loss_mask)
    if not len(places):
        return found
    for turn, call_id in enumerate(row.call_ids):
        own = places[row.turn[places] == turn]
        if len(own):
            found[own[-1]] += calls.get(call_id, 0.0)
    found[places[-1]] += total
    return found


def _reinforce_pp(groups: Sequence[Group], config: AdvantageConfig) -> RowCredit:
    """Discounted return of each sampled token, whitened over those of the batch (REINFORCE++, arXiv 2501.03262)."""
    rollouts = [shaped(rollout, config.overlong) for group in groups for rollout in group.rollouts]
    found = {r.rollout_id: [_discounted(row, r.reward.total, config.gamma) for row in r.rows] for r in rollouts}
    sampled = [values[row.loss_mask] for r in rollouts for row, values in zip(r.rows, found[r.rollout_id], strict=True)]
    every = np.concatenate(sampled) if sampled else np.zeros(0)
    if not len(every) or (every == every[0]).all():
        return {name: [np.zeros_like(values) for values in rows] for name, rows in found.items()}
    mean, std = every.mean(), every.std()
    return {name: [(values - mean) / (std + config.epsilon) for values in rows] for name, rows in found.items()}


def _discounted(row: Trajectory, reward: float, gamma: float) -> FloatArray:
    """gamma^k R, k the sampled tokens that follow in the row."""
    following = row.loss_mask.sum() - np.cumsum(row.loss_mask)
    values: FloatArray = reward * gamma ** following.astype(np.float64)
    return values


def _turn_level(groups: Sequence[Group], config: AdvantageConfig) -> RowCredit:
    """The outcome's centred reward, plus each turn's discounted return of call rewards minus the group's mean at that turn.

    MT-GRPO (arXiv 2505.11821) with returns in place of a turn's own reward; a turn that one rollout alone reached adds 0.
    """
    found: dict[str, list[float | FloatArray]] = {}
    for rollouts in compared(groups, config):
        totals = np.array([rollout.reward.total for rollout in rollouts], dtype=np.float64)
        outcome = dr_grpo(totals, totals, config.epsilon)
        returns = {r.rollout_id: [_turn_returns(row, r.reward.calls, config.gamma) for row in r.rows] for r in rollouts}
        at_turn: defaultdict[int, list[float]] = defaultdict(list)
        for rows in returns.values():
            for turn in range(max((len(row) for row in rows), default=0)):
                at_turn[turn].append(float(np.mean([row[turn] for row in rows if turn < len(row)])))
        means = {turn: float(np.mean(values)) for turn, values in at_turn.items()}
        for rollout, base in zip(rollouts, outcome, strict=True):
            found[rollout.rollout_id] = [
                np.array([base + r - means[turn] for turn, r in enumerate(own)])[row.turn]
                for row, own in zip(rollout.rows, returns[rollout.rollout_id], strict=True)
            ]
    return found


def _turn_returns(row: Trajectory, calls: Mapping[str, float], gamma: float) -> FloatArray:
    """G_k = r_k + gamma G_(k+1) over the calls of a row's chain."""
    found = np.zeros(len(row.call_ids))
    following = 0.0
    for turn in range(len(row.call_ids) - 1, -1, -1):
        found[turn] = following = calls.get(row.call_ids[turn], 0.0) + gamma * following
    return found
