"""Metrics under their exact formulas: from sums of a step to what is written to metrics.jsonl. No torch.

Names: mismatch/* compares the engine with the learner (w = exp(lp_old - lp_roll)), mismatch_fresh/* the same over the tokens sampled
by the version that the learner holds (what is left is disagreement, not staleness); policy/* the update, reward/*, response/* and
data/* the batch, freshness/* how old its tokens are.
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
}
_MISMATCH_MEANS = {
    "mismatch_kl": "kl",
    "mismatch_k3": "k3",
    "mismatch_abs": "abs_mean",
    "mismatch_exp_abs": "exp_abs_mean",
}


def reduce(stats: Mapping[str, SupportsFloat], num_sampled: int) -> dict[str, float]:
    """A step's metrics from the sums (and "max:" maxima) over all its microbatches and ranks.

    chi2 = mean(w^2) - 1; ESS = 1 / mean((w / mean w)^2); every mean is over the step's sampled tokens.
    """
    count = max(1, num_sampled)
    found = {name: float(stats[key]) / count for key, name in _MEANS.items() if key in stats}
    if "max:ratio" in stats:
        found["policy/ratio_max"] = float(stats["max:ratio"])
    if "loss" in stats:
        found["policy/loss"] = float(stats["loss"])
    found |= {f"mismatch/{name}": value for name, value in _mismatch(stats, "", count).items()}
    fresh = int(float(stats["fresh_count"])) if "fresh_count" in stats else 0
    if fresh:
        found |= {f"mismatch_fresh/{name}": value for name, value in _mismatch(stats, "fresh_", fresh).items()}
    if "fresh_count" in stats:
        found["mismatch_fresh/share"] = fresh / count
    return found


def _mismatch(stats: Mapping[str, SupportsFloat], prefix: str, count: int) -> dict[str, float]:
    found = {name: float(stats[prefix + key]) / count for key, name in _MISMATCH_MEANS.items() if prefix + key in stats}
    if f"max:{prefix}mismatch_abs" in stats:
        found["abs_max"] = float(stats[f"max:{prefix}mismatch_abs"])
    if f"{prefix}w" in stats and f"{prefix}w_squared" in stats:
        mean, square = float(stats[f"{prefix}w"]) / count, float(stats[f"{prefix}w_squared"]) / count
        found["chi2"] = square - 1
        found["ess"] = mean**2 / square if square else 0.0
    return found


def data_metrics(groups: Sequence[Group], batch: Batch, *, lags: Mapping[int, int] | None = None) -> dict[str, float]:
    """What a batch is made of. lags: by version, how many publishes lie between it and the policy the learner stands at."""
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
    if lags is not None and len(sampled):
        lag = np.array([lags.get(version, 0) for version in sampled.tolist()])
        found["freshness/lag_mean"], found["freshness/lag_max"] = float(lag.mean()), float(lag.max())
    return found
