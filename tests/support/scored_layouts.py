"""One rank of runs with a critic and a moving reference: `scored_layouts.py RANK WORLD PORT MODEL OUT LAYOUTS`, started by
test_learner_scored_layouts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_layouts import CONFIG, STRAIGHT, each_layout, layout_batch, layout_learner, layout_name

from rlagent.trainer.config import (
    AdvantageConfig,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    ReferenceConfig,
)
from rlagent.types import Batch

SCORED: LearnerConfig = CONFIG.model_copy(
    update={
        "optimizer": STRAIGHT.model_copy(update={"clip_grad": 1.0}),
        "advantage": AdvantageConfig(name="gae", lam=0.9),
        "critic": CriticConfig(lr=1e3, clip=100.0),  # beside an eps of 1e3, as STRAIGHT
        "loss": LossConfig(kl_coef=0.1),
        "reference": ReferenceConfig(refresh_every=2),
    }
)


def earning(batch: Batch) -> Batch:
    """What the last sampled token of every other row earns."""
    rewards = np.zeros(batch.num_tokens, np.float32)
    for row, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        places = np.flatnonzero(batch.loss_mask[start:end]) + start
        if len(places):
            rewards[places[-1]] = row % 2
    return replace(batch, rewards=rewards)


def run(layout: dict[str, Any], rank: int, world: int, port: int, model_dir: Path, out: Path) -> None:
    batch, name = earning(layout_batch(model_dir)), layout_name(layout)
    with layout_learner(SCORED, layout, rank, world, port, model_dir) as learner:
        found: dict[str, Any] = {"metrics": [learner.train_step(batch) for _ in range(3)]}
        learner.save(out / f"checkpoint-{name}", {})
        found["metrics"].append(learner.train_step(batch))
        found["weights"] = {key: tensor.clone() for key, tensor in learner.export_weights()}
        learner.load(out / f"checkpoint-{name}")
        found["resumed"] = learner.train_step(batch)
        learner.load(out / "checkpoint-one")  # of another layout: weights, critic and the reference of step 2
        found["resharded"] = learner.train_step(batch)
    if rank == 0:
        torch.save(found, out / f"{name}.pt")


if __name__ == "__main__":
    each_layout(run)
