"""Weight updates of a real engine process: every transport, what a token's version means, and updates that fail."""

import asyncio
import base64
import hashlib
import io
import os
import pickle
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_process import EngineClient, running_engine
from safetensors.torch import save_file
from tiny_models import free_ports, make_model

from rlagent.engine.updates import join_group
from rlagent.trainer.weight_sync.buckets import make_buckets
from rlagent.trainer.weight_sync.sglang_pickle import serialize_bucket

pytestmark = pytest.mark.slow
PROMPT = [3, 4, 5, 6, 7, 8]
Weights = dict[str, torch.Tensor]


class Policies:
    """Two sets of weights of one shape, as directories and as transformers models."""

    def __init__(self, root: Path) -> None:
        self.dirs: dict[str, Path] = {}
        self.models: dict[str, Any] = {}
        for name, noise in (("old", 0.0), ("new", 0.05)):
            self.dirs[name] = root / name
            model = make_model("qwen3", self.dirs[name])
            generator = torch.Generator().manual_seed(9)
            for parameter in model.parameters():
                parameter.data += noise * torch.randn(parameter.shape, generator=generator)
            model.config.max_position_embeddings = 2048
            model.save_pretrained(self.dirs[name])
            self.models[name] = model.eval()

    def weights(self, name: str) -> Weights:
        return {n: p.detach().clone() for n, p in self.models[name].named_parameters()}

    def checksums(self, name: str) -> dict[str, str]:
        return {n: hashlib.sha256(p.numpy().tobytes()).hexdigest() for n, p in self.weights(name).items()}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="module")
def url(policies: Policies) -> Iterator[str]:
    with running_engine(policies.dirs["old"], "--max-running", "4", "--max-total-tokens", "16384") as found:
        yield found


@pytest.fixture
async def engine(url: str, policies: Policies) -> AsyncIterator[EngineClient]:
    """The engine with the old weights, version 0, generating."""
    found = EngineClient(url)
    yield found
    await found.post("/abort_request", abort_all=True)
    await found.post("/update_weights_from_disk", model_path=str(policies.dirs["old"]), weight_version="0")
    await found.post("/continue_generation")
    await found.http.aclose()


async def checksums(engine: EngineClient) -> dict[str, str]:
    found: dict[str, str] = (await engine.post("/weights_checker", action="checksum")).json()["checksums"]
    return found


async def push(
    engine: EngineClient, weights: Weights, version: str | None = None, *, bucket_bytes: int = 20000
) -> None:
    """Stage weights bucket by bucket; the caller begins and ends."""
    for bucket in make_buckets(weights.items(), bucket_bytes):
        payload = serialize_bucket(bucket.flat, bucket.slots)
        body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "weight_version": version}
        await engine.post("/update_weights_from_tensor", **body)


def payload_of(content: object) -> dict[str, Any]:
    return {"serialized_named_tensors": [base64.b64encode(pickle.dumps(content)).decode()]}


# What a version means


def continued(old: Any, new: Any, ids: list[int], kept: int) -> torch.Tensor:
    """Logprobs of ids[1:], where the first `kept` ids have the old policy's keys and values and the new one does the rest."""
    with torch.no_grad():
        first = old(torch.tensor([ids[:kept]]), use_cache=True)
        rest = new(torch.tensor([ids[kept:]]), past_key_values=first.past_key_values)
    logits = torch.cat((first.logits[0], rest.logits[0]))[:-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_every_token_is_of_the_version_it_says(engine: EngineClient, policies: Policies, mode: str) -> None:
    params = {"max_new_tokens": 700, "ignore_eos": True}
    async with engine.stream(PROMPT, sampling_params=params) as chunks:
        await anext(chunks)
        await engine.post("/pause_generation", mode=mode)
        await engine.post("/begin_weight_update")
        await push(engine, policies.weights("new"), "1")
        await engine.post("/end_weight_update")
        await engine.post("/continue_generation")
        answer = [chunk async for chunk in chunks][-1]
    spans = [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]
    middle = spans[0][2]
    assert spans == [("0", 0, middle), ("1", middle, 700)]
    assert 0 < middle < 700
    ids = PROMPT + answer["output_ids"]
    given = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    old, new = policies.models["old"], policies.models["new"]
    start, turn = len(PROMPT) - 1, len(PROMPT) - 1 + middle  # where ids[1:] has the first output, and the first new one
    by_old = continued(old, old, ids, start)[start:]
    # retract computes all keys and values again. in_place keeps those of everything before the last old token.
    by_both = continued(old, new, ids, len(PROMPT) + middle - 1) if mode == "in_place" else continued(new, new, ids, 1)
    assert (given[:middle] - by_old[:middle]).abs().max() < 5e-5
    assert (given[middle:] - by_both[turn:]).abs().max() < 5e-5
    assert (given[middle:] - by_old[middle:]).abs().max() > 1e-2
    # A new request shares nothing that the old weights computed.
    again = await engine.generate(ids[:40], max_new_tokens=5)
    assert again["meta_info"]["cached_tokens"] == (0 if mode == "in_place" else 39)
    expected = continued(new, new, ids[:40] + again["output_ids"], 1)[39:]
    assert [e[0] for e in again["meta_info"]["output_token_logprobs"]] == pytest.approx(expected.tolist(), abs=5e-5)


async def test_an_aborted_answer_is_the_old_policys_alone(engine: EngineClient, policies: Policies) -> None:
    async with engine.stream(PROMPT, sampling_params={"max_new_tokens": 900, "ignore_eos": True}) as chunks:
        await anext(chunks)
        await engine.post("/pause_generation", mode="abort")
        await engine.post("/update_weights_from_disk", model_path=str(policies.dirs["new"]), weight_version="1")
        await engine.post("/continue_generation")
        answer = [chunk async for chunk in chunks][-1]
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["0"]
    after = await engine.generate(PROMPT, max_new_tokens=3)
    assert after["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 3}]
    assert after["meta_info"]["cached_tokens"] == 0


async def test_a_renamed_version(engine: EngineClient) -> None:
    async with engine.stream(PROMPT, sampling_params={"max_new_tokens": 500, "ignore_eos": True}) as chunks:
        await anext(chunks)
        await engine.post("/update_weight_version", new_version="5", abort_all_requests=False)
        answer = [chunk async for chunk in chunks][-1]
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["0", "5"]
    async with engine.stream(PROMPT, sampling_params={"max_new_tokens": 900, "ignore_eos": True}) as chunks:
        await anext(chunks)
        await engine.post("/update_weight_version", new_version="6")
        last = [chunk async for chunk in chunks][-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert await engine.version() == "6"


# Transports


async def test_nothing_of_an_update_serves_before_its_end(engine: EngineClient, policies: Policies) -> None:
    assert await checksums(engine) == policies.checksums("old")
    before = await engine.generate(PROMPT, max_new_tokens=9, temperature=0)
    await engine.post("/begin_weight_update")
    await push(engine, policies.weights("new"), "1")
    assert await checksums(engine) == policies.checksums("old")
    assert await engine.version() == "0"
    during = await engine.generate(PROMPT, max_new_tokens=9, temperature=0)
    assert during["output_ids"] == before["output_ids"]
    await engine.post("/end_weight_update")
    assert await checksums(engine) == policies.checksums("new")
    assert await engine.version() == "1"


async def test_named_tensors_without_a_bucket(engine: EngineClient, policies: Policies) -> None:
    await engine.post("/begin_weight_update")
    await engine.post("/update_weights_from_tensor", **payload_of(list(policies.weights("new").items())))
    await engine.post("/end_weight_update")
    assert await checksums(engine) == policies.checksums("new")
    assert await engine.version() == "0"  # nothing said otherwise


async def test_an_update_may_be_of_some_tensors_only(engine: EngineClient, policies: Policies) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    await engine.post("/begin_weight_update")
    await push(engine, {name: policies.weights("new")[name]}, "1")
    await engine.post("/end_weight_update")
    assert await checksums(engine) == {**policies.checksums("old"), name: policies.checksums("new")[name]}


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_a_broadcast(engine: EngineClient, policies: Policies, load_format: str | None) -> None:
    weights, port = policies.weights("new"), free_ports()
    place = {"master_address": "127.0.0.1", "master_port": port, "group_name": "push"}
    joining = asyncio.create_task(
        engine.post("/init_weights_update_group", **place, rank_offset=1, world_size=2, backend="gloo")
    )
    group = await asyncio.to_thread(
        join_group, "push", host="127.0.0.1", port=port, rank=0, world_size=2, backend="gloo"
    )
    await joining
    assert "exists" in await engine.refused(
        "/init_weights_update_group", **place, rank_offset=1, world_size=2, backend="gloo"
    )
    await engine.post("/begin_weight_update")
    body = {
        "names": list(weights),
        "dtypes": ["float32"] * len(weights),
        "shapes": [list(w.shape) for w in weights.values()],
        "group_name": "push",
        "load_format": load_format,
        "weight_version": "1",
    }
    receiving = asyncio.create_task(engine.post("/update_weights_from_distributed", **body))
    flat = torch.cat([w.flatten() for w in weights.values()])
    for tensor in [flat.view(torch.uint8)] if load_format else list(weights.values()):
        await asyncio.to_thread(dist.broadcast, tensor.contiguous(), group=group, group_src=0)
    await receiving
    await engine.post("/end_weight_update")
    assert await checksums(engine) == policies.checksums("new")
    await engine.post("/destroy_weights_update_group", group_name="push")
    dist.destroy_process_group(group)
    assert "no weight update group" in await engine.refused("/destroy_weights_update_group", group_name="push")


async def test_from_disk_in_shards_and_of_another_dtype(
    engine: EngineClient, policies: Policies, tmp_path: Path
) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in policies.weights("new").items()}
    policies.models["new"].save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    await engine.post("/update_weights_from_disk", model_path=str(tmp_path), weight_version="1")
    assert await checksums(engine) == policies.checksums("new")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    await engine.post("/update_weights_from_disk", model_path=str(tmp_path))
    expected = {n: hashlib.sha256(w.float().numpy().tobytes()).hexdigest() for n, w in weights.items()}
    assert await checksums(engine) == expected
    assert await engine.version() == "1"


# Updates that fail


async def test_a_sender_that_leaves_its_group_is_reported_and_the_old_weights_stay(
    engine: EngineClient, policies: Policies
) -> None:
    port = free_ports()
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    joining = asyncio.create_task(engine.post("/init_weights_update_group", **place, group_name="left"))
    options: dict[str, Any] = {"host": "127.0.0.1", "port": port, "rank": 0, "world_size": 2, "backend": "gloo"}
    group = await asyncio.to_thread(join_group, "left", **options)
    await joining
    await engine.post("/begin_weight_update")
    shape = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]], "group_name": "left"}
    receiving = asyncio.create_task(engine.refused("/update_weights_from_distributed", **shape))
    dist.destroy_process_group(group)
    del group
    assert "broke off" in await receiving
    await engine.post("/destroy_weights_update_group", group_name="left")
    assert await checksums(engine) == policies.checksums("old")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (("model.norm.weight", torch.ones(3)), "shape (3,)"),
        (("model.nor.weight", torch.ones(32)), "'model.nor.weight' is not one of"),
        (("model.norm.weight", torch.ones(32, dtype=torch.int64)), "int64"),
    ],
)
async def test_a_tensor_that_does_not_fit_leaves_the_old_weights_whole(
    engine: EngineClient, policies: Policies, tensor: tuple[str, torch.Tensor], words: str
) -> None:
    await engine.post("/pause_generation", mode="retract")
    await engine.post("/begin_weight_update")
    await push(engine, policies.weights("new"), "1")
    assert words in await engine.refused("/update_weights_from_tensor", **payload_of([tensor]))
    assert "update is open" in await engine.refused("/continue_generation")
    assert await checksums(engine) == policies.checksums("old")
    assert await engine.version() == "0"
    await engine.post("/begin_weight_update")  # a new session drops what the failed one staged
    await push(engine, {"model.norm.weight": policies.weights("new")["model.norm.weight"]}, "2")
    await engine.post("/end_weight_update")
    await engine.post("/continue_generation")
    changed = {n for n, h in (await checksums(engine)).items() if h != policies.checksums("old")[n]}
    assert changed == {"model.norm.weight"}


async def test_an_unfinished_update_is_dropped_by_a_load_from_disk(engine: EngineClient, policies: Policies) -> None:
    await engine.post("/begin_weight_update")
    await push(engine, policies.weights("new"), "1")
    await engine.post("/update_weights_from_disk", model_path=str(policies.dirs["old"]), weight_version="2")
    assert "no weight update is open" in await engine.refused("/end_weight_update")
    assert await checksums(engine) == policies.checksums("old")
    assert await engine.version() == "2"


@pytest.mark.parametrize("broken", ["missing", "truncated", "misshapen", "incomplete"])
async def test_a_checkpoint_that_does_not_load_leaves_the_old_weights(
    engine: EngineClient, policies: Policies, tmp_path: Path, broken: str
) -> None:
    weights = policies.weights("new")
    if broken == "misshapen":
        weights["model.norm.weight"] = torch.ones(3)
    if broken == "incomplete":
        del weights["model.norm.weight"]
    if broken != "missing":
        save_file(weights, tmp_path / "model.safetensors")
    if broken == "truncated":
        os.truncate(tmp_path / "model.safetensors", 3000)
    message = await engine.refused("/update_weights_from_disk", model_path=str(tmp_path), weight_version="1")
    assert str(tmp_path) in message
    assert await checksums(engine) == policies.checksums("old")
    assert await engine.version() == "0"
    assert (await engine.http.get("/health_generate")).status_code == 200


class Attack:
    """Unpickled the usual way, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


async def test_a_payload_that_is_a_program_is_refused_and_not_run(
    engine: EngineClient, policies: Policies, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    inner = io.BytesIO()
    torch.save(Attack(made), inner)

    class Nested:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.storage._load_from_bytes, (inner.getvalue(),)

    await engine.post("/begin_weight_update")
    for content in (Attack(made), [("model.norm.weight", Attack(made))], Nested()):
        for load_format in (None, "flattened_bucket"):
            body = {**payload_of(content), "load_format": load_format}
            assert "cannot be read" in await engine.refused("/update_weights_from_tensor", **body)
    assert not made.exists()
    pickle.loads(pickle.dumps(Attack(made)))
    assert made.exists()  # the attack is a real one
    assert await checksums(engine) == policies.checksums("old")


async def test_requests_out_of_order_or_malformed_are_refused_by_reason(engine: EngineClient) -> None:
    norm = payload_of([("model.norm.weight", torch.ones(32))])
    for path, body, words in (
        ("/update_weights_from_tensor", norm, "begin_weight_update"),
        ("/end_weight_update", {}, "begin_weight_update"),
        ("/update_weights_from_tensor", {}, "serialized_named_tensors"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "has 0 entries"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}, "cannot be read"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["not base64!"]}, "cannot be read"),
        ("/update_weights_from_tensor", {**norm, "load_format": "direct"}, "direct"),
        ("/update_weights_from_tensor", payload_of([1]), "list of (name, tensor)"),
        ("/update_weights_from_tensor", {**payload_of([1]), "load_format": "flattened_bucket"}, "malformed"),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "init_weights_update_group"),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": []}, "do not match"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "/nowhere"),
        ("/weights_checker", {"action": "reset"}, "reset"),
    ):
        assert words in await engine.refused(path, **body), path  # type: ignore[arg-type]
    assert (await engine.http.get("/health_generate")).status_code == 200
