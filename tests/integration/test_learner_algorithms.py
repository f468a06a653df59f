"""A learner with a critic, a moving reference, preferences or a teacher: what trains, what does not, and that a resume is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_batch, make_learner, make_model

from rlagent.errors import LearnerError
from rlagent.trainer.config import (
    AdvantageConfig,
    BatchConfig,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    OptimizerConfig,
    ReferenceConfig,
)
from rlagent.types import Batch


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model("qwen3", directory, layers=2)
    return directory


def config(**changes: Any) -> LearnerConfig:
    given = {
        "device": "cpu",
        "batch": BatchConfig(tokens=24, updates=2),
        "optimizer": OptimizerConfig(lr=1e-3),
        **changes,
    }
    return LearnerConfig(**given)


def earning(seed: int = 0) -> Batch:
    """Rows whose last sampled token earns 1 where the row is long, else 0: something a critic can learn."""
    batch = make_batch(seed=seed, lengths=(7, 12, 3, 20, 5, 12))
    rewards = np.zeros(batch.num_tokens, np.float32)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        places = np.flatnonzero(batch.loss_mask[start:end]) + start
        if len(places):
            rewards[places[-1]] = float(end - start > 10)
    return replace(batch, rewards=rewards)


PPO = {"advantage": AdvantageConfig(name="gae"), "critic": CriticConfig(lr=1e-2, clip=10.0)}


def test_a_critic_learns_the_returns_and_begins_at_zero(model_dir: Path) -> None:
    with make_learner(model_dir, config(**PPO)) as learner:
        records = [learner.train_step(earning()) for _ in range(12)]
    assert records[0]["value/mean"] != records[-1]["value/mean"]
    assert records[0]["value/return_mean"] == pytest.approx(records[-1]["value/return_mean"])
    assert records[-1]["value/squared_error"] < records[0]["value/squared_error"] / 4
    assert records[-1]["value/explained_variance"] > 0.5


def test_a_critic_in_warm_up_leaves_the_policy_alone(model_dir: Path) -> None:
    warming = {**PPO, "critic": CriticConfig(lr=1e-2, warmup_steps=1)}
    with make_learner(model_dir, config(**warming)) as learner:
        before = {name: tensor.clone() for name, tensor in learner.export_weights()}
        learner.train_step(earning())
        assert all(torch.equal(tensor, before[name]) for name, tensor in learner.export_weights())
        learner.train_step(earning())
        assert not all(torch.equal(tensor, before[name]) for name, tensor in learner.export_weights())


def test_any_split_into_microbatches_gives_the_critic_the_same_gradient(model_dir: Path) -> None:
    norms = []
    for tokens in (24, 4096):
        with make_learner(model_dir, config(**PPO, batch=BatchConfig(tokens=tokens))) as learner:  # type: ignore[arg-type]
            norms.append([learner.train_step(earning())["value/grad_norm"] for _ in range(3)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("kind", ["critic", "reference"])
def test_invariant_24_a_resume_with_a_critic_or_a_refreshed_reference_is_exact(
    model_dir: Path, tmp_path: Path, kind: str
) -> None:
    moving = {"loss": LossConfig(kl_coef=0.1), "reference": ReferenceConfig(refresh_every=2)}
    given = config(**(PPO if kind == "critic" else moving))

    def steps(learner: Any, first: int, last: int) -> list[dict[str, float]]:
        records = [learner.train_step(earning(seed)) for seed in range(first, last)]
        return [{name: x for name, x in r.items() if name.startswith(("policy/", "value/"))} for r in records]

    with make_learner(model_dir, given) as learner:
        steps(learner, 0, 3)
        learner.save(tmp_path / "saved", {})
        wanted = steps(learner, 3, 5)
    with make_learner(model_dir, given, seed=5) as resumed:
        resumed.load(tmp_path / "saved")
        assert steps(resumed, 3, 5) == wanted


def test_the_reference_moves_when_it_is_refreshed_and_only_then(model_dir: Path) -> None:
    given = config(loss=LossConfig(kl_coef=0.1), reference=ReferenceConfig(refresh_every=2), batch=BatchConfig())
    with make_learner(model_dir, given) as learner:
        kl = [learner.train_step(make_batch())["policy/kl_reference"] for _ in range(4)]
    assert (kl[0], kl[2]) == pytest.approx((0, 0), abs=1e-6)
    assert min(kl[1], kl[3]) > 1e-5


def test_a_reference_that_moved_by_itself_stops_the_run(model_dir: Path) -> None:
    with make_learner(model_dir, config(loss=LossConfig(kl_coef=0.1))) as learner:
        learner.train_step(make_batch())
        assert learner.reference is not None
        with torch.no_grad():
            next(iter(learner.reference.model.parameters())).view(-1)[3] += 1e-6
        with pytest.raises(LearnerError, match="reference policy moved"):
            learner.train_step(make_batch())


def test_dpo_raises_the_chosen_over_the_rejected(model_dir: Path) -> None:
    batch = make_batch(lengths=(12, 12))
    sign = np.where(np.arange(24) < 12, 1.0, -1.0).astype(np.float32)
    batch = replace(batch, advantages=np.where(batch.loss_mask, sign, 0), group_index=np.zeros(2, np.int32))
    given = config(loss=LossConfig(name="dpo"), advantage=AdvantageConfig(name="preference"), batch=BatchConfig())
    with make_learner(model_dir, given) as learner:
        before = learner.logprobs(batch)
        for _ in range(3):
            learner.train_step(batch)
        gained = learner.logprobs(batch) - before
    assert gained[:12].sum() > 0 > gained[12:].sum()


def test_a_student_comes_nearer_to_its_teacher(model_dir: Path) -> None:
    batch = make_batch()
    teacher = np.where(batch.loss_mask, -1.0, 0.0).astype(np.float32)
    given = config(loss=LossConfig(name="opd"), teacher={"url": "http://127.0.0.1:1"}, batch=BatchConfig())
    with make_learner(model_dir, given) as learner:
        before = learner.logprobs(batch)
        for _ in range(3):
            learner.train_step(replace(batch, teacher_logprobs=teacher))
        after = learner.logprobs(batch)
    assert np.abs(after - teacher).mean() < np.abs(before - teacher).mean()


def test_kl_in_the_reward_holds_the_policy_at_its_reference(model_dir: Path) -> None:
    found = []
    for coef in (1e-9, 5.0):
        loss = LossConfig(name="reinforce", kl_coef=coef, kl_estimator="k1", kl_in="reward")
        with make_learner(model_dir, config(loss=loss, batch=BatchConfig())) as learner:
            batch = make_batch()
            before = learner.logprobs(batch)
            for _ in range(6):
                learner.train_step(batch)
            found.append(float(np.square(learner.logprobs(batch) - before).mean()))
    assert found[1] < found[0]


def test_what_the_present_version_sampled_is_measured_apart(model_dir: Path) -> None:
    batch = make_batch()
    versions = np.where(np.arange(batch.num_tokens) < 20, 4, 3).astype(np.int32)
    with make_learner(model_dir, config(batch=BatchConfig())) as learner:
        exact = learner.logprobs(batch)
        own = np.where(versions == 4, exact, batch.rollout_logprobs)
        metrics = learner.train_step(replace(batch, rollout_logprobs=own, versions=versions, version=4))
        assert (metrics["mismatch_fresh/abs_max"] < 1e-5, metrics["mismatch/abs_max"] > 0.1) == (True, True)
        assert metrics["mismatch_fresh/share"] == (batch.loss_mask[:20].sum() / batch.num_sampled)
        assert "mismatch_fresh/kl" not in learner.train_step(replace(batch, version=9))
        assert not any(name.startswith("mismatch_fresh") for name in learner.train_step(batch))
