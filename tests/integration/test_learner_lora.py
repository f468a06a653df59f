"""Adapters: their gradients are autograd's on the merged dense model, the base stands still, and every layout agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_gradients import config as whole_config
from learner_gradients import gradients
from learner_layouts import layout_name
from learner_ranks import launch
from lora_layouts import LORA, exported, stir
from safetensors.torch import load_file, save_file
from tiny_models import make_batch, make_learner, make_model, oracle_logprobs, with_experts
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from rlagent.errors import CheckpointError, LearnerError
from rlagent.trainer.config import BatchConfig, LearnerConfig, LoraConfig, LossConfig, OptimizerConfig
from rlagent.trainer.learner import Learner
from rlagent.trainer.lora import NAME

PLAIN = LearnerConfig(
    device="cpu",
    batch=BatchConfig(tokens=24),
    lora=LoraConfig(rank=4, alpha=8.0),
    optimizer=OptimizerConfig(lr=1e-2, clip_grad=0),
)


def adapters(learner: Learner) -> dict[str, Tensor]:
    assert learner.adapters is not None
    return {rule.hf[0].removeprefix(NAME): tensor for rule, tensor in learner.adapters.parameters().items()}


def merged(base: dict[str, Tensor], matrices: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """base + scale B A, written down again."""
    found = dict(base)
    for name, matrix in matrices.items():
        if "lora_A" in name:
            weight = name.replace("lora_A.weight", "weight")
            found[weight] = base[weight] + matrices[name.replace("lora_A", "lora_B")] @ matrix * scale
    return found


def seven(*targets: str) -> int:
    return 3 * 2 * len(targets)  # three layers, A and B


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ("qwen2", ("v_proj", "q_proj", "up_proj")),
        ("llama", ("o_proj", "down_proj")),
    ],
)
def test_gradients_are_those_of_the_merged_model(tmp_path: Path, family: str, targets: Any) -> None:
    model = make_model(family, tmp_path, tied=family != "llama")
    batch = make_batch()
    config = PLAIN.model_copy(update={"lora": LoraConfig(rank=4, alpha=8.0, targets=targets)})
    with make_learner(tmp_path, config) as learner:
        stir(learner)
        matrices = {name: tensor.detach().clone().requires_grad_() for name, tensor in adapters(learner).items()}
        assert len(matrices) == seven(*targets)
        weights = {name: x for name, x in merged(dict(model.state_dict()), matrices, 2.0).items() if x.requires_grad}
        assert len(weights) == len(matrices) // 2

        def run(*given: Any, **options: Any) -> Any:
            return functional_call(model, weights, given, options)

        logprobs = oracle_logprobs(run, batch)
        torch.testing.assert_close(torch.from_numpy(learner.logprobs(batch)), logprobs.detach(), rtol=1e-4, atol=2e-5)
        loss = -(torch.from_numpy(batch.weight * batch.advantages) * logprobs).sum()
        expected = torch.autograd.grad(loss, list(matrices.values()))
        learner.train_step(batch)
        for (name, tensor), gradient in zip(adapters(learner).items(), expected, strict=True):
            found: Tensor = tensor.main_grad  # type: ignore[attr-defined]
            assert (found - gradient).abs().max() < 1e-4 * gradient.abs().max(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_stands_still_and_what_is_published_is_merged_in_fp32(tmp_path: Path, dtype: Any) -> None:
    make_model("qwen3", tmp_path / "model")
    base = {
        name: tensor.to(getattr(torch, dtype))
        for name, tensor in load_file(tmp_path / "model/model.safetensors").items()
    }
    with make_learner(tmp_path / "model", PLAIN.model_copy(update={"dtype": dtype})) as learner:
        start = exported(learner)
        assert all(torch.equal(start[name], tensor) for name, tensor in base.items())  # B is 0
        for _ in range(2):
            learner.train_step(make_batch())
        wide = {name: tensor.detach().float() for name, tensor in adapters(learner).items()}
        expected = merged({name: tensor.float() for name, tensor in base.items()}, wide, 2.0)
        for name, tensor in exported(learner).items():
            assert tensor.dtype == base[name].dtype
            # The product's own order of summation aside, which may move a bit of fp32 and so the rounding of a bf16.
            torch.testing.assert_close(
                tensor.float(), expected[name], rtol=1e-6 if dtype == "float32" else 2**-8, atol=1e-6
            )
            assert torch.equal(tensor, base[name]) == ("proj" not in name), name
        assert learner.adapters is not None
        with learner.adapters.off():
            assert all(
                torch.equal(x, start[name]) for name, x in learner.model.module.named_parameters() if name in start
            )
        learner.save_hf(tmp_path / "merged")
        scored = torch.from_numpy(learner.logprobs(make_batch()))
    if dtype == "float32":
        oracle = oracle_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), make_batch())
        torch.testing.assert_close(scored, oracle.detach(), rtol=1e-4, atol=1e-5)


def test_the_reference_is_the_base_without_a_copy(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)
    batch = make_batch()
    with make_learner(tmp_path, PLAIN.model_copy(update={"loss": LossConfig(kl_coef=0.1)})) as learner:
        assert learner.reference is not None
        assert learner.reference.model is learner.model.module
        stir(learner)
        difference = oracle_logprobs(model, batch).detach().numpy() - learner.logprobs(batch)
        expected = (batch.loss_mask * (np.exp(difference) - difference - 1)).sum() / batch.num_sampled
        assert learner.train_step(batch)["policy/kl_reference"] == pytest.approx(expected, rel=1e-4)
        assert learner.train_step(batch)["policy/kl_reference"] > 0
        with torch.no_grad():
            learner.model.module.decoder.layers[1].mlp.linear_fc1.weight[0, 0] += 1
        with pytest.raises(LearnerError, match="reference policy moved"):
            learner.train_step(batch)


def test_a_checkpoint_holds_adapters_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "model")
    batch = make_batch()
    with make_learner(tmp_path / "model", PLAIN) as learner:
        stir(learner)
        learner.train_step(batch)
        learner.save(tmp_path / "save", {})
        metrics = [learner.train_step(batch) for _ in range(2)]
        whole = exported(learner)
    (file,) = (tmp_path / "save").glob("tensor*.safetensors")
    assert {name.split("/")[0] for name in load_file(file)} == {NAME + name for name in adapters(learner)} | {"rng"}
    with make_learner(tmp_path / "model", PLAIN) as learner:
        learner.load(tmp_path / "save")
        again = [learner.train_step(batch) for _ in range(2)]
        assert all(torch.equal(tensor, whole[name]) for name, tensor in exported(learner).items())
    assert [found["policy/loss"] for found in again] == [found["policy/loss"] for found in metrics]


def test_a_checkpoint_of_another_base_or_rank_is_refused(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "model")
    with make_learner(tmp_path / "model", PLAIN) as learner:
        learner.save(tmp_path / "save", {})
    smaller = PLAIN.model_copy(update={"lora": LoraConfig(rank=2)})
    with make_learner(tmp_path / "model", smaller) as learner, pytest.raises(CheckpointError, match="differ in lora"):
        learner.load(tmp_path / "save")
    make_model("qwen3", tmp_path / "other")
    other = load_file(tmp_path / "other/model.safetensors")
    save_file(other | {"model.norm.weight": other["model.norm.weight"] + 1}, tmp_path / "other/model.safetensors")
    with make_learner(tmp_path / "other", PLAIN) as learner, pytest.raises(CheckpointError, match="differ in base"):
        learner.load(tmp_path / "save")


def test_an_experts_gradients_are_those_of_its_merged_weight(tmp_path: Path) -> None:
    """By the chain rule: of W + s B A, dB = s dW A^T and dA = s B^T dW; dW is a learner's that trains the merged model whole."""
    make_model("qwen3_moe", tmp_path / "model", tied=False)
    batch = with_experts(make_batch())
    with make_learner(tmp_path / "model", PLAIN) as learner:
        stir(learner)
        matrices = {name: tensor.detach().clone() for name, tensor in adapters(learner).items()}
        scored = learner.logprobs(batch)
        learner.save_hf(tmp_path / "merged")
        learner.train_step(batch)
        found: dict[str, Tensor] = {name: tensor.main_grad.clone() for name, tensor in adapters(learner).items()}  # type: ignore[attr-defined]
    with make_learner(tmp_path / "merged", whole_config()) as learner:
        np.testing.assert_allclose(scored, learner.logprobs(batch), rtol=1e-4, atol=1e-5)
        whole = gradients(learner, batch)
    assert sum(".experts." in name for name in matrices) == 2 * 2 * 4 * 3  # A and B, layers, experts, matrices of each
    for name, gradient in found.items():
        weight = name.replace("lora_A.weight", "weight").replace("lora_B.weight", "weight")
        a, b = (matrices[weight.replace("weight", f"lora_{half}.weight")] for half in "AB")
        expected = 2.0 * (b.T @ whole[weight] if "lora_A" in name else whole[weight] @ a.T)
        assert (gradient - expected).abs().max() <= 2e-4 * expected.abs().max() + 1e-8, name


PAIRS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"data": 2},
    {"context": 2},
    {"data": 2, "distributed_optimizer": True},
    {"pipeline": 2, "virtual_pipeline": 2},
]
EXPERT_PAIRS: list[dict[str, Any]] = [
    {"data": 2, "expert": 2},
    {"tensor": 2, "sequence": True, "expert": 2},
    {"tensor": 2, "sequence": True},
    {"data": 2, "expert": 2, "distributed_optimizer": True},
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layouts"), [("qwen3", PAIRS), ("qwen3_moe", EXPERT_PAIRS)])
def test_every_layout_agrees_with_one_process(tmp_path: Path, family: str, layouts: list[dict[str, Any]]) -> None:
    make_model(family, tmp_path / "model", layers=5 if family == "qwen3" else 3)
    launch("lora_layouts.py", 1, [{}], tmp_path / "model", tmp_path)
    launch("lora_layouts.py", 2, layouts, tmp_path / "model", tmp_path)
    wanted = torch.load(tmp_path / "one.pt", weights_only=False)
    assert wanted["metrics"][0]["policy/grad_norm"] > LORA.optimizer.clip_grad, "the gradients were clipped"
    for layout in layouts:
        name = layout_name(layout)
        found = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        assert abs(found["logprobs"] - wanted["logprobs"]).max() < 1e-5, name
        for matrix, gradient in found["gradients"].items() if "distributed_optimizer" not in layout else ():
            expected = wanted["gradients"][matrix]
            assert (gradient - expected).abs().max() < 1e-5 * expected.abs().max(), (name, matrix)
        for step in (0, 1):
            for matrix, tensor in wanted["weights"][step].items():
                change = (tensor - wanted["start"][matrix]).abs().max()
                assert (found["weights"][step][matrix] - tensor).abs().max() <= 2e-5 * change + 3e-7, (name, matrix)
            for key in ("policy/loss", "policy/grad_norm", "policy/kl_reference"):
                expected = wanted["metrics"][step][key]
                assert found["metrics"][step][key] == pytest.approx(expected, rel=1e-4, abs=1e-5), (name, key)
        assert all(torch.equal(tensor, found["weights"][1][key]) for key, tensor in found["resumed"].items()), name
        for key, tensor in found["resharded"].items():
            torch.testing.assert_close(tensor, wanted["weights"][0][key], rtol=1e-6, atol=1e-6)
