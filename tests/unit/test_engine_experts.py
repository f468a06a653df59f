"""Which experts the embedded engine gave to each token: told as SGLang tells it, equal to transformers' own choice."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_inside import generate, prompts, routed_experts, running
from engine_process import widen_context
from tiny_models import make_model

from rlagent.errors import EngineError

LAYERS, TOP_K = 3, 2
ASKED = {"return_routed_experts": True}


def chosen(model: Any, ids: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """transformers' experts [tokens, layers, top_k], each token's in ascending order; 0 in the dense layer."""
    found = np.zeros((len(ids), LAYERS, TOP_K), np.int64)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    for layer, scores in zip((0, 2), logits, strict=True):  # the layer between is dense
        found[:, layer] = scores.topk(TOP_K, -1).indices.sort(-1).values.numpy()
    return found


async def test_each_token_that_was_fed_has_the_experts_of_transformers(tmp_path: Path) -> None:
    """Prompts in pieces, decoded side by side, rows that grow; the second turn reuses the first's prefix."""
    make_model("qwen3_moe", tmp_path)
    widen_context(tmp_path, 512)
    model = make_model("qwen3_moe", tmp_path / "reference").eval()
    asked = prompts(3, (40, 70, 5))
    async with running(tmp_path, max_total_tokens=1600, max_running=4) as engine:
        found = await asyncio.gather(*(generate(engine, p, asked=ASKED, max_new_tokens=90) for p in asked))
        for prompt, (one,) in zip(asked, found, strict=True):
            ids = prompt + one["output_ids"]
            routed = routed_experts(one, LAYERS, TOP_K)
            assert np.array_equal(np.sort(routed, -1), chosen(model, ids[:-1]))
            start = len(prompt) - 1  # also of what is in the prefix cache now
            (two,) = await generate(
                engine, [*ids, 1, 2], asked={**ASKED, "routed_experts_start_len": start}, max_new_tokens=4
            )
            whole = [*ids, 1, 2, *two["output_ids"]]
            assert np.array_equal(np.sort(routed_experts(two, LAYERS, TOP_K), -1), chosen(model, whole[:-1])[start:])
            assert two["meta_info"]["cached_tokens"] > 0


async def test_experts_are_told_only_where_they_are_asked_for_and_exist(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path / "experts")
    make_model("qwen3", tmp_path / "dense")
    async with running(tmp_path / "experts") as engine:
        (one,) = await generate(engine, [1, 2, 3])
        assert "routed_experts" not in one["meta_info"]
        with pytest.raises(EngineError, match="routed_experts_start_len"):
            await generate(engine, [1, 2, 3], asked={**ASKED, "routed_experts_start_len": 4})
    async with running(tmp_path / "dense") as engine:
        (one,) = await generate(engine, [1, 2, 3], asked=ASKED)
        assert "routed_experts" not in one["meta_info"]
