"""The critic and the refreshed reference compute on every layout what they compute in one process, and move with its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_layouts import layout_name
from learner_ranks import launch
from scored_layouts import SCORED
from tiny_models import make_model

PAIRS: list[dict[str, Any]] = [
    {"pipeline": 2, "virtual_pipeline": 2},
    {"tensor": 2, "sequence": True},
    {"data": 2, "distributed_optimizer": True},
]
COMPARED = ("value/", "policy/loss", "policy/grad_norm", "policy/kl_reference")


def compared(metrics: dict[str, float]) -> dict[str, float]:
    return {name: number for name, number in metrics.items() if name.startswith(COMPARED)}


@pytest.mark.slow
def test_critic_and_reference_agree_with_one_process(tmp_path: Path) -> None:
    """Five layers, which two stages of two chunks each run interleaved; the reference takes the policy's weights at step 2."""
    make_model("qwen3", tmp_path / "model", layers=5)
    launch("scored_layouts.py", 1, [{}], tmp_path / "model", tmp_path)
    launch("scored_layouts.py", 2, PAIRS, tmp_path / "model", tmp_path)
    wanted = torch.load(tmp_path / "one.pt", weights_only=False)
    first = wanted["metrics"]
    assert first[0]["value/grad_norm"] > SCORED.optimizer.clip_grad, "the critic's gradients were clipped"
    assert first[1]["policy/kl_reference"] > 1e-4 > abs(first[2]["policy/kl_reference"])
    assert first[3]["value/squared_error"] != pytest.approx(first[0]["value/squared_error"], rel=1e-2)
    for layout in PAIRS:
        name = layout_name(layout)
        found = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        for step, (one, other) in enumerate(zip(found["metrics"], first, strict=True)):
            assert compared(one) == pytest.approx(compared(other), rel=1e-4, abs=1e-5), (name, step)
        for key, tensor in wanted["weights"].items():
            assert (found["weights"][key] - tensor).abs().max() < 1e-4, (name, key)
        assert compared(found["resumed"]) == compared(found["metrics"][3]), name
        assert compared(found["resharded"]) == pytest.approx(compared(first[3]), rel=1e-4, abs=1e-5), name
