"""A real engine as the teacher of a batch: its logprobs are the learner's where both hold one model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_process import running_engine
from tiny_models import make_batch, make_learner, make_model

from rlagent.errors import EngineError
from rlagent.trainer.config import TeacherConfig
from rlagent.trainer.teacher import with_teacher


async def test_the_teacher_scores_what_the_learner_scores(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path, layers=2)
    sampled = make_batch(lengths=(7, 12, 3, 20, 2, 12))
    batch = replace(sampled, temperature=np.ones_like(sampled.temperature))
    with make_learner(tmp_path) as learner:
        wanted = learner.logprobs(batch)
    with running_engine(tmp_path, "--device", "cpu") as url:
        found = await with_teacher(batch, TeacherConfig(url=url))
        with pytest.raises(EngineError, match=r"sampling\.temperature = 1\.0"):
            await with_teacher(sampled, TeacherConfig(url=url))
    assert found.teacher_logprobs is not None
    np.testing.assert_allclose(found.teacher_logprobs, wanted, atol=1e-5)
    with pytest.raises(EngineError, match=r"learner\.teacher\.url"):
        await with_teacher(batch, TeacherConfig(url=url, timeout_s=5))
