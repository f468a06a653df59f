"""The embedded engine's HTTP surface, asked of a real child process: generation, its end, pauses, memory, refusals."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_process import LONG, EngineClient, running_engine, widen_context
from tiny_models import VOCAB, make_model

pytestmark = pytest.mark.slow
PROMPT = [5, 6, 7, 8, 9]
PARCELS = Path(__file__).parents[2] / "examples" / "parcels" / "model"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3", found)
    widen_context(found, 4096)
    return found


@pytest.fixture(scope="module")
def url(model_dir: Path) -> Iterator[str]:
    with running_engine(model_dir, "--max-running", "4", "--max-total-tokens", "20000") as found:
        yield found


@pytest.fixture
async def engine(url: str) -> AsyncIterator[EngineClient]:
    found = EngineClient(url)
    yield found
    await found.post("/resume_memory_occupation")
    await found.post("/abort_request", abort_all=True)
    await found.post("/continue_generation")
    await found.post("/flush_cache")
    await found.http.aclose()


def output_logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


# Generation


async def test_an_answer_has_the_fields_of_sglang(engine: EngineClient) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=7, temperature=0.8)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 7
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 7, 0)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 7}]
    assert meta["id"]


async def test_the_logprobs_are_those_of_the_checkpoint(engine: EngineClient, tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path).eval()
    answer = await engine.generate(PROMPT, max_new_tokens=30, temperature=0.7)
    output = answer["output_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits / 0.7, -1).gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (expected - torch.tensor(output_logprobs(answer))).abs().max() < 1e-5


async def test_a_stream_grows_to_the_answer(engine: EngineClient) -> None:
    params = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 3}
    async with engine.stream(PROMPT, sampling_params=params) as chunks:
        seen = [chunk async for chunk in chunks]
    whole = await engine.generate(PROMPT, max_new_tokens=40, sampling_seed=3)
    for chunk in seen:
        count = chunk["meta_info"]["completion_tokens"]
        assert chunk["output_ids"] == whole["output_ids"][: len(chunk["output_ids"])]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == len(chunk["output_ids"]) == count
    assert [chunk["meta_info"]["finish_reason"] for chunk in seen[:-1]] == [None] * (len(seen) - 1)
    assert seen[-1]["output_ids"] == whole["output_ids"]
    assert output_logprobs(seen[-1]) == pytest.approx(output_logprobs(whole), abs=1e-5)
    assert seen[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}


async def test_n_and_several_prompts_answer_in_order(engine: EngineClient) -> None:
    several = await engine.generate(PROMPT, max_new_tokens=5, n=3)
    assert len({tuple(answer["output_ids"]) for answer in several}) == 3
    body = {"input_ids": [[1, 2], [3, 4, 5], [6]], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    answers = (await engine.post("/generate", **body)).json()
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 3, 1]


async def test_a_stream_of_several_tells_them_apart(engine: EngineClient) -> None:
    params = {"max_new_tokens": 9, "ignore_eos": True, "n": 3, "sampling_seed": 1}
    last = {}
    async with engine.stream(PROMPT, sampling_params=params) as chunks:
        async for chunk in chunks:
            last[chunk["index"]] = chunk
    whole = await engine.generate(PROMPT, max_new_tokens=9, n=3, sampling_seed=1)
    assert [last[i]["output_ids"] for i in range(3)] == [answer["output_ids"] for answer in whole]


async def test_prompt_logprobs(engine: EngineClient, tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path).eval()
    await engine.generate(PROMPT, max_new_tokens=1)  # a cached prefix must not take its place
    body = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "logprob_start_len": 2,
        "sampling_params": {"max_new_tokens": 0},
    }
    answer = (await engine.post("/generate", **body)).json()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], -1)
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT[2:]
    assert [entry[0] for entry in entries] == pytest.approx(
        [logprobs[i - 1, PROMPT[i]].item() for i in range(2, 5)], abs=1e-5
    )
    assert answer["output_ids"] == []


async def test_text_and_stop_strings() -> None:
    """With the demo's tokenizer: a stop string is cut from the text, and its tokens stay in the ids."""
    with running_engine(PARCELS) as address:
        engine = EngineClient(address)
        body = {
            "text": "Hello there",
            "sampling_params": {"max_new_tokens": 40, "sampling_seed": 5, "ignore_eos": True},
        }
        free = (await engine.post("/generate", **body)).json()
        stop = free["text"][len(free["text"]) // 2 :][:3]
        body["sampling_params"] |= {"stop": ["\x00never", stop]}  # type: ignore[operator]
        cut = (await engine.post("/generate", **body)).json()
        await engine.http.aclose()
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert cut["output_ids"] == free["output_ids"][: len(cut["output_ids"])]


# The end of a request


@pytest.mark.parametrize("chosen", [{"rid": "mine"}, {"abort_all": True}])
async def test_an_abort_answers_with_what_there_is(engine: EngineClient, chosen: dict[str, Any]) -> None:
    async with engine.stream(PROMPT, rid="mine-1") as chunks:
        await anext(chunks)
        await engine.post("/abort_request", **chosen)
        last = [chunk async for chunk in chunks][-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) < LONG["max_new_tokens"]
    assert len(output_logprobs(last)) == len(last["output_ids"])


async def test_an_abort_leaves_the_others(engine: EngineClient) -> None:
    async with engine.stream(PROMPT, rid="a") as chunks:
        await anext(chunks)
        other = asyncio.create_task(engine.generate(PROMPT, max_new_tokens=60))
        await engine.post("/abort_request", rid="a")
        assert (await other)["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_disconnect_frees_the_rows(engine: EngineClient) -> None:
    async with engine.stream(PROMPT) as chunks:
        await anext(chunks)
        assert (await engine.info())["num_running"] == 1
    gone = asyncio.create_task(engine.generate(PROMPT, **{**LONG, "n": 6}))  # 4 run, 2 wait
    while (await engine.info())["num_waiting"] != 2:
        pass
    gone.cancel()
    while (await engine.info())["num_running"] + (await engine.info())["num_waiting"]:
        pass  # pytest's own time limit would end it; each turn is a request to the engine


async def test_a_disconnect_ends_only_its_own(engine: EngineClient) -> None:
    """Two requests may carry the same rid: the one that stays is not ended with the other."""
    async with engine.stream(PROMPT, rid="twin") as stays:
        await anext(stays)
        async with engine.stream(PROMPT, rid="twin") as leaves:
            await anext(leaves)
        while (await engine.info())["num_running"] == 2:
            pass
        assert (await engine.info())["num_running"] == 1
        assert (await anext(stays))["meta_info"]["finish_reason"] is None


# Cache and memory


async def test_flush_cache_forgets_prefixes_and_waits_for_nobody(engine: EngineClient) -> None:
    first = await engine.generate(PROMPT * 4, max_new_tokens=3)
    again = await engine.generate(PROMPT * 4, max_new_tokens=3)
    await engine.post("/flush_cache")
    cold = await engine.generate(PROMPT * 4, max_new_tokens=3)
    assert [a["meta_info"]["cached_tokens"] for a in (first, again, cold)] == [0, 19, 0]
    async with engine.stream(PROMPT) as chunks:
        await anext(chunks)
        assert "running" in await engine.refused("/flush_cache")


async def test_memory_is_given_back_and_taken_again(engine: EngineClient) -> None:
    before = await engine.generate(PROMPT, max_new_tokens=5, sampling_seed=1)
    async with engine.stream(PROMPT) as chunks:
        await anext(chunks)
        assert "running" in await engine.refused("/release_memory_occupation")
    while (await engine.info())["num_running"]:
        pass
    await engine.post("/release_memory_occupation", tags=["kv_cache"])
    waiting = asyncio.create_task(engine.generate(PROMPT, max_new_tokens=5, sampling_seed=1))
    while not (await engine.info())["num_waiting"]:
        assert not waiting.done()
    await engine.post("/resume_memory_occupation", tags=["kv_cache"])
    assert (await waiting)["output_ids"] == before["output_ids"]
    assert "gpu" in await engine.refused("/release_memory_occupation", tags=["gpu"])


# Pauses


async def test_pause_abort_ends_what_runs_and_holds_what_comes(engine: EngineClient) -> None:
    async with engine.stream(PROMPT) as chunks:
        await anext(chunks)
        await engine.post("/pause_generation", mode="abort")
        assert [chunk async for chunk in chunks][-1]["meta_info"]["finish_reason"]["type"] == "abort"
    held = asyncio.create_task(engine.generate(PROMPT, max_new_tokens=5))
    while not (await engine.info())["num_waiting"]:
        assert not held.done()
    assert (await engine.info())["paused"]
    assert (await engine.http.get("/health")).status_code == 200
    assert (await engine.http.get("/health_generate")).status_code == 503
    await engine.post("/continue_generation")
    assert len((await held)["output_ids"]) == 5
    assert (await engine.http.get("/health_generate")).status_code == 200


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_changes_nothing_of_what_is_drawn(engine: EngineClient, mode: str) -> None:
    params = {"max_new_tokens": 400, "ignore_eos": True, "sampling_seed": 8}
    whole = await engine.generate(PROMPT, **params)
    await engine.post("/flush_cache")
    async with engine.stream(PROMPT, sampling_params=params) as chunks:
        await anext(chunks)
        await engine.post("/pause_generation", mode=mode)
        info = await engine.info()
        assert (info["num_running"], info["num_waiting"]) == ((0, 1) if mode == "retract" else (1, 0))
        await engine.post("/continue_generation")
        last = [chunk async for chunk in chunks][-1]
    assert last["meta_info"]["num_retractions"] == (mode == "retract")
    assert last["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 400}]
    assert last["output_ids"] == whole["output_ids"]
    assert output_logprobs(last) == pytest.approx(output_logprobs(whole), abs=1e-4)


async def test_an_unknown_pause_mode_is_refused(engine: EngineClient) -> None:
    assert "sleep" in await engine.refused("/pause_generation", mode="sleep")


# Refusals


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [[1], []]}, "empty prompt"),
        ({"input_ids": [1, VOCAB]}, f"{VOCAB}, which is no id"),
        ({"input_ids": [-1]}, "-1, which is no id"),
        ({"input_ids": [1.5]}, "1.5, which is no id"),
        ({"input_ids": "12"}, "input_ids must be"),
        ({"input_ids": [1] * 4096}, "longer than the model's context length"),
        ({"input_ids": [1] * 4000, "sampling_params": {"max_new_tokens": 97}}, "maximum context length of 4096"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "unknown sampling_params key 'temprature'"),
        ({"input_ids": [1], "sampling_params": [1]}, "sampling_params"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be at least 0"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": 5}}, "sampling_params"),
        ({"input_ids": [1], "sampling_params": {"stop": [5]}}, "stop must be"),
        ({"input_ids": [1], "sampling_params": {"stop": [""]}}, "stop must be"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": ["5"]}}, "stop_token_ids must be"),
        ({"input_ids": [1], "sampling_params": {"n": 10**6}}, "n must be"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "sampling_params"),
        ({"input_ids": [1], "logprob_start_len": "x"}, "logprob_start_len"),
        ({"text": "hello"}, "no tokenizer.json"),
        ({}, "input_ids"),
    ],
)
async def test_a_bad_request_is_refused_with_the_reason(engine: EngineClient, body: dict[str, Any], words: str) -> None:
    assert words in await engine.refused("/generate", **body)


async def test_a_body_that_is_no_json_object_is_refused(engine: EngineClient) -> None:
    for content in (b"{", b"[1]", b"\xff"):
        for path in ("/generate", "/pause_generation"):
            response = await engine.http.post(path, content=content)
            assert response.status_code == 400
            assert "body" in response.json()["error"]["message"]


async def test_control_routes_say_what_is_missing(engine: EngineClient) -> None:
    assert "rid" in await engine.refused("/abort_request")
    assert "model_path" in await engine.refused("/update_weights_from_disk")
    assert "new_version" in await engine.refused("/update_weight_version")
    assert (await engine.http.post("/nowhere")).status_code == 404


def test_a_directory_without_a_model_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="status 1"), running_engine(tmp_path):
        pass


def test_a_port_that_is_taken_ends_the_process_with_a_reason(url: str, model_dir: Path) -> None:
    port = str(httpx.URL(url).port)
    with pytest.raises(AssertionError, match="status 1"), running_engine(model_dir, "--port", port):
        pass
