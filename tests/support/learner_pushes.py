"""One rank of learners that push into a running engine: `python learner_pushes.py RANK WORLD PORT MODEL OUT LAYOUTS`.

Each layout names the learner's axes, and beside them `engine` (its URL), `transport` and `version`. The learner of each trains one step,
pushes, and writes what it holds as a Hugging Face directory OUT/VERSION; rank 0 writes what the engine then holds and says beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import torch
from learner_layouts import CONFIG, each_layout, layout_batch

from rlagent.launch.local import RankSpec
from rlagent.trainer.config import ParallelConfig, SyncConfig
from rlagent.trainer.rank import Rank

PROMPT = [3, 4, 5, 6, 7, 8]


def post(url: str, path: str, **body: object) -> Any:
    """A POST that must be done; its JSON."""
    response = httpx.post(url + path, json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json() if response.content.startswith(b"{") else None


def pause(url: str) -> None:
    """Stop generating, and forget all prefixes."""
    post(url, "/pause_generation", mode="abort")
    post(url, "/flush_cache")


def told(url: str) -> dict[str, Any]:
    """What an engine holds, by its checker's names, and the greedy tokens that it says with their logprobs."""
    checksums = post(url, "/weights_checker", action="checksum")["ranks"][0]["checksums"]
    post(url, "/continue_generation")
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = post(url, "/generate", input_ids=PROMPT, return_logprob=True, sampling_params=params)
    said = [entry[:2] for entry in answer["meta_info"]["output_token_logprobs"]]
    return {"checksums": checksums, "said": said}


def run(layout: dict[str, Any], rank: int, world: int, port: int, model_dir: Path, out: Path) -> None:
    """As the driver has it done: the rank's own methods, in order."""
    engine, version = layout["engine"], layout["version"]
    parallel = ParallelConfig(**layout["axes"])
    assert world == parallel.world_size
    one = Rank(
        RankSpec(
            learner=CONFIG, parallel=parallel, model_dir=model_dir, engine_dtype="float32",
            sync=SyncConfig(transport=layout["transport"], bucket_bytes=20_000),
            master_port=port, seed=0, total_steps=9, rank=rank,
        )
    )  # fmt: skip
    try:
        one.train_step(layout_batch(model_dir))
        if rank == 0:
            pause(engine)
        report = one.publish([engine], version, float("inf"))
        if report is not None:
            assert report.verified == "yes"
            assert report.num_buckets > 3
            (out / f"{version}.json").write_text(json.dumps(told(engine)))
        one.save_hf(out / str(version))
    finally:
        one.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    each_layout(run)
