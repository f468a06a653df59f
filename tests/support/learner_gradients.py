"""Gradients of a learner's step under checkpoints' names, and those of transformers, the oracle."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlagent.trainer.config import BatchConfig, LearnerConfig, OptimizerConfig
from rlagent.trainer.learner import Learner
from rlagent.trainer.weight_map import Rule, join
from rlagent.trainer.weights import local_parameters
from rlagent.types import Batch

WHOLE = 4096  # tokens: one microbatch
STILL = OptimizerConfig(lr=1e-30, clip_grad=0)  # leaves weights and gradients as they are


def config(tokens: int = WHOLE, **changes: Any) -> LearnerConfig:
    return LearnerConfig(
        device="cpu", batch=BatchConfig(tokens=tokens, updates=changes.pop("updates", 1)), optimizer=STILL, **changes
    )


def gradients(learner: Learner, batch: Batch) -> dict[str, Tensor]:
    """The step's gradients under transformers' names."""
    learner.train_step(batch)
    found = {}
    local: dict[Rule, Any] = local_parameters(learner.model.module, learner.arch, learner.plan)
    for rule, parameter in local.items():
        found |= dict(zip(rule.hf, (x.clone() for x in join(learner.arch, rule, [parameter.main_grad])), strict=True))
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        difference = (found[name] - tensor).abs().max() / tensor.abs().max()
        assert difference <= tolerance, f"{name}: {difference}"


def oracle_gradients(model: Any) -> dict[str, Tensor]:
    """By the names of checkpoints, in which each expert has its own tensors: in memory transformers keeps all of a layer in one."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        layer, stacked, kind = name.partition("mlp.experts.")
        for expert, grad in enumerate(parameter.grad if stacked else ()):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            pieces = zip(parts, grad.chunk(len(parts)), strict=True)
            found |= {f"{layer}mlp.experts.{expert}.{part}.weight": piece for part, piece in pieces}
        if not stacked:
            found[name] = parameter.grad
    return found
