"""One rank of learners that push into a running engine: `python learner_pushes.py RANK WORLD PORT MODEL OUT LAYOUTS`.

Each layout names the learner's axes, and beside them `engine` (a paused one's URL), `transport` and `version`. The learner of each trains one
step, pushes, and writes what it holds as a Hugging Face directory OUT/VERSION.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from learner_layouts import CONFIG, each_layout, layout_batch

from rlagent.launch.local import RankSpec
from rlagent.trainer.config import ParallelConfig, SyncConfig
from rlagent.trainer.rank import Rank


def run(layout: dict[str, Any], rank: int, world: int, port: int, model_dir: Path, out: Path) -> None:
    """As the driver has it done: the rank's own methods, in order."""
    assert world == ParallelConfig(**layout["axes"]).world_size
    one = Rank(
        RankSpec(
            learner=CONFIG, parallel=ParallelConfig(**layout["axes"]), model_dir=model_dir, engine_dtype="float32",
            sync=SyncConfig(transport=layout["transport"], bucket_bytes=20_000),
            master_port=port, seed=0, total_steps=9, rank=rank,
        )
    )  # fmt: skip
    try:
        one.train_step(layout_batch(model_dir))
        report = one.publish([layout["engine"]], layout["version"], float("inf"))
        assert (report is None) == (rank > 0)
        assert report is None or (report.verified == "yes" and report.num_buckets > 3)
        one.save_hf(out / str(layout["version"]))
    finally:
        one.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    each_layout(run)
