"""Metrics under their exact formulas: from sums of a step to what is written to metrics.jsonl. No torch.

Names: mismatch/* compares the engine with the learner (w = exp(lp_old - lp_roll)), policy/* the update, reward/*, response/* and data/*
the batch, freshness/* how old its tokens are.
"""

from collections.abc import Mapping, Sequence
from typing import SupportsFloat

import numpy as np

from rlagent.types import Batch, Group

_MEANS = {
    "ratio": "policy/ratio_mean",
    "approx_kl": "policy/approx_kl",
    "clip_low": "policy/clip_low",
    "clip_high": "policy/clip_high",
    "entropy": "policy/entropy",
    "kl_reference": "policy/kl_reference",
    "correction_rejected": "policy/correction_rejected",
    "mismatch_kl": "mismatch/kl",
    "mismatch_k3": "mismatch/k3",
    "mismatch_abs": "mismatch/abs_mean",
    "mismatch_exp_abs": "mismatch/exp_abs_mean",
}
_MAXIMA = {"max:ratio": "policy/ratio_max", "max:mismatch_abs": "mismatch/abs_max"}


def reduce(stats: Mapping[str, SupportsFloat], num_sampled: int) -> dict[str, float]:
    """A step's metrics from the sums (and "max:" maxima) over all its microbatches and ranks.

    chi2 = mean(w^2) - 1; ESS = 1 / mean((w / mean w)^2); every mean is over the step's sampled tokens.
    """
    count = max(1, num_sampled)
    found = {name: float(stats[key]) / count for key, name in _MEANS.items() if key in stats}
    found |= {name: float(stats[key]) for key, name in _MAXIMA.items() if key in stats}
    if "loss" in stats:
        found["policy/loss"] = float(stats["loss"])
    if "w" in stats and "w_squared" in stats:
        mean, square = float(stats["w"]) / count, float(stats["w_squared"]) / count
        found["mismatch/chi2"] = square - 1
        found["mismatch/ess"] = mean**2 / square if square else 0.0
    return found


def data_metrics(groups: Sequence[Group], batch: Batch, *, version: int | None = None) -> dict[str, float]:
    """What a batch is made of. version: the policy the learner stands at; lag counts versions (publishes, off a resume)."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([rollout.reward.total for rollout in rollouts] or [np.nan])
    lengths = np.array([sum(int(row.loss_mask.sum()) for row in r.rows) for r in rollouts] or [0])
    flat = [len({r.reward.total for r in group.rollouts}) <= 1 for group in groups if not group.ungrouped]
    found = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/median": float(np.median(rewards)),
        "reward/max": float(rewards.max()),
        "reward/groups_without_variance": float(np.mean(flat)) if flat else 0.0,
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(np.mean([any(row.truncated for row in r.rows) for r in rollouts] or [False])),
        "data/num_groups": float(len(groups)),
        "data/num_rollouts": float(len(rollouts)),
        "data/num_missing": float(sum(group.num_missing for group in groups)),
        "data/num_rows": float(batch.num_rows),
        "data/num_tokens": float(batch.num_tokens),
        "data/num_sampled": float(batch.num_sampled),
    }
    for name in sorted({name for r in rollouts for name in r.reward.components}):
        found[f"reward/component/{name}"] = float(np.mean([r.reward.components.get(name, 0.0) for r in rollouts]))
    sampled = batch.versions[batch.loss_mask]
    if version is not None and len(sampled):
        lag = np.maximum(0, version - sampled)
        found["freshness/lag_mean"], found["freshness/lag_max"] = float(lag.mean()), float(lag.max())
    return found
