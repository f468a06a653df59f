"""Grammars of a real SGLang server behind the router: forms and forced calls hold, also where the policy knows no JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from router_harness import MODEL, TOOLS, USER
from sglang_process import running_sglang

from rlagent.buffer.config import BufferConfig
from rlagent.engine.config import EngineConfig
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


class Code(pydantic.BaseModel):
    code: Literal["a", "b"]


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    # A small model writes whitespace for ever where JSON allows it.
    with running_sglang(MODEL, "--constrained-json-disable-any-whitespace") as url:
        yield url


@pytest.fixture
async def url(engine: str, tmp_path: Path) -> AsyncIterator[str]:
    async with serving(
        model_dir=MODEL, router=RouterConfig(), sampling=SamplingConfig(max_tokens=200),
        engine=EngineConfig(kind="attach", urls=(engine,)), buffer=BufferConfig(), buffer_path=tmp_path / "buffer.db",
    ) as base:  # fmt: skip
        yield base


async def calls_of(url: str) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        (session,) = (await http.get("/sessions")).json()["sessions"]
        calls: list[dict[str, Any]] = (await http.get(f"/sessions/{session['session_id']}/calls")).json()["calls"]
    return calls


async def test_a_form_holds_and_is_never_trained(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client:
        found = await client.chat.completions.parse(model="m", messages=USER, response_format=Code)  # type: ignore[arg-type]
    assert found.choices[0].message.parsed is not None
    assert found.choices[0].message.parsed.code in ("a", "b")
    (call,) = await calls_of(url)
    assert call["choices"][0]["trainable"] is False


async def test_a_forced_call_is_a_call_of_the_tool(url: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"key": {"enum": ["a", "b"]}},
        "required": ["key"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "parameters": parameters}}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client:
        for stream in (False, True):
            if stream:
                async with client.chat.completions.stream(
                    model="m", messages=USER, tools=tools, tool_choice="required"  # type: ignore[arg-type]
                ) as chunks:  # fmt: skip
                    found: Any = await chunks.get_final_completion()
            else:
                found = await client.chat.completions.create(
                    model="m", messages=USER, tools=tools, tool_choice="required"  # type: ignore[arg-type]
                )  # fmt: skip
            (call,) = found.choices[0].message.tool_calls
            assert call.function.name == "look"
            assert call.function.arguments.replace(" ", "") in ('{"key":"a"}', '{"key":"b"}')


async def test_a_schema_that_the_engine_cannot_take_is_a_400(url: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="nonsense"):
                await client.chat.completions.create(
                    model="m", messages=USER, response_format=form, stream=stream  # type: ignore[arg-type]
                )  # fmt: skip
