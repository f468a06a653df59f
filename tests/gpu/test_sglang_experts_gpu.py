"""The experts that a real SGLang server tells (R3), which it does on a GPU alone: transformers' own choice, over a prefix cache too.

Needs an SGLang for CUDA: RLAGENT_SGLANG_PYTHON names its Python.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_inside import routed_experts
from engine_process import EngineClient
from sglang_process import running_sglang
from tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.slow]
LAYERS, TOP_K = 3, 2
PROMPT = list(range(3, 40))
NEW = 24


def chosen(model: Any, ids: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """transformers' experts [tokens, layers, top_k], each token's in ascending order."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return np.stack([scores.topk(TOP_K, -1).indices.sort(-1).values.numpy() for scores in logits], axis=1)


@pytest.mark.parametrize("overlap", [(), ("--disable-overlap-schedule",)], ids=["overlapped", "in-step"])
async def test_the_experts_of_each_token_are_transformers(tmp_path: Path, overlap: tuple[str, ...]) -> None:
    model = make_model("qwen3_moe", tmp_path, tied=False, mlp_only_layers=[]).eval()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    flags = ("--enable-return-routed-experts", "--skip-tokenizer-init", "--disable-cuda-graph", *overlap)
    with running_sglang(tmp_path, *flags, device="cuda") as url:
        engine = EngineClient(url)
        asked = {
            "input_ids": PROMPT,
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_start_len": 0,
        }
        params = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
        one = (await engine.post("/generate", **asked, sampling_params=params)).json()
        ids = PROMPT + one["output_ids"]
        assert np.array_equal(np.sort(routed_experts(one, LAYERS, TOP_K), -1), chosen(model, ids[:-1]))
        later = {**asked, "input_ids": [*ids, 1, 2], "routed_experts_start_len": len(ids) - 1}
        two = (await engine.post("/generate", **later, sampling_params=params)).json()
        whole = [*ids, 1, 2, *two["output_ids"]]
        found = np.sort(routed_experts(two, LAYERS, TOP_K), -1)
        assert np.array_equal(found, chosen(model, whole[:-1])[len(ids) - 1 :])
        assert two["meta_info"]["cached_tokens"] > 0
        await engine.http.aclose()
