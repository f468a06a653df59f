"""Every layout of processes computes what one process computes: logprobs, gradients, norms, metrics, weights, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_layouts import CONFIG, layout_batch, layout_name
from learner_ranks import launch
from safetensors.torch import load_file
from tiny_models import make_learner, make_model

from rlagent.trainer.learner import Learner

SCRIPT = "learner_layouts.py"
PAIRS = [
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"data": 2},
    {"data": 2, "distributed_optimizer": True},
    {"context": 2},
]
FOURS = [
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "data": 2, "sequence": True, "distributed_optimizer": True},
    {"pipeline": 2, "data": 2},
    {"context": 2, "tensor": 2, "sequence": True},
    {"pipeline": 2, "context": 2, "distributed_optimizer": True},
]
INTERLEAVED = [{"pipeline": 2, "virtual_pipeline": 2, "distributed_optimizer": True}]
EXPERT_PAIRS = [
    {"data": 2, "expert": 2, "distributed_optimizer": True},
    {"tensor": 2, "sequence": True, "expert": 2},
    {"tensor": 2, "sequence": True},
]
EXPERT_FOURS = [
    {"tensor": 2, "data": 2, "sequence": True, "expert": 2},
    {"pipeline": 2, "data": 2, "expert": 2, "distributed_optimizer": True},
    {"context": 2, "data": 2, "expert": 4},
]
Layout = dict[str, int]


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor's change, relative to the tensor's largest change."""
    assert list(found) == list(wanted)
    return max(
        float((found[name] - tensor).abs().max() / (tensor - base[name]).abs().max()) for name, tensor in wanted.items()
    )


def exported(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.export_weights()}


def check(layouts: list[Layout], world: int, directory: Path, *, family: str, tied: bool, layers: int = 3) -> None:
    model_dir = directory / "model"
    make_model(family, model_dir, tied=tied, layers=layers)
    launch(SCRIPT, 1, [{}], model_dir, directory)
    launch(SCRIPT, world, layouts, model_dir, directory)
    initial = load_file(model_dir / "model.safetensors")
    wanted: dict[str, Any] = torch.load(directory / "one.pt", weights_only=False)
    assert wanted["metrics"][0]["policy/grad_norm"] > CONFIG.optimizer.clip_grad, "the gradients were clipped"
    assert wanted["resumed"] == wanted["metrics"][1]["policy/grad_norm"]
    with make_learner(model_dir, CONFIG) as learner:  # every layout's checkpoint in one process
        for layout in layouts:
            name = layout_name(layout)
            found = torch.load(directory / f"{name}.pt", weights_only=False)
            learner.load(directory / f"checkpoint-{name}")
            assert difference(exported(learner), found["weights"][0], initial) == 0, name
            learner.train_step(layout_batch(model_dir))
            assert difference(exported(learner), found["weights"][1], initial) < 2e-5, name
    for layout in layouts:
        name = layout_name(layout)
        found: dict[str, Any] = torch.load(directory / f"{name}.pt", weights_only=False)
        assert abs(found["logprobs"] - wanted["logprobs"]).max() < 1e-5, name
        assert difference(found["weights"][0], wanted["weights"][0], initial) < 1e-5, name
        assert difference(found["weights"][1], wanted["weights"][1], initial) < 2e-5, name
        for one, other in zip(found["metrics"], wanted["metrics"], strict=True):
            of_layout = ("learner/score_s", "learner/update_s", "learner/microbatches", "learner/computed_tokens")
            kept = {key: value for key, value in one.items() if key not in of_layout}
            assert kept == pytest.approx({key: other[key] for key in kept}, rel=1e-4, abs=1e-5), name
        assert found["resumed"] == found["metrics"][1]["policy/grad_norm"], name
        assert difference(found["resharded"][0], wanted["weights"][0], initial) == 0, name
        assert difference(found["resharded"][1], wanted["resharded"][1], initial) < 2e-5, name
        saved = load_file(directory / f"hf-{name}" / "model.safetensors")
        assert difference(saved, dict(sorted(wanted["weights"][1].items())), initial) < 1e-4, name


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Three layers over two stages, an odd vocabulary, tied embeddings."""
    check(PAIRS, 2, tmp_path, family="qwen3", tied=True)


@pytest.mark.slow
def test_two_processes_with_a_head_of_its_own(tmp_path: Path) -> None:
    check(PAIRS[:3], 2, tmp_path, family="llama", tied=False)


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    check(FOURS, 4, tmp_path, family="qwen2", tied=True)


@pytest.mark.slow
def test_interleaved_stages(tmp_path: Path) -> None:
    """Five layers in four chunks, of which each of two stages runs every other one."""
    check(INTERLEAVED, 2, tmp_path, family="qwen3", tied=True, layers=5)


@pytest.mark.slow
def test_experts_over_two_processes(tmp_path: Path) -> None:
    """Experts dealt out over data- and tensor-parallel ranks, and not dealt out."""
    check(EXPERT_PAIRS, 2, tmp_path, family="qwen3_moe", tied=False)


@pytest.mark.slow
def test_experts_over_four_processes(tmp_path: Path) -> None:
    """Experts beside each other axis; a dense layer among those with experts."""
    check(EXPERT_FOURS, 4, tmp_path, family="qwen3_moe", tied=True)
