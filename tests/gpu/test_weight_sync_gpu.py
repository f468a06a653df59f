"""Weights by CUDA IPC handles into an embedded engine on the same GPU, while its memory is lent; float8 blocks made on a GPU."""

from pathlib import Path

import httpx
import pytest
import torch
from engine_process import running_engine
from tiny_models import make_model

from rlagent.fp8 import Fp8Blocks, stored
from rlagent.kernels.quantize import dequantize_blocks, quantize_blocks
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import WeightSync

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KV_CACHE = {"tags": ["kv_cache"]}


def post(url: str, path: str, **body: object) -> None:
    httpx.post(url + path, json=body, timeout=120, trust_env=False).raise_for_status()


def test_a_push_by_handles_is_what_the_engine_holds(tmp_path: Path) -> None:
    """Many buckets, so that memory of answered ones is used again while others are on their way."""
    model = make_model("qwen3", tmp_path / "model", hidden_size=512, intermediate_size=1024)
    with running_engine(tmp_path / "model", "--device", "cuda", "--dtype", "bfloat16") as url:
        sync = WeightSync(
            SyncConfig(transport="tensor", bucket_bytes=1_000_000),
            engine_dtype=torch.bfloat16,
            model_dir=tmp_path / "model",
        )
        for version in range(1, 9):
            post(url, "/pause_generation", mode="abort")
            post(url, "/flush_cache")
            post(url, "/release_memory_occupation", **KV_CACHE)
            weights = {name: (tensor.detach() * version).cuda() for name, tensor in model.named_parameters()}
            report = sync.push([url], weights.items(), version=version)
            assert (report.version, report.verified) == (version, "yes")
            post(url, "/resume_memory_occupation", **KV_CACHE)
            post(url, "/continue_generation")
            post(url, "/generate", input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})
        sync.close()


def test_float8_blocks_of_a_gpu_are_those_of_the_cpu() -> None:
    weight = torch.randn(300, 520, generator=torch.Generator().manual_seed(3)).bfloat16()
    block = (128, 128)
    for theirs, ours in zip(quantize_blocks(weight.cuda(), block), quantize_blocks(weight, block), strict=True):
        assert torch.equal(theirs.cpu().view(torch.uint8), ours.view(torch.uint8))
    quantized, scale_inv = quantize_blocks(weight.cuda(), block)
    assert torch.equal(
        dequantize_blocks(quantized, scale_inv, block).cpu(), dequantize_blocks(*quantize_blocks(weight, block), block)
    )
    name = "model.layers.0.mlp.up_proj.weight"
    assert [each for each, _ in stored(Fp8Blocks(block=block), [(name, weight.cuda())])] == [name, f"{name}_scale_inv"]
