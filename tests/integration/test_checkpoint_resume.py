"""Checkpoints of the learner: N steps are k, a save, a load and N - k, to the bit; and what may not be loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_models import make_batch, make_learner, make_model

from rlagent.errors import CheckpointError
from rlagent.trainer import checkpoint
from rlagent.trainer.config import BatchConfig, LearnerConfig, OptimizerConfig, ParallelConfig
from rlagent.trainer.learner import Learner

SHARD = "tensor0-pipeline0.safetensors"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model("qwen3", directory, layers=2)
    return directory


def config(dtype: str = "float32") -> LearnerConfig:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=2, schedule="linear")
    return LearnerConfig(device="cpu", dtype=dtype, batch=BatchConfig(tokens=24, updates=2), optimizer=optimizer)  # type: ignore[arg-type]


def steps(learner: Learner, first: int, last: int) -> list[float]:
    return [learner.train_step(make_batch(seed=seed))["policy/grad_norm"] for seed in range(first, last)]


@pytest.mark.parametrize(
    ("dtype", "distributed"), [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)]
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    model_dir: Path, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    layout = ParallelConfig(distributed_optimizer=distributed)
    with make_learner(model_dir, config(dtype), parallel=layout) as learner:
        steps(learner, 0, 2)
        learner.save(tmp_path / "step-2", {"cursor": 7})
        norms = steps(learner, 2, 5)
        noise = torch.rand(4)
        wanted = {name: tensor.clone() for name, tensor in learner.export_weights()}

    with make_learner(model_dir, config(dtype), parallel=layout, seed=99) as resumed:
        assert resumed.load(tmp_path / "step-2") == {"cursor": 7}
        assert resumed.num_steps == 2
        assert steps(resumed, 2, 5) == norms
        assert torch.equal(torch.rand(4), noise)
        found = dict(resumed.export_weights())
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_what_is_damaged_or_of_another_learner_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with make_learner(model_dir, config()) as learner:
        saved = tmp_path / "step-0"
        learner.save(saved, {})

        manifest = json.loads((saved / checkpoint.MANIFEST).read_text())
        for changes, named in (
            ({"layout": {**manifest["layout"], "tensor": 2}}, "holds no tensor1-pipeline0"),
            ({"model": {**manifest["model"], "vocab_size": 98}}, "another model"),
            ({"format": 9}, "format 9"),
        ):
            (saved / checkpoint.MANIFEST).write_text(json.dumps({**manifest, **changes}))
            with pytest.raises(CheckpointError, match=named):
                learner.load(saved)
        (saved / checkpoint.MANIFEST).write_text(json.dumps(manifest))
        learner.load(saved)

        with (saved / SHARD).open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"\xff")
        with pytest.raises(CheckpointError, match="damaged"):
            learner.load(saved)
        (saved / SHARD).unlink()
        with pytest.raises(CheckpointError, match="holds no"):
            learner.load(saved)
        with pytest.raises(CheckpointError, match="not a checkpoint"):
            learner.load(tmp_path / "nowhere")


def test_extra_content_that_is_not_json_leaves_no_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    with make_learner(model_dir, config()) as learner:
        with pytest.raises(CheckpointError, match="not JSON"):
            learner.save(tmp_path / "step-0", {"bad": object()})
        assert checkpoint.checkpoints(tmp_path) == []


def test_a_save_beside_the_training_is_of_its_own_step(model_dir: Path, tmp_path: Path) -> None:
    with make_learner(model_dir, config()) as learner:
        steps(learner, 0, 1)
        learner.save(tmp_path / "step-1", {"cursor": 1}, wait=False)
        assert checkpoint.checkpoints(tmp_path) == []
        norms = steps(learner, 1, 3)
        learner.save(tmp_path / "step-3", {"cursor": 3}, wait=False)
        assert checkpoint.checkpoints(tmp_path) == [tmp_path / "step-1"]
        assert learner.finish_save(wait=True) == tmp_path / "step-3"
        assert learner.finish_save(wait=True) is None
        assert learner.load(tmp_path / "step-1") == {"cursor": 1}
        assert steps(learner, 1, 3) == norms


def test_a_save_that_cannot_be_written_is_said_and_has_no_name(model_dir: Path, tmp_path: Path) -> None:
    with make_learner(model_dir, config()) as learner:
        learner.save(tmp_path / "step-0", {}, wait=False)
        learner.finish_save(wait=True)
        learner.save(tmp_path / "step-1", {}, wait=False)
        partial = checkpoint.partial_directory(tmp_path / "step-1")
        learner._snapshots._thread.submit(lambda: None).result()  # it is written
        (partial / SHARD).unlink()
        (partial / checkpoint.MANIFEST).unlink()
        partial.rmdir()
        with pytest.raises(OSError, match="step-1"):
            learner.finish_save(wait=True)
        assert checkpoint.checkpoints(tmp_path) == [tmp_path / "step-0"]
