"""Pushing weights to real embedded engines over every transport, and what is left when a push fails."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
import transformers
from engine_process import running_engine
from safetensors.torch import load_file, save_file

from rlagent.errors import WeightSyncError
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import WeightSync, distributed, engine_api
from rlagent.trainer.weight_sync.buckets import make_buckets
from rlagent.trainer.weight_sync.engine_api import EngineSet
from rlagent.trainer.weight_sync.sglang_pickle import serialize_bucket
from rlagent.trainer.weight_sync.transports import DiskTransport

pytestmark = pytest.mark.slow
MODEL = Path(__file__).parents[2] / "examples" / "parcels" / "model"
TRANSPORTS = ["tensor", "distributed", "disk", "delta"]
PROMPT_S = 20.0  # far below every timeout of a push; a machine under load needs some
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def old() -> Weights:
    return {name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()}


@pytest.fixture(scope="module")
def new(old: Weights) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in old.items()}


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    with running_engine(MODEL) as url:
        yield url


@pytest.fixture
def engine(shared: str) -> str:
    """An engine with the old weights, version 0, generating."""
    restore(shared)
    return shared


@pytest.fixture(scope="module")
def expected(new: Weights, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What an engine that was started with the new weights says."""
    directory = tmp_path_factory.mktemp("new")
    for file in ("config.json", "tokenizer.json"):
        (directory / file).write_bytes((MODEL / file).read_bytes())
    save_file(new, directory / "model.safetensors")
    with running_engine(directory) as url:
        return logprobs(url)


def post(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def restore(url: str) -> None:
    """What the router does after a push that failed."""
    post(url, "/update_weights_from_disk", model_path=str(MODEL), weight_version="0").raise_for_status()
    post(url, "/continue_generation").raise_for_status()


def logprobs(url: str) -> list[float]:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = post(url, "/generate", input_ids=[5, 6, 7, 8, 9], return_logprob=True, sampling_params=params).json()
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def version(url: str) -> str:
    return str(httpx.get(url + "/model_info", timeout=60).json()["weight_version"])


def process_id(url: str) -> int:
    return int(httpx.get(url + "/server_info", timeout=60).json()["pid"])


def sync(transport: str, **options: object) -> WeightSync:
    config = SyncConfig(transport=transport, bucket_bytes=300_000, **options)  # type: ignore[arg-type]
    return WeightSync(config, engine_dtype=torch.float32, model_dir=MODEL)


def killing(weights: Weights, pid: int, at: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index, item in enumerate(weights.items()):
        if index == at:
            os.kill(pid, signal.SIGKILL)
        yield item


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_push_is_a_fresh_load(engine: str, old: Weights, new: Weights, expected: list[float], transport: str) -> None:
    before = logprobs(engine)
    versions = []

    def watched(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights.items():
            versions.append(version(engine))
            yield item

    pusher = sync(transport)
    digests = []
    for number, weights in ((1, new), (2, old), (3, new)):
        post(engine, "/pause_generation", mode="abort").raise_for_status()
        report = pusher.push([engine], watched(weights), version=number)
        assert (report.version, report.verified) == (number, "yes")
        assert report.num_buckets > 3
        assert report.num_bytes >= sum(tensor.nbytes for tensor in weights.values())
        assert set(versions) == {str(number - 1)}, "the version is stamped before the end"
        assert version(engine) == str(number)
        post(engine, "/continue_generation").raise_for_status()
        assert logprobs(engine) == (expected if weights is new else before)
        digests.append(report.checksum)
        versions.clear()
    assert digests[0] == digests[2] != digests[1]
    assert before != expected
    pusher.close()


@pytest.mark.parametrize("transport", TRANSPORTS[:3])
def test_several_engines_and_one_that_joins_later(old: Weights, new: Weights, transport: str) -> None:
    pusher = sync(transport)
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(running_engine(MODEL)) for _ in range(3))
        pusher.push([first, second], new.items(), version=1)
        assert logprobs(first) == logprobs(second) != logprobs(third)
        pusher.push([second, third], old.items(), version=2)
        assert [version(url) for url in (first, second, third)] == ["1", "2", "2"]
        assert logprobs(second) == logprobs(third) != logprobs(first)
        pusher.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wrong_shape_is_refused_by_name_and_a_reload_serves_the_old_weights(
    engine: str, old: Weights, new: Weights, transport: str
) -> None:
    before = logprobs(engine)
    path = "/update_weights_from_" + ("disk" if transport == "delta" else transport)
    pusher = sync(transport)
    post(engine, "/pause_generation", mode="abort").raise_for_status()
    with pytest.raises(WeightSyncError, match=rf"{engine} refused {path}.*model\.norm\.weight"):
        pusher.push([engine], {**new, "model.norm.weight": torch.ones(3)}.items(), version=1)
    assert version(engine) == "0"
    if transport in ("tensor", "distributed"):
        refused = post(engine, "/continue_generation")
        assert refused.status_code == 400
        assert "update is open" in refused.text
    restore(engine)
    assert logprobs(engine) == before
    pusher.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_push_mends_a_failed_one(engine: str, new: Weights, expected: list[float], transport: str) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(new.items()):
            if index == 5:
                raise RuntimeError("the learner failed in the gather")
            yield item[0], item[1] + 1

    pusher = sync(transport)
    with pytest.raises(RuntimeError, match="in the gather"):
        pusher.push([engine], broken(), version=1)
    with pytest.raises(WeightSyncError, match="nothing_like_it"):
        pusher.push([engine], {"nothing_like_it": torch.ones(3)}.items(), version=1)
    pusher.push([engine], new.items(), version=2)
    assert (version(engine), logprobs(engine)) == ("2", expected)
    pusher.close()


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_a_push_that_outlives_its_lease_sends_nothing_more(
    engine: str, old: Weights, new: Weights, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(engine_api, "time", SimpleNamespace(monotonic=lambda: now))
    before = logprobs(engine)
    pusher = sync(transport)
    pusher.push([engine], old.items(), version=1)

    def held_up() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal now
        for index, item in enumerate(new.items()):
            if index == len(new) // 2:  # stopped, say: meanwhile the lease runs out and the router gives the publish up
                now = 2.0
                restore(engine)
            yield item

    with pytest.raises(WeightSyncError, match="lease ran out"):
        pusher.push([engine], held_up(), version=2, until=1.0)
    assert logprobs(engine) == before
    pusher.close()


@pytest.mark.parametrize("at", [1, 12])
@pytest.mark.parametrize("transport", TRANSPORTS[:3])
def test_an_engine_killed_in_mid_push_is_named_and_the_other_is_free_at_once(
    engine: str, old: Weights, new: Weights, transport: str, at: int
) -> None:
    before = logprobs(engine)
    pusher = sync(transport)
    with running_engine(MODEL) as doomed:
        pusher.push([doomed, engine], new.items(), version=1)  # a group is there
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match=doomed):
            pusher.push([doomed, engine], killing(old, process_id(doomed), at), version=2)
        restore(engine)
        assert (version(engine), logprobs(engine)) == ("0", before)
        assert time.monotonic() - began < PROMPT_S
    pusher.push([engine], new.items(), version=3)
    assert version(engine) == "3"
    pusher.close()


def test_an_engine_that_dies_before_the_group_is_made_frees_the_others_after_the_time_to_join(
    engine: str, old: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_JOIN", timedelta(seconds=3))
    pusher = sync("distributed")
    with running_engine(MODEL) as doomed:
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match=f"{doomed} went away at /init_weights_update_group"):
            pusher.push([doomed, engine], killing(old, process_id(doomed), 0), version=1)
        assert time.monotonic() - began < 3
        restore(engine)
        assert time.monotonic() - began < PROMPT_S
    pusher.push([engine], old.items(), version=2)
    assert version(engine) == "2"
    pusher.close()


def test_an_engine_that_dies_while_it_is_waited_for(old: Weights) -> None:
    """It is stopped, so the learner stands in the middle of a push, and then killed."""
    for transport in TRANSPORTS[:3]:
        pusher = sync(transport)
        with running_engine(MODEL) as engine:
            pid = process_id(engine)
            pusher.push([engine], old.items(), version=1)
            os.kill(pid, signal.SIGSTOP)
            timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
            timer.start()
            began = time.monotonic()
            with pytest.raises(WeightSyncError, match=engine):
                pusher.push([engine], old.items(), version=2)
            pusher.close()
            assert time.monotonic() - began < PROMPT_S
            timer.join()


LEARNER = """
import os, signal, sys
import torch
from safetensors.torch import load_file
from rlagent.errors import WeightSyncError
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import WeightSync

engine, pid, model, what = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
weights = load_file(model + "/model.safetensors")

def killing():
    for index, item in enumerate(weights.items()):
        if index == 5:
            os.kill(pid if what == "engine" else os.getpid(), signal.SIGKILL)
        yield item

pusher = WeightSync(SyncConfig(transport="distributed", bucket_bytes=100_000), engine_dtype=torch.float32)
pusher.push([engine], weights.items(), version=1)
try:
    pusher.push([engine], killing(), version=2)
except WeightSyncError as error:
    print("WeightSyncError", error)
pusher.close()
"""


def run_learner(engine: str, what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LEARNER, engine, str(process_id(engine)), str(MODEL), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_learner_whose_engine_died_can_end(old: Weights) -> None:
    """No thread of a broken group keeps the process."""
    with running_engine(MODEL) as engine:
        began = time.monotonic()
        ended = run_learner(engine, "engine")
    assert ended.returncode == 0, ended.stderr
    assert f"WeightSyncError engine {engine}" in ended.stdout
    assert time.monotonic() - began < 2 * PROMPT_S


def test_an_engine_whose_learner_died_serves_the_old_weights_after_a_reload(engine: str) -> None:
    before = logprobs(engine)
    ended = run_learner(engine, "learner")
    assert ended.returncode == -signal.SIGKILL
    assert version(engine) == "1"
    restore(engine)
    assert (version(engine), logprobs(engine)) == ("0", before)


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_an_engine_that_holds_something_else_is_found_out(engine: str, new: Weights, transport: str) -> None:
    """Somebody else sends the engine another value of a tensor that it has already taken."""

    def disturbed() -> Iterator[tuple[str, torch.Tensor]]:
        names = list(new)
        for name in names:
            if name == names[-1]:
                (bucket,) = make_buckets([(names[0], new[names[0]] + 1e-3)], 2**30)
                body = {"serialized_named_tensors": [serialize_bucket(bucket.flat, bucket.slots)]}
                post(engine, "/update_weights_from_tensor", load_format="flattened_bucket", **body).raise_for_status()
            yield name, new[name]

    pusher = sync(transport)
    with pytest.raises(WeightSyncError, match=rf"{engine} does not hold.* 1 of {len(new)} .*{next(iter(new))!r}"):
        pusher.push([engine], disturbed(), version=1)
    pusher.close()


def test_checksums_are_compared_every_nth_time(engine: str, new: Weights) -> None:
    pusher = sync("tensor", verify_every=2)
    reports = [pusher.push([engine], new.items(), version=number) for number in (1, 2, 3, 4)]
    assert [report.verified for report in reports] == ["not this time", "yes", "not this time", "yes"]
    assert [bool(report.checksum) for report in reports] == [False, True, False, True]
    pusher.close()


def test_the_disk_transport_writes_a_whole_model_directory(
    engine: str, new: Weights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As SGLang wants it, and transformers loads: config and tokenizer beside the shards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    transport = DiskTransport(MODEL)
    (directory,) = tmp_path.iterdir()
    loaded = []

    class Loading(EngineSet):
        def post(self, path: str, body: object) -> list[dict[str, object]]:  # type: ignore[override]
            model = transformers.AutoModelForCausalLM.from_pretrained(directory)
            transformers.AutoTokenizer.from_pretrained(directory)
            loaded.append((path, {name: tensor.detach() for name, tensor in model.named_parameters()}))
            return []

    engines = Loading([engine])
    for weights in (new, {name: tensor + 1 for name, tensor in new.items()}):
        for bucket in make_buckets(weights.items(), 300_000):
            transport.send(engines, bucket)
        transport.finish(engines, 1)
        path, found = loaded.pop()
        assert path == "/update_weights_from_disk"
        assert list(directory.iterdir()) == []
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    engines.close()
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_not_there_is_named(old: Weights) -> None:
    pusher = sync("tensor")
    with pytest.raises(WeightSyncError, match=r"http://127\.0\.0\.1:9 went away at /server_info"):
        pusher.push(["http://127.0.0.1:9"], old.items(), version=1)
    pusher.close()
