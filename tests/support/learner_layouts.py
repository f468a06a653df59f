"""One rank of a run over several layouts: `python learner_layouts.py RANK WORLD PORT MODEL OUT LAYOUTS`, started by test_learner_layouts.

Layouts are JSON objects of ParallelConfig. For each one rank 0 writes what a learner of it scored, measured and exported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, make_batch, with_common_prefixes, with_experts

from rlagent.trainer.config import BatchConfig, LearnerConfig, OptimizerConfig, ParallelConfig
from rlagent.trainer.learner import Learner
from rlagent.trainer.model.architecture import read_architecture
from rlagent.types import Batch

STRAIGHT = OptimizerConfig(lr=3e3, eps=1e3, clip_grad=2.5)
"""With a large eps AdamW's first step moves a weight by its gradient, to 1e-3 of it, so that exported weights show
clipped gradients."""
CONFIG = LearnerConfig(device="cpu", batch=BatchConfig(tokens=24), optimizer=STRAIGHT)
LENGTHS = (7, 12, 3, 20, 1, 12, 24)


def layout_name(layout: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in sorted(layout.items())) or "one"


def layout_batch(model_dir: Path) -> Batch:
    """The batch that every layout trains on; its last microbatch has no sampled token. Of a mixture some routing is recorded. Rows
    share prefixes, which context parallelism does not use: it is compared with all others.
    """
    batch = make_batch(lengths=LENGTHS, vocab=VOCAB)
    batch.loss_mask[-24:] = False
    return with_common_prefixes(with_experts(batch) if read_architecture(model_dir).experts else batch)


def layout_learner(
    config: LearnerConfig, layout: dict[str, Any], rank: int, world: int, port: int, model_dir: Path
) -> Learner:
    """One rank's learner of a layout."""
    return Learner(
        config,
        ParallelConfig(**layout),
        model_dir,
        rank=rank,
        world_size=world,
        master_port=port,
        seed=0,
        total_steps=9,
    )


def run(layout: dict[str, int], rank: int, world: int, port: int, model_dir: Path, out: Path) -> None:
    batch = layout_batch(model_dir)
    with layout_learner(CONFIG, layout, rank, world, port, model_dir) as learner:
        found = {"logprobs": learner.logprobs(batch), "metrics": [], "weights": []}
        for step in range(2):
            found["metrics"].append(learner.train_step(batch))
            found["weights"].append({name: tensor.clone() for name, tensor in learner.export_weights()})
            if step == 0:
                learner.save(out / f"checkpoint-{layout_name(layout)}", {})
        learner.load(out / f"checkpoint-{layout_name(layout)}")
        found["resumed"] = learner.train_step(batch)["policy/grad_norm"]
        learner.load(out / "checkpoint-one")  # of another layout
        found["resharded"] = [{name: tensor.clone() for name, tensor in learner.export_weights()}]
        learner.train_step(batch)
        found["resharded"].append({name: tensor.clone() for name, tensor in learner.export_weights()})
        learner.save_hf(out / f"hf-{layout_name(layout)}")
    if rank == 0:
        torch.save(found, out / f"{layout_name(layout)}.pt")
    else:
        assert found["weights"] == [{}, {}], "only rank 0 is given weights"


def each_layout(run: Callable[[dict[str, Any], int, int, int, Path, Path], None]) -> None:
    """Call `run` for each layout that the command line names, each at a port of its own."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    torch.set_num_threads(1)
    for number, layout in enumerate(json.loads(sys.argv[6])):
        run(layout, rank, world, port + number, Path(sys.argv[4]), Path(sys.argv[5]))


if __name__ == "__main__":
    each_layout(run)
