"""One rank of runs with adapters, started by test_learner_lora: `lora_layouts.py RANK WORLD PORT MODEL OUT LAYOUTS`."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from learner_layouts import CONFIG, STRAIGHT, each_layout, layout_batch, layout_learner, layout_name

from rlagent.trainer.config import LearnerConfig, LoraConfig, LossConfig
from rlagent.trainer.learner import Learner

LORA: LearnerConfig = CONFIG.model_copy(
    update={
        "optimizer": STRAIGHT.model_copy(update={"clip_grad": 1.0}),
        "lora": LoraConfig(rank=3, alpha=6.0),
        "loss": LossConfig(kl_coef=0.1),
        "recompute": "full",
    }
)


def stir(learner: Learner) -> None:
    """Give every B, which begins at 0, random values that depend on its name alone."""
    assert learner.adapters is not None
    with torch.no_grad():
        for rule, parameter in learner.adapters.parameters().items():
            if "lora_B" in rule.hf[0]:
                draw = torch.Generator().manual_seed(zlib.crc32(rule.hf[0].encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 10)


def exported(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.export_weights()}


def run(layout: dict[str, Any], rank: int, world: int, port: int, model_dir: Path, out: Path) -> None:
    batch, name = layout_batch(model_dir), layout_name(layout)
    with layout_learner(LORA, layout, rank, world, port, model_dir) as learner:
        stir(learner)
        found: dict[str, Any] = {"logprobs": learner.logprobs(batch), "start": exported(learner)}
        found["metrics"] = [learner.train_step(batch)]
        assert learner.adapters is not None
        found["gradients"] = {
            rule.hf[0]: parameter.main_grad.clone() for rule, parameter in learner.adapters.parameters().items()
        }
        found["weights"] = [exported(learner)]
        learner.save(out / f"checkpoint-{name}", {})
        found["metrics"].append(learner.train_step(batch))
        found["weights"].append(exported(learner))
        learner.load(out / f"checkpoint-{name}")
        learner.train_step(batch)
        found["resumed"] = exported(learner)
        learner.load(out / "checkpoint-one")  # of another layout
        found["resharded"] = exported(learner)
    if rank == 0:
        torch.save(found, out / f"{name}.pt")


if __name__ == "__main__":
    each_layout(run)
