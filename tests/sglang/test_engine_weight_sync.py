"""Weights into both kinds of engine: every transport, proven by checksums and by a recompute; updates in mid-answer; failures."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineClient
from policies import Policies, continued

from rlagent.errors import WeightSyncError
from rlagent.trainer.config import SyncConfig
from rlagent.trainer.weight_sync import PushReport, WeightSync
from rlagent.trainer.weight_sync.checksums import Expected
from rlagent.trainer.weight_sync.engine_api import EngineApi

pytestmark = pytest.mark.slow
TRANSPORTS = ["tensor", "distributed", "disk", "delta"]
PROMPT = [3, 4, 5, 6, 7, 8]


@pytest.fixture(params=TRANSPORTS)
def sync(request: pytest.FixtureRequest, policies: Policies) -> Iterator[WeightSync]:
    config = SyncConfig(transport=request.param, bucket_bytes=300_000)
    found = WeightSync(config, engine_dtype=torch.float32, model_dir=policies.dirs["old"])
    yield found
    found.close()


async def push(sync: WeightSync, engine: EngineClient, weights: dict[str, torch.Tensor], version: int) -> PushReport:
    return await asyncio.to_thread(sync.push, [str(engine.http.base_url)], weights.items(), version=version)


async def flush_and_continue(engine: EngineClient) -> None:
    await engine.post("/flush_cache?timeout=30")
    await engine.post("/continue_generation")


def logprobs(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


async def checksums(engine: EngineClient) -> Any:
    answer = (await engine.post("/weights_checker", action="checksum")).json()
    return answer.get("checksums") or [rank["checksums"] for rank in answer["ranks"]]


async def greedy(engine: EngineClient) -> tuple[list[int], list[float]]:
    answer = await engine.generate(PROMPT, max_new_tokens=16, temperature=0)
    return answer["output_ids"], logprobs(answer).tolist()


async def test_a_push_equals_a_fresh_load_from_disk(sync: WeightSync, engine: EngineClient, policies: Policies) -> None:
    old = await checksums(engine)
    await engine.post("/pause_generation", mode="abort")
    await engine.post("/update_weights_from_disk", model_path=str(policies.dirs["new"]), flush_cache=False)
    await flush_and_continue(engine)
    loaded, said = await checksums(engine), await greedy(engine)
    digests = []
    for version, name in ((1, "old"), (2, "new"), (3, "old"), (4, "new")):
        await engine.post("/pause_generation", mode="abort")
        report = await push(sync, engine, policies.weights(name), version)
        assert report.verified == "yes"
        await flush_and_continue(engine)
        assert await engine.version() == str(version)
        assert await checksums(engine) == (old if name == "old" else loaded) != (loaded if name == "old" else old)
        digests.append(report.checksum)
    assert await greedy(engine) == said
    assert digests[0] == digests[2] != digests[1] == digests[3]


async def test_what_an_engine_holds_is_found_out(engine: EngineClient, policies: Policies) -> None:
    """One changed element of any tensor, fused ones too, is another checksum."""
    weights = policies.weights("old")
    api = EngineApi(str(engine.http.base_url))
    for name in (
        "model.layers.0.self_attn.k_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.1.mlp.up_proj.weight",
    ):
        expected = Expected([api.facts])
        for each, tensor in weights.items():
            changed = tensor.clone()
            if each == name:
                changed.view(-1)[7] += 1e-6
            expected.add(each, changed)
        with pytest.raises(WeightSyncError, match="does not hold what was sent: 1 of"):
            await asyncio.to_thread(expected.compare, api)
    api.close()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_every_token_is_of_the_version_it_says(engine: EngineClient, policies: Policies, mode: str) -> None:
    sync = WeightSync(SyncConfig(transport="tensor"), engine_dtype=torch.float32)
    async with engine.stream(PROMPT, sampling_params={"max_new_tokens": 400, "ignore_eos": True}) as chunks:
        await anext(chunks)
        await engine.post("/pause_generation", mode=mode)
        await push(sync, engine, policies.weights("new"), 1)
        if mode == "retract":  # the prompt was cached, and would be shared
            await engine.post("/flush_cache")
        await engine.post("/continue_generation")
        answer = [chunk async for chunk in chunks][-1]
    sync.close()
    spans = [(span["version"], span["start"], span["end"]) for span in answer["meta_info"]["weight_versions"]]
    middle = spans[0][2]
    assert spans == [("0", 0, middle), ("1", middle, 400)]
    ids = PROMPT + answer["output_ids"]
    given = logprobs(answer)
    old, new = policies.models["old"], policies.models["new"]
    start, turn = len(PROMPT) - 1, len(PROMPT) - 1 + middle
    by_old = continued(old, old, ids, start)[start:]
    # retract computes all keys and values again. in_place keeps those of everything before the last old token.
    by_both = continued(old, new, ids, len(PROMPT) + middle - 1) if mode == "in_place" else continued(new, new, ids, 1)
    assert (given[:middle] - by_old[:middle]).abs().max() < 1e-4
    assert (given[middle:] - by_both[turn:]).abs().max() < 1e-4
    assert (given[middle:] - by_old[middle:]).abs().max() > 1e-2


async def test_an_abort_ends_with_the_old_policy_and_what_follows_is_the_new_ones(
    engine: EngineClient, policies: Policies
) -> None:
    sync = WeightSync(SyncConfig(transport="tensor"), engine_dtype=torch.float32)
    async with engine.stream(PROMPT) as chunks:
        await anext(chunks)
        await engine.post("/pause_generation", mode="abort")
        cut = [chunk async for chunk in chunks][-1]
    await push(sync, engine, policies.weights("new"), 1)
    sync.close()
    await flush_and_continue(engine)
    old, new = policies.models["old"], policies.models["new"]
    ids = PROMPT + cut["output_ids"]
    assert [span["version"] for span in cut["meta_info"]["weight_versions"]] == ["0"]
    assert (logprobs(cut) - continued(old, old, ids, 1)[len(PROMPT) - 1 :]).abs().max() < 1e-4
    rest = await engine.generate(ids, max_new_tokens=30)  # as the router asks for the rest
    assert rest["meta_info"]["cached_tokens"] == 0
    assert rest["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 30}]
    expected = continued(new, new, ids + rest["output_ids"], 1)[len(ids) - 1 :]
    assert (logprobs(rest) - expected).abs().max() < 1e-4


async def test_prefixes_of_different_versions_are_kept_apart_by_their_key(engine: EngineClient) -> None:
    """As the router asks: after an update in place nothing can be flushed, and no new call shares a mixed prefix."""
    params = {"max_new_tokens": 1, "ignore_eos": True}
    await engine.post("/flush_cache?timeout=30")
    cached = []
    for key in ("0", "0", "1", "1"):
        body = {"input_ids": PROMPT * 20, "extra_key": key, "sampling_params": params}
        cached.append((await engine.post("/generate", **body)).json()["meta_info"]["cached_tokens"])
    assert cached[1] == cached[3] == 119
    assert cached[0] == 0


async def test_another_push_mends_one_that_failed(sync: WeightSync, engine: EngineClient, policies: Policies) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(policies.weights("new").items()):
            if index == 9:
                raise RuntimeError("the learner failed in the gather")
            yield name, tensor + 1

    await engine.post("/pause_generation", mode="abort")
    url = str(engine.http.base_url)
    with pytest.raises(RuntimeError, match="in the gather"):
        await asyncio.to_thread(sync.push, [url], broken(), version=1)
    assert await engine.version() == "0"  # half of it may be in: whoever paused the engine must not continue it
    report = await push(sync, engine, policies.weights("new"), 2)
    assert report.verified == "yes"
    await flush_and_continue(engine)
    assert await engine.version() == "2"


async def test_a_directory_without_weights_is_refused(engine: EngineClient, tmp_path: Path, policies: Policies) -> None:
    before, _ = await greedy(engine)
    (tmp_path / "config.json").write_bytes((policies.dirs["old"] / "config.json").read_bytes())
    await engine.refused("/update_weights_from_disk", model_path=str(tmp_path), weight_version="9", flush_cache=False)
    assert (await engine.version(), (await greedy(engine))[0]) == ("0", before)
