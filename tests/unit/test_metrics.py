"""Learner metrics under their exact formulas, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from groups import group
from streams import run, streams

from rlagent.trainer.batch import pack
from rlagent.trainer.config import AdvantageConfig, LossConfig
from rlagent.trainer.metrics import data_metrics, reduce
from rlagent.types import Batch, Group, Reward


def packed(groups: list[Group]) -> Batch:
    return pack(groups, advantage=AdvantageConfig(), loss=LossConfig(), max_row_tokens=100).batch


def test_mismatch() -> None:
    metrics = reduce(run(streams()).stats, 4)
    gaps = [0.1, -0.1, 0.0, -0.2]  # lp_roll - lp_old
    w = [math.exp(-gap) for gap in gaps]
    mean = sum(w) / 4
    expected = {
        "kl": sum(gaps) / 4,
        "k3": sum(x - 1 + gap for x, gap in zip(w, gaps, strict=True)) / 4,
        "abs_mean": 0.1,
        "abs_max": 0.2,
        "exp_abs_mean": (2 * math.exp(0.1) + 1 + math.exp(0.2)) / 4,
        "chi2": sum(x * x for x in w) / 4 - 1,
        "ess": 1 / (sum((x / mean) ** 2 for x in w) / 4),
    }
    assert {name: metrics[f"mismatch/{name}"] for name in expected} == pytest.approx(expected)


def test_policy() -> None:
    metrics = reduce(run(streams()).stats, 4)
    logs = [0.2, 0.0, -0.3, -0.4]  # lp - lp_old
    ratios = [math.exp(x) for x in logs]
    assert metrics["policy/ratio_mean"] == pytest.approx(sum(ratios) / 4)
    assert metrics["policy/ratio_max"] == pytest.approx(math.exp(0.2))
    assert metrics["policy/approx_kl"] == pytest.approx(sum(r - 1 - x for r, x in zip(ratios, logs, strict=True)) / 4)
    assert (metrics["policy/clip_low"], metrics["policy/clip_high"]) == (0.5, 0.0)
    assert metrics["policy/loss"] == run(streams()).loss.item()


def test_without_mismatch_the_sample_size_is_whole() -> None:
    metrics = reduce(run(streams(rollout_logprobs=streams().old_logprobs)).stats, 4)
    assert (metrics["mismatch/chi2"], metrics["mismatch/ess"], metrics["mismatch/abs_max"]) == (0.0, 1.0, 0.0)


def test_one_heavy_token_is_a_sample_size_of_one_in_n() -> None:
    s = streams(rollout_logprobs=streams().old_logprobs - torch.tensor([9.0, 0, 0, 0, 0]))
    assert reduce(run(s).stats, 4)["mismatch/ess"] == pytest.approx(1 / 4, rel=1e-3)


def test_a_step_without_tokens_has_finite_metrics() -> None:
    found = reduce(run(streams(loss_mask=torch.zeros(5, dtype=torch.bool))).stats, 0)
    assert all(math.isfinite(value) for value in found.values())


def test_rewards_lengths_and_counts() -> None:
    groups = [
        group([1.0, 0.0], name="a", rows=[[[0, 1, 1, 1], [0, 1]], [[0, 1, 1]]]),
        replace(group([0.5, 0.5], name="b"), num_missing=2),
    ]
    found = data_metrics(groups, packed(groups))
    assert found == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": np.std([1, 0, 0.5, 0.5]),
            "reward/min": 0.0,
            "reward/median": 0.5,
            "reward/max": 1.0,
            "reward/groups_without_variance": 0.5,
            "response/length_mean": (4 + 2 + 2 + 2) / 4,
            "response/length_max": 4.0,
            "response/truncated": 0.0,
            "data/num_groups": 2.0,
            "data/num_rollouts": 4.0,
            "data/num_missing": 2.0,
            "data/num_rows": 5.0,
            "data/num_tokens": 4 + 2 + 3 + 4 + 4,
            "data/num_sampled": 10.0,
            "reward/component/reward": 0.5,
        }
    )


def test_a_component_that_a_rollout_lacks_counts_as_zero() -> None:
    one = group([1.0, 1.0])
    richer = replace(one.rollouts[0], reward=Reward(components={"correct": 1.0, "format": 0.2}))
    groups = [replace(one, rollouts=(richer, one.rollouts[1]))]
    found = data_metrics(groups, packed(groups))
    components = {name: value for name, value in found.items() if name.startswith("reward/component/")}
    assert components == pytest.approx(
        {"reward/component/correct": 0.5, "reward/component/format": 0.1, "reward/component/reward": 0.5}
    )


def test_a_rollout_with_one_truncated_row_is_truncated() -> None:
    one = group([1.0, 0.0], rows=[[[0, 1], [0, 1]], [[0, 1]]])
    rows = (one.rollouts[0].rows[0], replace(one.rollouts[0].rows[1], truncated=True))
    groups = [replace(one, rollouts=(replace(one.rollouts[0], rows=rows), one.rollouts[1]))]
    assert data_metrics(groups, packed(groups))["response/truncated"] == 0.5


def test_ungrouped_bundles_say_nothing_about_variance() -> None:
    groups = [group([1.0], name="u", ungrouped=True), group([1.0, 0.0], name="g")]
    assert data_metrics(groups, packed(groups))["reward/groups_without_variance"] == 0.0


def test_lag_is_counted_on_sampled_tokens_and_never_negative() -> None:
    batch = packed([group([1.0, 0.0])])  # sampled tokens at 2, 3, 6, 7; -1 where nothing was sampled
    versions = batch.versions.copy()
    versions[batch.loss_mask] = [3, 4, 5, 6]
    found = data_metrics(
        [group([1.0, 0.0])], replace(batch, versions=versions), lags={version: 5 - version for version in range(6)}
    )
    assert (found["freshness/lag_mean"], found["freshness/lag_max"]) == ((2 + 1 + 0 + 0) / 4, 2.0)
