"""A mixture of experts on a real SGLang server: a push of it is checked whole, the tensors in which a layer's experts lie included."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from policies import PARCELS
from safetensors.torch import load_file
from sglang_process import running_sglang
from tiny_models import make_model

from rlagent.errors import WeightSyncError
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import WeightSync
from rlagent.trainer.weight_sync.checksums import Expected
from rlagent.trainer.weight_sync.engine_api import EngineApi

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


def mixture(directory: Path) -> dict[str, torch.Tensor]:
    """A random Qwen3-MoE with the demo's tokenizer, without dense layers, which SGLang does not know of; its tensors as checkpoints
    name them.
    """
    vocab = json.loads((PARCELS / "config.json").read_text())["vocab_size"]
    make_model("qwen3_moe", directory, tied=False, vocab_size=vocab, head_dim=32, mlp_only_layers=[])
    for path in PARCELS.glob("*.j*"):
        if path.name != "config.json":
            shutil.copy(path, directory)
    return load_file(directory / "model.safetensors")


async def test_a_mixture_is_pushed_and_checked_whole(tmp_path: Path) -> None:
    weights = mixture(tmp_path / "model")
    assert sum(".experts." in name for name in weights) == 3 * 4 * 3
    with running_sglang(tmp_path / "model", "--context-length", "128") as url:
        api = EngineApi(url)
        for name in ("model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.2.mlp.experts.1.down_proj.weight"):
            expected = Expected([api.facts])
            for each, tensor in weights.items():
                changed = tensor.clone()
                if each == name:
                    changed.view(-1)[-1] += 1e-6
                expected.add(each, changed)
            with pytest.raises(WeightSyncError, match=r"1 of \d+ tensors differ, first '.*experts.w(13|2)_weight'"):
                await asyncio.to_thread(expected.compare, api)
        moved = {name: tensor + 0.01 for name, tensor in weights.items()}
        sync = WeightSync(SyncConfig(transport="tensor", bucket_bytes=100_000), engine_dtype=torch.float32)
        await asyncio.to_thread(api.post, "/pause_generation", {"mode": "abort"})
        report = await asyncio.to_thread(lambda: sync.push([url], moved.items(), version=1))
        assert report.verified == "yes"
        sync.close()
        api.close()
