"""A learner of one process: parity with transformers, and what must not change its gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_gradients import WHOLE, assert_same, config, gradients, oracle_gradients
from tiny_models import LENGTHS, make_batch, make_learner, make_model, oracle_logprobs, permuted, with_common_prefixes

from rlagent.errors import LearnerError, LoadError
from rlagent.trainer.config import BatchConfig, LearnerConfig, LossConfig, OptimizerConfig
from rlagent.trainer.learner import Learner

LONGEST = max(LENGTHS)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3", directory)
    return directory


@pytest.fixture
def learner(model_dir: Path) -> Iterator[Learner]:
    with make_learner(model_dir, config()) as made:
        yield made


def retuned(learner: Learner, **changes: Any) -> Learner:
    """The same learner under other settings of the loss or the batch (nothing of them is kept between steps)."""
    learner.config = config(**changes)
    return learner


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_and_gradients_are_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    model = make_model(family, tmp_path, tied=tied)
    batch = make_batch()
    with make_learner(tmp_path, config(tokens=24)) as learner:
        wanted = oracle_logprobs(model, batch)
        np.testing.assert_allclose(learner.logprobs(batch), wanted.detach().numpy(), rtol=0, atol=1e-5)
        # At ratio 1 the clipped loss has the gradient of -advantage * logprob.
        loss = -(wanted * torch.from_numpy(batch.weight * batch.advantages)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert_same(gradients(learner, batch), oracle_gradients(model))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tokens", [24, WHOLE])
def test_shared_prefixes_are_computed_once_and_change_nothing(tmp_path: Path, family: str, tokens: int) -> None:
    model = make_model(family, tmp_path)
    batch = with_common_prefixes(make_batch())
    unshared = config(tokens).batch.model_copy(update={"share_prefixes": False})
    with make_learner(tmp_path, config(tokens)) as learner:
        wanted = oracle_logprobs(model, batch)
        np.testing.assert_allclose(learner.logprobs(batch), wanted.detach().numpy(), rtol=0, atol=1e-5)
        (-(wanted * torch.from_numpy(batch.weight * batch.advantages)).sum()).backward()  # type: ignore[no-untyped-call]
        assert_same(gradients(learner, batch), oracle_gradients(model))
        metrics = [learner.train_step(batch)]
        learner.config = learner.config.model_copy(update={"batch": unshared})
        metrics.append(learner.train_step(batch))
    distinct = {
        tuple(batch.token_ids[a:end]) for a, b in itertools.pairwise(batch.cu_seqlens) for end in range(a + 1, b + 1)
    }
    computed = [step["learner/computed_tokens"] for step in metrics]
    assert computed[1] == batch.num_tokens
    assert computed[0] == len(distinct) if tokens == WHOLE else len(distinct) <= computed[0] < batch.num_tokens
    assert metrics[0]["policy/grad_norm"] == pytest.approx(metrics[1]["policy/grad_norm"], rel=1e-5)


def test_gates_that_are_not_scaled_to_sum_to_one_are_transformers(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path, layers=2, norm_topk_prob=False)
    batch = make_batch()
    with make_learner(tmp_path, config(tokens=24, recompute="full")) as learner, torch.no_grad():
        np.testing.assert_allclose(learner.logprobs(batch), oracle_logprobs(model, batch).numpy(), rtol=0, atol=1e-5)


def test_bfloat16_stays_near_float32(model_dir: Path) -> None:
    batch = make_batch()
    with make_learner(model_dir, config()) as exact:
        wanted = exact.logprobs(batch)
    with make_learner(model_dir, config(dtype="bfloat16")) as learner:
        assert np.abs(learner.logprobs(batch) - wanted).max() < 0.2
        assert np.isfinite(learner.train_step(batch)["policy/grad_norm"])


def test_recomputing_activations_changes_no_bit(model_dir: Path) -> None:
    found = []
    for recompute in ("none", "full"):
        with make_learner(model_dir, config(recompute=recompute)) as learner:
            found.append(gradients(learner, make_batch()))
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


def test_any_split_into_microbatches_gives_the_gradients_of_row_by_row(learner: Learner) -> None:
    batch = make_batch()
    one_row_each = gradients(retuned(learner, tokens=LONGEST), batch)
    for tokens in (24, 40, WHOLE):
        assert_same(gradients(retuned(learner, tokens=tokens), batch), one_row_each)


def test_the_order_of_rows_changes_nothing(learner: Learner) -> None:
    batch = make_batch()
    wanted = gradients(learner, batch)
    assert_same(gradients(learner, permuted(batch, [3, 5, 0, 4, 2, 1])), wanted)


def test_rows_without_a_sampled_token_add_nothing_even_alone_in_a_microbatch(learner: Learner) -> None:
    batch = make_batch()
    lengths = (*LENGTHS, LONGEST)  # a microbatch of its own
    longer = make_batch(lengths=lengths)
    tail = np.zeros(LONGEST, np.float32)
    masked = replace(
        longer,
        **{
            name: np.concatenate((getattr(batch, name), tail.astype(getattr(batch, name).dtype)))
            for name in ("loss_mask", "rollout_logprobs", "advantages", "weight")
        },
        token_ids=np.concatenate((batch.token_ids, longer.token_ids[-LONGEST:])),
        temperature=np.concatenate((batch.temperature, tail + 1)),
        num_sampled=batch.num_sampled,
    )
    wanted = gradients(retuned(learner, tokens=LONGEST), batch)
    assert_same(gradients(learner, masked), wanted)


def test_a_batch_without_any_sampled_token_has_no_gradient(learner: Learner) -> None:
    batch = make_batch()
    nothing = replace(
        batch, loss_mask=np.zeros_like(batch.loss_mask), weight=np.zeros_like(batch.weight), num_sampled=0
    )
    assert all(not tensor.any() for tensor in gradients(learner, nothing).values())


def test_what_stands_under_the_mask_is_never_read(learner: Learner) -> None:
    batch = make_batch()
    wanted = gradients(learner, batch)
    hidden = {
        name: np.where(batch.loss_mask, getattr(batch, name), np.nan).astype(np.float32)
        for name in ("rollout_logprobs", "advantages", "weight", "temperature")
    }
    found = gradients(learner, replace(batch, **hidden))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_each_sampled_token_is_scored_after_its_own_row_only(learner: Learner) -> None:
    """A change of the last token moves its own logprob and no other."""
    batch = make_batch(lengths=(9, 8))
    mask = np.ones_like(batch.loss_mask)
    mask[[0, 9]] = False
    batch = replace(batch, loss_mask=mask, temperature=np.ones_like(batch.temperature))
    before = learner.logprobs(batch)
    changed = batch.token_ids.copy()
    changed[8] = (changed[8] + 1) % 97
    after = learner.logprobs(replace(batch, token_ids=changed))
    assert np.flatnonzero(before != after).tolist() == [8]


def test_several_updates_a_step_share_the_old_policy(model_dir: Path) -> None:
    moving = OptimizerConfig(lr=1e-2)
    with make_learner(
        model_dir, LearnerConfig(device="cpu", batch=BatchConfig(updates=2), optimizer=moving)
    ) as learner:
        batch = make_batch()
        old = learner.logprobs(batch)
        metrics = learner.train_step(replace(batch, rollout_logprobs=old))
        assert metrics["learner/updates"] == 2
        assert metrics["mismatch/abs_max"] < 1e-5, "both updates compare with the policy from before the first"
        assert metrics["policy/approx_kl"] > 1e-5, "which the second one's is not"
        assert np.abs(learner.logprobs(batch) - old)[batch.loss_mask].max() > 1e-3


def test_the_reference_stays_what_it_was_while_the_policy_moves(model_dir: Path) -> None:
    moving = LearnerConfig(device="cpu", loss=LossConfig(kl_coef=0.1), optimizer=OptimizerConfig(lr=1e-2))
    with make_learner(model_dir, moving) as learner:
        assert learner.reference is not None
        before = [parameter.detach().clone() for parameter in learner.reference.model.parameters()]
        for _ in range(2):
            learner.train_step(make_batch())
        pairs = zip(before, learner.reference.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        moved = zip(before, learner.model.module.parameters(), strict=True)
        assert not any(torch.equal(one, other) for one, other in moved)


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_move(learner: Learner) -> None:
    batch = make_batch()
    before = {name: tensor.clone() for name, tensor in learner.export_weights()}
    broken = np.where(batch.loss_mask, np.float32(np.inf), batch.advantages)
    with pytest.raises(LearnerError, match="gradient norm is"):
        learner.train_step(replace(batch, advantages=broken))
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.export_weights())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss_mask": np.ones(sum(LENGTHS), bool)}, "first token"),
        ({"token_ids": np.full(sum(LENGTHS), 97, np.int32)}, "vocabulary of 97"),
        ({"temperature": np.zeros(sum(LENGTHS), np.float32)}, "temperature 0"),
    ],
)
def test_a_batch_that_cannot_be_scored_is_refused(learner: Learner, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LearnerError, match=named):
        learner.train_step(replace(make_batch(), **changes))


def test_a_layout_of_more_processes_than_were_started_is_refused(model_dir: Path) -> None:
    with pytest.raises(LearnerError, match="needs 1 processes, but 2 were started"):
        make_learner(model_dir, world_size=2)


def test_a_directory_without_weights_is_refused(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    with pytest.raises(LoadError, match="safetensors"):
        make_learner(tmp_path)
