"""SmolLM2-135M-Instruct from the package index, trained for real on the CPU: two small steps of `rlagent train`, from the raw model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import demo
import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.agents, pytest.mark.slow]
CONFIG = demo.ROOT / "examples" / "smollm2" / "run.toml"
SMALL = (
    "run.steps=2", "rollout.group_size=2", "rollout.timeout_s=600", "learner.batch.groups=2", "learner.batch.tokens=1024",
    "eval.num_tasks=1", "eval.every=100", "engine.max_running=4", "engine.max_total_tokens=4096", "sampling.max_tokens=24",
    "learner.optimizer.lr=1e-4", "buffer.max_staleness=0", "checkpoint.every=100", "sync.snapshot_every=100",
)  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """What examples/smollm2/get_model.sh prints, from RLAGENT_SMOLLM2."""
    found = os.environ.get("RLAGENT_SMOLLM2")
    if not found:
        why = "RLAGENT_SMOLLM2 is not set: give it what examples/smollm2/get_model.sh prints"
        if os.environ.get("RLAGENT_REQUIRE_AGENTS") == "1":
            pytest.fail(why)
        pytest.skip(why)
    return Path(found)


def test_two_steps_train_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [part for setting in (f"model.path={smollm2}", *SMALL) for part in ("--set", setting)]
    demo.command("train", "--config", str(CONFIG), "--run-dir", str(run), *settings, timeout_s=1500)
    records = [record for record in demo.metrics(run) if record["step"] > 0]
    assert [record["policy/version"] for record in records] == [1, 2]
    for record in records:
        assert record["data/num_rollouts"] == 4
        assert (
            record["mismatch/abs_max"] < 1e-3
        )  # the engine's and the learner's logprobs of the same tokens, in float32
    assert max(record["policy/grad_norm"] for record in records) > 0
    before, after = (load_file(path / "model.safetensors") for path in (smollm2, run / "model"))
    moved = [name for name in before if not torch.equal(before[name].float(), after[name].float())]
    assert moved
    assert set(before) == set(after)
    assert json.loads((run / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_recorded_tokens_can_be_reused_under_its_tool_template(smollm2: Path) -> None:
    assert "reuse of recorded tokens is proven" in demo.command("doctor", "--model", str(smollm2))
