"""The learner on a GPU against transformers on the CPU: what the CPU tests cannot cover (NCCL, CUDA attention and norms)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_batch, make_learner, make_model, oracle_logprobs

from rlagent.trainer.config import BatchConfig, LearnerConfig, OptimizerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.2)])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_logprobs_steps_and_resume(tmp_path: Path, family: str, dtype: str, tolerance: float) -> None:
    model = make_model(family, tmp_path / "model")
    batch = make_batch()
    config = LearnerConfig(device="cuda", dtype=dtype, batch=BatchConfig(tokens=24), optimizer=OptimizerConfig(lr=1e-3))  # type: ignore[arg-type]
    with make_learner(tmp_path / "model", config) as learner:
        wanted = oracle_logprobs(model, batch).detach().numpy()
        assert np.abs(learner.logprobs(batch) - wanted).max() < tolerance
        learner.train_step(batch)
        learner.save(tmp_path / "step-1", {})
        norm = learner.train_step(batch)["policy/grad_norm"]
        learner.load(tmp_path / "step-1")
        assert learner.train_step(batch)["policy/grad_norm"] == pytest.approx(norm, rel=1e-3)
