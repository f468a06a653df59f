"""Pushing weights to a real embedded engine over every transport, and what happens when a push fails."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from engine_process import running_engine
from safetensors.torch import load_file, save_file

from rlagent.errors import WeightSyncError
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import WeightSync

pytestmark = pytest.mark.slow
MODEL = Path(__file__).parents[2] / "examples" / "parcels" / "model"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def old() -> Weights:
    return {name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()}


@pytest.fixture(scope="module")
def new(old: Weights) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in old.items()}


@pytest.fixture
def engine() -> Iterator[str]:
    with running_engine(MODEL) as url:
        yield url


def post(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def logprobs(url: str) -> list[float]:
    post(url, "/flush_cache").raise_for_status()  # a reused prefix is the same but for the last bit
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = post(url, "/generate", input_ids=[5, 6, 7, 8, 9], return_logprob=True, sampling_params=params).json()
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def version(url: str) -> str:
    return str(httpx.get(url + "/model_info").json()["weight_version"])


def sync(transport: str, **options: object) -> WeightSync:
    return WeightSync(SyncConfig(transport=transport, bucket_bytes=300_000, **options), engine_dtype=torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_a_push_is_a_fresh_load(engine: str, old: Weights, new: Weights, transport: str, tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((MODEL / file).read_bytes())
    save_file(new, tmp_path / "model.safetensors")
    before = logprobs(engine)
    pusher = sync(transport)
    try:
        for number, weights in ((1, new), (2, old), (3, new)):
            post(engine, "/pause_generation", mode="abort").raise_for_status()
            report = pusher.push([engine], weights.items(), version=number)
            assert (report.version, report.verified) == (number, "yes")
            assert report.num_buckets > 3
            assert version(engine) == str(number)
            post(engine, "/continue_generation").raise_for_status()
            assert (logprobs(engine) == before) is (weights is old)
        pushed = logprobs(engine)
    finally:
        pusher.close()
    with running_engine(tmp_path) as fresh:
        assert logprobs(fresh) == pushed


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_a_wrong_shape_is_refused_by_name_and_the_old_weights_serve_on(
    engine: str, old: Weights, transport: str
) -> None:
    before = logprobs(engine)
    broken = {**old, "model.norm.weight": torch.ones(3)}
    post(engine, "/pause_generation", mode="abort").raise_for_status()
    pusher = sync(transport)
    with pytest.raises(WeightSyncError, match=rf"{engine}.*model\.norm\.weight"):
        pusher.push([engine], broken.items(), version=1)
    pusher.close()
    assert version(engine) == "0"
    refused = post(engine, "/continue_generation")
    assert refused.status_code == 400
    assert "update is open" in refused.text
    post(engine, "/update_weights_from_disk", model_path=str(MODEL), weight_version="0").raise_for_status()
    post(engine, "/continue_generation").raise_for_status()
    assert logprobs(engine) == before


@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_an_engine_killed_in_mid_push_is_named_and_nobody_hangs(old: Weights, transport: str) -> None:
    with running_engine(MODEL) as engine:
        pid = _listener(engine)

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for index, item in enumerate(old.items()):
                if index == 5:
                    os.kill(pid, signal.SIGKILL)
                yield item

        pusher = sync(transport)
        with pytest.raises(WeightSyncError, match=engine):
            pusher.push([engine], weights(), version=1)
        pusher.close()


def test_an_engine_that_holds_something_else_is_found_out(
    engine: str, old: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlagent.trainer.weight_sync.transports import TensorTransport

    send = TensorTransport.send
    monkeypatch.setattr(
        TensorTransport, "send", lambda self, engines, bucket: (bucket.flat[:4].zero_(), send(self, engines, bucket))
    )
    pusher = sync("tensor")
    with pytest.raises(WeightSyncError, match="does not hold what was sent"):
        pusher.push([engine], old.items(), version=1)
    pusher.close()


def _listener(url: str) -> int:
    """The process id that listens at a URL: the engine answers it itself."""
    return int(httpx.get(url + "/server_info").json()["pid"])
