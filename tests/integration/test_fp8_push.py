"""A model in float8 blocks: read by the learner and by transformers, served by a real engine, pushed by every transport."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from engine_process import running_engine
from safetensors.torch import load_file, save_file
from tiny_models import make_batch, make_learner, make_model, oracle_logprobs
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from rlagent.errors import LearnerError, LoadError, WeightSyncError
from rlagent.fp8 import Fp8Blocks, stored
from rlagent.kernels.quantize import FLOAT8
from rlagent.trainer.config import LearnerConfig, OptimizerConfig, SyncConfig
from rlagent.trainer.weight_sync import WeightSync
from rlagent.trainer.weight_sync.engine_api import EngineApi, EngineFacts, refuse_other_quantization

pytestmark = pytest.mark.slow
BLOCK = (16, 16)
SAID = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
PROMPT = [5, 6, 7, 8, 9]
Q = "model.layers.1.self_attn.q_proj.weight"


def quantized(source: Path, directory: Path) -> Path:
    """A directory's model in float8 blocks."""
    directory.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": SAID}
    (directory / "config.json").write_text(json.dumps(config))
    weights = dict(stored(Fp8Blocks(block=BLOCK), load_file(source / "model.safetensors").items()))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    make_model(request.param, root / "whole", tied=False)
    return quantized(root / "whole", root / "float8")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[str]:
    with running_engine(model, "--max-running", "2", "--max-total-tokens", "512") as url:
        yield url


def post(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60, trust_env=False)


def logprobs(url: str) -> list[float]:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = post(url, "/generate", input_ids=PROMPT, return_logprob=True, sampling_params=params).json()
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_every_transport_pushes_what_the_learner_writes(engine: str, model: Path, tmp_path: Path) -> None:
    moving = LearnerConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-2))
    before = logprobs(engine)
    with make_learner(model, moving) as learner:
        learner.train_step(make_batch(version=0))
        learner.save_hf(tmp_path / "trained")
        weights = dict(learner.export_weights())
    written, source = load_file(tmp_path / "trained" / "model.safetensors"), load_file(model / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in written.items()} == {n: (t.shape, t.dtype) for n, t in source.items()}
    assert written[Q].dtype == FLOAT8
    with running_engine(tmp_path / "trained", "--max-running", "2", "--max-total-tokens", "512") as fresh:
        expected = logprobs(fresh)
        digests = post(fresh, "/weights_checker").json()["checksums"]
    assert digests.keys() == written.keys()
    for version, transport in enumerate(("tensor", "distributed", "disk", "delta"), start=1):
        sync = WeightSync(
            SyncConfig(transport=transport, bucket_bytes=30_000), engine_dtype=torch.float32, model_dir=model
        )  # type: ignore[arg-type]
        post(engine, "/pause_generation", mode="abort").raise_for_status()
        report = sync.push([engine], weights.items(), version=version)
        sync.close()
        assert report.verified == "yes"
        post(engine, "/continue_generation").raise_for_status()
        assert post(engine, "/weights_checker").json()["checksums"] == digests, transport
        assert logprobs(engine) == expected != before, transport
        post(engine, "/update_weights_from_disk", model_path=str(model)).raise_for_status()
        assert logprobs(engine) == before
    sync = WeightSync(SyncConfig(), engine_dtype=torch.float32)
    with pytest.raises(
        WeightSyncError, match=r"q_proj.weight' has dtype torch.float32, the model's is torch.float8_e4m3fn"
    ):
        sync.push([engine], weights.items(), version=9)
    sync.close()
    post(engine, "/update_weights_from_disk", model_path=str(model)).raise_for_status()
    assert logprobs(engine) == before


def test_transformers_reads_the_directory_as_the_learner_does(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97}
    make_model("qwen3", tmp_path / "whole", tied=False, **sizes)
    model = quantized(tmp_path / "whole", tmp_path / "float8")
    theirs = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, quantization_config=FineGrainedFP8Config(weight_block_size=BLOCK, dequantize=True)
    )
    batch = make_batch()
    with make_learner(model) as learner:
        ours = learner.logprobs(batch)
        weights = dict(learner.export_weights())
    assert torch.equal(weights[Q], dict(theirs.named_parameters())[Q])
    assert np.abs(ours - oracle_logprobs(theirs, batch).detach().numpy()).max() < 1e-5


def test_float8_engines_are_never_taken_for_the_learners_own_policy(model: Path) -> None:
    batch = make_batch(version=0)
    with make_learner(model) as learner:
        metrics = learner.train_step(batch)
    assert "mismatch/abs_mean" in metrics
    assert not [name for name in metrics if name.startswith("mismatch_fresh/") and name != "mismatch_fresh/share"]
    with pytest.raises(LearnerError, match="'rollout' with float8 weights"):
        make_learner(model, LearnerConfig(device="cpu", old_logprobs="rollout"))


def test_float8_that_the_config_does_not_name_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"q_proj\.weight' is torch\.float8_e4m3fn, and quantization_config"):
        make_learner(tmp_path)


def test_an_engine_that_quantizes_by_a_flag_is_refused() -> None:
    api = EngineApi("http://attached")
    api.__dict__["facts"] = EngineFacts(sglang=True, on_gpu=True, tensor=1, data=1, quantization="fp8")
    refuse_other_quantization(api, float8=True)
    with pytest.raises(WeightSyncError, match=r"http://attached runs with quantization 'fp8'.*model.path"):
        refuse_other_quantization(api, float8=False)
    api.close()
