"""The `openai` SDK, unchanged, against the router: typed objects parse, errors are its own, retries are its own."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from fake_engine import Reply
from router_harness import EOS, MODEL, TOKENIZER, TOOLS, USER, Harness, always, in_turn, router, said

from rlagent.buffer.config import BufferConfig
from rlagent.engine.config import EngineConfig
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving

CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'


def client_of(r: Harness, **options: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="agent", **options)  # type: ignore[arg-type]


async def test_a_tool_loop_with_the_async_client(tmp_path: Path) -> None:
    async with router(tmp_path, in_turn(said(CALL), said("The code is 7."))) as r, client_of(r) as client:
        first = await client.chat.completions.create(model="gpt-x", messages=USER, tools=TOOLS)
        message = first.choices[0].message
        assert (first.model, first.choices[0].finish_reason, message.content) == ("gpt-x", "tool_calls", None)
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("look", '{"key": "a"}')
        history = [*USER, message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        second = await client.chat.completions.create(model="gpt-x", messages=history, tools=TOOLS)  # type: ignore[arg-type]
        assert second.choices[0].message.content == "The code is 7."
        assert second.usage is not None
        assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
        (session,) = await r.admin.sessions()
        assert [c["origin"] for c in await r.admin.calls(session["session_id"])] == ["fresh", "extended"]


async def test_streaming_accumulates_to_the_same_message(tmp_path: Path) -> None:
    async with router(tmp_path, always(said(f"Let me look.\n{CALL}"))) as r, client_of(r) as client:
        async with client.chat.completions.stream(model="m", messages=USER, tools=TOOLS) as stream:  # type: ignore[arg-type]
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.content == "Let me look."
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.arguments == '{"key": "a"}'
        assert final.choices[0].finish_reason == "tool_calls"


async def test_n_logprobs_and_raw_response(tmp_path: Path) -> None:
    async with router(tmp_path, in_turn(said("one"), said("two"))) as r, client_of(r) as client:
        raw = await client.chat.completions.with_raw_response.create(model="m", messages=USER, n=2, logprobs=True)  # type: ignore[arg-type]
        assert raw.headers["x-rlagent-session"].startswith("s-")
        found = raw.parse()
        assert found._request_id == found.id
        assert {choice.message.content for choice in found.choices} == {"one", "two"}
        for choice in found.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
            assert {token.logprob for token in choice.logprobs.content} == {-0.5}


class Look(pydantic.BaseModel):
    """Look up."""

    key: str


class Code(pydantic.BaseModel):
    code: int


async def test_parsed_tool_calls_and_a_parsed_answer(tmp_path: Path) -> None:
    tools = [openai.pydantic_function_tool(Look)]
    called = '<tool_call>\n{"name": "Look", "arguments": {"key": "a"}}\n</tool_call>'
    forced = '{"name": "Look", "arguments": {"key": "b"}}'
    async with router(tmp_path, in_turn(said(called), said(forced), said('{"code": 7}'))) as r, client_of(r) as client:
        r.engine.grammar_backend = "xgrammar"
        found = await client.chat.completions.parse(model="m", messages=USER, tools=tools)  # type: ignore[arg-type]
        choice: Any = {"type": "function", "function": {"name": "Look"}}
        second = await client.chat.completions.parse(model="m", messages=USER, tools=tools, tool_choice=choice)  # type: ignore[arg-type]
        for answer, key in ((found, "a"), (second, "b")):
            assert answer.choices[0].finish_reason == "tool_calls"
            assert answer.choices[0].message.tool_calls is not None
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.parsed_arguments == Look(key=key)
        third = await client.chat.completions.parse(model="m", messages=USER, response_format=Code)  # type: ignore[arg-type]
        assert third.choices[0].message.parsed == Code(code=7)
        (session,) = await r.admin.sessions()
        calls = await r.admin.calls(session["session_id"])
        assert [call["choices"][0]["trainable"] for call in calls] == [True, False, False]
        rows = await r.admin.trajectories(session["session_id"])
        assert sum(sum(row["loss_mask"]) for row in rows) == len(calls[0]["choices"][0]["output_ids"])


async def test_a_schema_that_the_engine_refuses_in_its_stream_is_a_400(tmp_path: Path) -> None:
    refused = Reply(ids=[0], refusal="Failed to compile json grammar: unsupported type nonsense")
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    async with router(tmp_path, always(refused)) as r, client_of(r) as client:
        r.engine.grammar_backend = "xgrammar"
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="nonsense"):
                await client.chat.completions.create(model="m", messages=USER, response_format=form, stream=stream)  # type: ignore[arg-type]
        assert len(r.engine.requests) == 2


async def test_a_forced_call_that_is_cut_is_served_as_text_and_flagged(tmp_path: Path) -> None:
    cut = Reply(ids=TOKENIZER.encode('{"name": "lo'), finish={"type": "length", "length": 5})
    async with router(tmp_path, always(cut)) as r, client_of(r) as client:
        r.engine.grammar_backend = "xgrammar"
        found = await client.chat.completions.create(
            model="m", messages=USER, tools=TOOLS, tool_choice="required"  # type: ignore[arg-type]
        )  # fmt: skip
        assert (found.choices[0].message.content, found.choices[0].finish_reason) == ('{"name": "lo', "length")
        (session,) = await r.admin.sessions()
        (call,) = await r.admin.calls(session["session_id"])
        assert call["choices"][0]["parse_status"] == "malformed"


async def test_a_call_under_a_grammar_that_is_aborted_starts_again(tmp_path: Path) -> None:
    aborted = Reply(ids=TOKENIZER.encode('{"co'), finish={"type": "abort", "message": "update"})
    async with router(tmp_path, in_turn(aborted, said('{"code": 7}'))) as r, client_of(r) as client:
        r.engine.grammar_backend = "xgrammar"
        stream = await client.chat.completions.create(
            model="m", messages=USER, stream=True, response_format={"type": "json_object"}  # type: ignore[arg-type]
        )  # fmt: skip
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == '{"code": 7}'
        first, second = r.engine.requests
        assert first["input_ids"] == second["input_ids"]


async def test_the_sync_client_and_models(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:

        def agent() -> tuple[str | None, list[str]]:
            with openai.OpenAI(base_url=f"{r.url}/v1", api_key="agent") as client:
                found = client.chat.completions.create(model="m", messages=USER, stop=["x"], max_tokens=9)  # type: ignore[call-overload]
                return found.choices[0].message.content, [model.id for model in client.models.list()]

        assert await asyncio.to_thread(agent) == ("ok", ["policy"])


async def test_its_errors_are_the_sdks(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r, client_of(r) as client:
        with pytest.raises(openai.BadRequestError) as overflow:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "7 " * 1100}])
        assert overflow.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="response_format") as grammar:
            await client.chat.completions.create(
                model="m", messages=USER, response_format={"type": "json_object"}  # type: ignore[call-overload]
            )  # fmt: skip
        assert grammar.value.param == "response_format"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="x")
        (session,) = await r.admin.sessions()
        await r.admin.finish(session["session_id"])
        with pytest.raises(openai.ConflictError, match="new key"):
            await client.chat.completions.create(model="m", messages=USER)  # type: ignore[arg-type]


async def test_its_own_retry_reaches_an_engine_that_recovers(tmp_path: Path) -> None:
    broken = Reply(ids=[], status=500)
    script = in_turn(broken, broken, broken, broken, said("at last"))
    async with router(tmp_path, script) as r, client_of(r, max_retries=2) as client:
        found = await client.chat.completions.create(model="m", messages=USER)  # type: ignore[arg-type]
        assert found.choices[0].message.content == "at last"


async def test_a_failure_in_mid_stream_is_raised(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("The code is 7")
    bad = Reply(ids=[*ids, EOS], logprobs=[-1.0] * len(ids) + [float("nan")], finish={"type": "stop", "matched": EOS})
    async with router(tmp_path, always(bad)) as r, client_of(r, max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="not recorded"):
            async for _ in stream:
                pass


async def test_an_agent_on_the_embedded_engine_is_recorded_exactly(tmp_path: Path) -> None:
    async with serving(
        model_dir=MODEL, router=RouterConfig(), sampling=SamplingConfig(max_tokens=200),
        engine=EngineConfig(max_total_tokens=8192), buffer=BufferConfig(), buffer_path=tmp_path / "buffer.db",
    ) as url:  # fmt: skip
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client:
            history: list[object] = [{"role": "user", "content": "Parcel 12: what is the pickup code?"}]
            for _ in range(3):
                found = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)  # type: ignore[arg-type]
                history += [found.choices[0].message.to_dict(), {"role": "user", "content": "Go on."}]
            async with client.chat.completions.stream(model="m", messages=history, tools=TOOLS) as stream:  # type: ignore[arg-type]
                await stream.get_final_completion()
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            (session,) = (await http.get("/sessions")).json()["sessions"]
            calls = (await http.get(f"/sessions/{session['session_id']}/calls")).json()["calls"]
    assert [call["origin"] for call in calls] == ["fresh", *["extended"] * 3]
    for parent, child in itertools.pairwise(calls):
        known = parent["prompt_ids"] + parent["choices"][0]["output_ids"]
        assert child["prompt_ids"][: len(known)] == known


def test_serve_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, rlagent.serve, rlagent.launch.serve_child; "
        "print([name for name in ('torch', 'transformers', 'numba', 'pandas') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "[]"
