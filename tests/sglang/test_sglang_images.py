"""Images through the router to a real SGLang server with a tiny Qwen2.5-VL: what is recorded is what the model saw and sampled."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from sglang_process import running_sglang
from vision_model import png, uri, vision_model

from rlagent.buffer.config import BufferConfig
from rlagent.client import RouterClient
from rlagent.engine.config import EngineConfig
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving

pytestmark = [pytest.mark.slow, pytest.mark.sglang]
RED, BLUE = png(255), png(0, 0, 255)
LARGE = png(9, 99, 199, width=1008, height=1008)
NUM_LARGE = (1008 // 28) ** 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[str]:
    with running_sglang(model) as url:
        yield url


@pytest.fixture
async def url(engine: str, model: Path, tmp_path: Path) -> AsyncIterator[str]:
    async with served(engine, model, tmp_path, SamplingConfig(max_tokens=6)) as base:
        yield base


@asynccontextmanager
async def served(engine: str, model: Path, directory: Path, sampling: SamplingConfig) -> AsyncIterator[str]:
    async with serving(
        model_dir=model, router=RouterConfig(), sampling=sampling, engine=EngineConfig(kind="attach", urls=(engine,)),
        buffer=BufferConfig(), buffer_path=directory / "buffer.db",
    ) as base:  # fmt: skip
        yield base


def shown(*parts: str | bytes) -> Any:
    """A user's message in chat's form."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": uri(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


async def calls_of(url: str, session: str | None = None) -> list[dict[str, Any]]:
    async with RouterClient(url) as admin:
        found = session or (await admin.sessions())[0]["session_id"]
        return [dict(call) for call in await admin.calls(found)]


async def seen_logprobs(engine: str, ids: Sequence[int], images: Sequence[bytes]) -> list[float]:
    """The engine's own logprobs of a whole row, each image expanded, without its first token."""
    body = {
        "input_ids": list(ids),
        "image_data": [uri(image) for image in images],
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        await http.post(f"{engine}/flush_cache")
        answer = (await http.post(f"{engine}/generate", json=body)).raise_for_status().json()
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


async def test_what_is_recorded_is_what_the_model_saw_and_sampled_over_two_turns(url: str, engine: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client:
        history = [shown("What is ", RED, "?")]
        first = await client.chat.completions.create(model="m", messages=history)
        history += [first.choices[0].message.to_dict(), shown(BLUE, " and ", png(1, 2, 3, width=112, height=84))]
        second = await client.chat.completions.create(model="m", messages=history)
    one, two = await calls_of(url)
    assert [image["num_tokens"] for image in one["images"] + two["images"]] == [4, 4, 12]
    assert (two["origin"], two["prompt_ids"][: len(one["prompt_ids"])]) == ("extended", one["prompt_ids"])
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens == len(one["prompt_ids"]) + 3
    assert second.usage.prompt_tokens == len(two["prompt_ids"]) + 3 + 3 + 11
    images = [RED, BLUE, png(1, 2, 3, width=112, height=84)]
    for call, number in ((one, 1), (two, 3)):
        (choice,) = call["choices"]
        told = await seen_logprobs(engine, call["prompt_ids"] + choice["output_ids"], images[:number])
        np.testing.assert_allclose(told[-len(choice["logprobs"]) :], choice["logprobs"], atol=1e-3)
        other = await seen_logprobs(
            engine, call["prompt_ids"] + choice["output_ids"], [png(9, 200, 9), *images[1:number]]
        )
        assert not np.allclose(other[-len(choice["logprobs"]) :], choice["logprobs"], atol=1e-2)


async def test_two_images_give_two_answers_and_one_image_one(url: str) -> None:
    greedy: dict[str, Any] = {"train": False, "sampling": {"temperature": 0.0}}
    answers: list[tuple[list[int], list[float]]] = []
    async with RouterClient(url) as admin:
        for image in (RED, RED, BLUE):
            opened = await admin.new_session(**greedy)
            async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key) as client:
                await client.chat.completions.create(model="m", messages=[shown(image, "?")])
            (call,) = await calls_of(url, opened.session_id)
            answers.append((call["choices"][0]["output_ids"], call["choices"][0]["logprobs"]))
    (red, first), (again, second), (blue, third) = answers
    assert red == again
    np.testing.assert_allclose(first, second, atol=1e-4)
    assert (red, first[0]) != (blue, third[0])
    assert abs(first[0] - third[0]) > 1e-2


async def test_all_dialects_show_the_model_the_same(url: str) -> None:
    data = base64.b64encode(RED).decode()
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="agent") as claude,
    ):
        async with client.chat.completions.stream(model="m", messages=[shown("See ", RED)]) as stream:
            await stream.until_done()
        parts: Any = [
            {"type": "input_text", "text": "See "},
            {"type": "input_image", "image_url": uri(RED), "detail": "auto"},
        ]
        response = await client.responses.create(model="m", input=[{"role": "user", "content": parts}])
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "See "}, block]}]
        message = await claude.messages.create(model="m", max_tokens=6, messages=messages)
        counted = await claude.messages.count_tokens(model="m", messages=messages)
        await client.responses.create(model="m", input="Sure?", previous_response_id=response.id)
    chat, *others, last = await calls_of(url)
    assert len(others) == 2
    assert all((call["prompt_ids"], call["images"]) == (chat["prompt_ids"], chat["images"]) for call in others)
    assert response.usage is not None
    assert (
        response.usage.input_tokens == message.usage.input_tokens == counted.input_tokens == chat["num_prompt_tokens"]
    )
    assert (last["origin"], last["images"]) == ("extended", [])
    assert last["num_prompt_tokens"] == len(last["prompt_ids"]) + 3


async def test_what_does_not_fit_is_cut_or_refused(engine: str, model: Path, tmp_path: Path) -> None:
    async with (
        served(engine, model, tmp_path, SamplingConfig(max_tokens=4000)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client,
    ):
        fits = await client.chat.completions.create(model="m", messages=[shown(LARGE, RED, LARGE, BLUE, LARGE)])
        (call,) = await calls_of(url)
        assert [image["num_tokens"] for image in call["images"]] == [NUM_LARGE, 4, NUM_LARGE, 4, NUM_LARGE]
        assert fits.usage is not None
        assert fits.usage.total_tokens <= 4096
        assert call["sampling"]["max_tokens"] == 4096 - call["num_prompt_tokens"]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[shown(*[LARGE] * 4)])
        assert refused.value.code == "context_length_exceeded"


async def test_a_broken_image_is_the_clients_fault(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=[shown(RED[:40])], stream=stream)
            assert refused.value.code == "invalid_image"
        await client.chat.completions.create(model="m", messages=[shown(RED)])
