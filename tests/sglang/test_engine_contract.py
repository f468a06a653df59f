"""What the router and the weight sync take for granted of an engine, asked of the embedded engine and of real SGLang alike."""

import asyncio
from typing import Any

import httpx
import pytest
import torch
from engine_process import EngineClient
from policies import CONTEXT, Policies, continued

pytestmark = pytest.mark.slow
PROMPT = [3, 4, 5, 6, 7, 8]


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


# Generation


async def test_the_fields_of_an_answer(engine: EngineClient) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=7)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 7
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (6, 7)
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 7}]
    assert isinstance(meta["cached_tokens"], int)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_tempered_distribution(
    engine: EngineClient, policies: Policies, temperature: float
) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=40, temperature=temperature)
    old = policies.models["old"]
    expected = continued(old, old, PROMPT + answer["output_ids"], 1, temperature=temperature)[len(PROMPT) - 1 :]
    assert (expected - torch.tensor(logprobs(answer))).abs().max() < 1e-4


async def test_the_stop_token_is_the_last_id(engine: EngineClient) -> None:
    stop = (await engine.generate(PROMPT, max_new_tokens=1, temperature=0))["output_ids"][0]
    params = {"max_new_tokens": 9, "temperature": 0, "stop_token_ids": [stop]}
    answer = (await engine.post("/generate", input_ids=PROMPT, sampling_params=params)).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["output_ids"] == [stop]
    body = {"input_ids": PROMPT, "sampling_params": {**params, "ignore_eos": True}}  # which holds for any stop token
    answer = (await engine.post("/generate", **body)).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 9}


async def test_a_stop_string_stays_in_the_ids(engine: EngineClient) -> None:
    free = await engine.generate(PROMPT, max_new_tokens=30, temperature=0, no_stop_trim=True)
    stop = free["text"][len(free["text"]) // 2 :][:4]
    params = {"max_new_tokens": 30, "temperature": 0, "no_stop_trim": True, "skip_special_tokens": False}
    answer = await engine.generate(PROMPT, **params, stop=[stop])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["output_ids"] == free["output_ids"][: len(answer["output_ids"])]
    assert len(logprobs(answer)) == len(answer["output_ids"]) < 30


async def test_a_stream_grows_to_the_answer(engine: EngineClient) -> None:
    params = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0}
    async with engine.stream(PROMPT, sampling_params=params) as chunks:
        seen = [chunk async for chunk in chunks]
    whole = await engine.generate(PROMPT, max_new_tokens=60, temperature=0)
    for chunk in seen[:-1]:
        meta = chunk["meta_info"]
        assert chunk["output_ids"] == whole["output_ids"][: meta["completion_tokens"]]
        assert len(logprobs(chunk)) == meta["completion_tokens"]
        assert meta["finish_reason"] is None
        assert meta["weight_version"] == "0"
    assert seen[-1]["output_ids"] == whole["output_ids"]
    assert seen[-1]["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 60}]


async def test_a_stream_tells_of_every_so_many_tokens(engine: EngineClient) -> None:
    params = {"max_new_tokens": 70, "ignore_eos": True, "stream_interval": 32}
    async with engine.stream(PROMPT, sampling_params=params) as chunks:
        seen = [chunk["meta_info"]["completion_tokens"] async for chunk in chunks]
    assert seen[-1] == 70
    assert set(seen[:-1]) <= {1, 33, 65}  # the newest of several that wait is sent alone
    assert 33 in seen


async def test_several_prompts_and_n_answer_a_list(engine: EngineClient) -> None:
    body = {"input_ids": [[1, 2], [3, 4, 5]], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    answers = (await engine.post("/generate", **body)).json()
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 3]
    assert len(await engine.generate(PROMPT, max_new_tokens=2, n=3)) == 3


async def test_prompt_logprobs(engine: EngineClient, policies: Policies) -> None:
    body = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 1},
    }
    entries = (await engine.post("/generate", **body)).json()["meta_info"]["input_token_logprobs"]
    old = policies.models["old"]
    assert [entry[1] for entry in entries] == PROMPT
    assert entries[0][0] is None
    assert [entry[0] for entry in entries[1:]] == pytest.approx(continued(old, old, PROMPT, 1).tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("ids", "params", "words"),
    [
        ([], {}, "empty"),
        ([5] * CONTEXT, {}, "longer than"),
        ([5] * 4000, {"max_new_tokens": 200}, "context length"),
        ([5], {"temperature": -1}, "temperature"),
    ],
)
async def test_what_is_refused(engine: EngineClient, ids: list[int], params: dict[str, Any], words: str) -> None:
    assert words in await engine.refused("/generate", input_ids=ids, sampling_params=params)


async def test_an_unknown_sampling_parameter_is_refused_and_an_unknown_field_is_not(server: Any) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
        wrong = {"input_ids": [5], "sampling_params": {"temprature": 1}}
        assert (await http.post("/generate", json=wrong)).status_code in (400, 500)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
        body = {"input_ids": [5], "nonsense": 1, "sampling_params": {"max_new_tokens": 1}}
        assert (await http.post("/generate", json=body)).status_code == 200


# Prefix cache


async def test_prefixes_are_shared_until_they_are_flushed(engine: EngineClient) -> None:
    await engine.post("/flush_cache?timeout=30")
    first = await engine.generate(PROMPT * 20, max_new_tokens=1)
    again = await engine.generate(PROMPT * 20, max_new_tokens=1)
    await engine.post("/flush_cache?timeout=30")
    cold = await engine.generate(PROMPT * 20, max_new_tokens=1)
    assert [a["meta_info"]["cached_tokens"] for a in (first, again, cold)] == [0, 119, 0]


async def test_a_cache_in_use_is_not_flushed(engine: EngineClient) -> None:
    async with engine.stream(PROMPT) as chunks:
        await anext(chunks)
        assert (await engine.http.post("/flush_cache")).status_code == 400


# Aborts and pauses


async def test_an_abort_answers_with_what_there_is(engine: EngineClient) -> None:
    await engine.post("/abort_request", rid="nobody")
    async with engine.stream(PROMPT, rid="mine-1") as chunks:
        await anext(chunks)
        await engine.post("/abort_request", rid="mine-1")
        last = [chunk async for chunk in chunks][-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) == len(logprobs(last)) < 3000


async def test_pause_abort_ends_what_runs_and_holds_what_comes(engine: EngineClient) -> None:
    async with engine.stream(PROMPT) as chunks:
        await anext(chunks)
        await engine.post("/pause_generation", mode="abort")
        last = [chunk async for chunk in chunks][-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) == len(logprobs(last))
    assert last["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": len(last["output_ids"])}]
    held = asyncio.create_task(engine.generate(PROMPT, max_new_tokens=5))
    assert (await engine.http.get("/health_generate")).status_code == 503  # it cannot generate, and still it answers
    assert await engine.version() == "0"
    assert not held.done()
    await engine.post("/flush_cache?timeout=30")
    await engine.post("/continue_generation")
    assert len((await held)["output_ids"]) == 5
    assert (await engine.http.get("/health_generate")).status_code == 200


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_answer_goes_on_to_its_end(engine: EngineClient, mode: str) -> None:
    async with engine.stream(PROMPT, sampling_params={"max_new_tokens": 300, "ignore_eos": True}) as chunks:
        await anext(chunks)
        await engine.post("/pause_generation", mode=mode)
        # What was retracted has no keys and values left; in place they are kept, and cannot be flushed.
        flushed = (await engine.http.post("/flush_cache")).status_code
        assert flushed == (200 if mode == "retract" else 400)
        await engine.post("/continue_generation")
        last = [chunk async for chunk in chunks][-1]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
    assert last["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 300}]


# Weights


async def test_updates_are_refused_outside_of_a_session(engine: EngineClient) -> None:
    await engine.post("/pause_generation", mode="abort")
    assert "begin_weight_update" in await engine.refused("/end_weight_update")
    body: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "group_name": "x"}
    await engine.refused("/update_weights_from_distributed", **body)
    await engine.post("/begin_weight_update", selector="all")
    await engine.post("/end_weight_update")


async def test_a_directory_that_is_not_there_leaves_the_old_weights(engine: EngineClient) -> None:
    before = await engine.generate(PROMPT, max_new_tokens=5, temperature=0)
    await engine.refused("/update_weights_from_disk", model_path="/nowhere", weight_version="7", flush_cache=False)
    assert await engine.version() == "0"
    assert (await engine.generate(PROMPT, max_new_tokens=5, temperature=0))["output_ids"] == before["output_ids"]


async def test_a_version_is_renamed_without_an_abort(engine: EngineClient) -> None:
    async with engine.stream(PROMPT, sampling_params={"max_new_tokens": 300, "ignore_eos": True}) as chunks:
        await anext(chunks)
        await engine.post("/pause_generation", mode="in_place")
        await engine.post("/update_weight_version", new_version="5", abort_all_requests=False)
        assert await engine.version() == "5"
        await engine.post("/continue_generation")
        last = [chunk async for chunk in chunks][-1]
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert [span["version"] for span in last["meta_info"]["weight_versions"]] == ["0", "5"]
