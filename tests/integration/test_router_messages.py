"""The `anthropic` SDK, unchanged, against the router: typed objects parse, errors are its own, histories extend."""

from __future__ import annotations

import asyncio
import base64
import itertools
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from fake_engine import Reply
from router_harness import EOS, MODEL, TOKENIZER, Harness, always, in_turn, router, said
from vision_model import png

from rlagent.buffer.config import BufferConfig
from rlagent.engine.config import EngineConfig
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving

CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "name": "look",
        "description": "Look up.",
        "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}},
    }
]
USER: list[Any] = [{"role": "user", "content": "What is the code?"}]
ASKED: Any = {"model": "claude-x", "max_tokens": 32, "messages": USER}


def client_of(r: Harness, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=r.url, api_key="agent", **options)


async def test_a_tool_loop_with_blocks_and_a_result_beside_text(tmp_path: Path) -> None:
    two = f"Let me look.\n{CALL}\n{CALL}"
    async with router(tmp_path, in_turn(said(two), said("The code is 7."))) as r, client_of(r) as client:
        first = await client.messages.create(**ASKED, tools=TOOLS, system=[{"type": "text", "text": "Be brief."}])
        assert (first.stop_reason, first.role, first.model) == ("tool_use", "assistant", "claude-x")
        text, *uses = first.content
        assert text.type == "text"
        assert text.text == "Let me look."
        results: list[Any] = []
        for number, use in enumerate(uses):
            assert use.type == "tool_use"
            assert (use.name, use.input) == ("look", {"key": "a"})
            results.append(
                {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": f"{number}"}]}
            )
        answer: Any = {"role": "assistant", "content": first.content}
        history = [*USER, answer, {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]}]
        second = await client.messages.create(
            model="claude-x", max_tokens=32, messages=history, tools=TOOLS, system="Be brief."
        )
        assert second.stop_reason == "end_turn"
        assert second.content[0].to_dict() == {"type": "text", "text": "The code is 7."}
        calls = await r.only_calls()
        assert [call["origin"] for call in calls] == ["fresh", "extended"]
        assert [message["role"] for message in calls[1]["messages"]] == ["tool", "tool", "user"]
        assert [message.get("tool_call_id") for message in calls[1]["messages"][:2]] == [u.id for u in uses]
        assert second.usage.input_tokens == len(calls[1]["prompt_ids"])
        assert second.usage.output_tokens == len(calls[1]["choices"][0]["output_ids"])


async def test_streamed_events_accumulate_to_the_message_and_thinking_comes_back(tmp_path: Path) -> None:
    thoughtful = f"<think>\nI should look.\n</think>\nLet me look.\n{CALL}"
    async with router(tmp_path, in_turn(said(thoughtful), said("ok"))) as r, client_of(r) as client:
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert [kind for kind, _ in itertools.groupby(kinds) if kind.startswith(("message", "content_block_st"))] == [
            "message_start",
            *["content_block_start", "content_block_stop"] * 3,
            "message_delta",
            "message_stop",
        ]
        thinking, text, use = final.content
        assert thinking.type == "thinking"
        assert (thinking.thinking, bool(thinking.signature)) == ("I should look.", True)
        assert text.type == "text"
        assert text.text == "Let me look."
        assert use.type == "tool_use"
        assert use.input == {"key": "a"}
        assert final.stop_reason == "tool_use"
        (call,) = await r.only_calls()
        assert final.id == call["call_id"]
        assert final.usage.input_tokens == len(call["prompt_ids"])
        assert final.usage.output_tokens == len(call["choices"][0]["output_ids"])
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "7"}
        history: Any = [*USER, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
        await client.messages.create(model="claude-x", max_tokens=9, messages=history, tools=TOOLS)
        assert [call["origin"] for call in await r.only_calls()] == ["fresh", "extended"]


async def test_a_whole_answer_and_a_streamed_one_are_the_same_message(tmp_path: Path) -> None:
    async with router(tmp_path, always(said(f"<think>\nHm.\n</think>\nWell.\n{CALL}"))) as r, client_of(r) as client:
        whole = (await client.messages.create(**ASKED, tools=TOOLS)).to_dict()
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            streamed = (await stream.get_final_message()).to_dict()
        assert streamed.pop("stop_details") is None
        for found in (whole, streamed):
            del found["id"], found["content"][2]["id"]  # type: ignore[index]
        assert whole == streamed


async def test_stop_sequences_and_limits(tmp_path: Path) -> None:
    stopped = Reply(ids=TOKENIZER.encode("The code STOP"), finish={"type": "stop", "matched": "STOP"})
    cut = Reply(ids=TOKENIZER.encode("The code"), finish={"type": "length", "length": 2})
    async with router(tmp_path, in_turn(stopped, cut)) as r, client_of(r) as client:
        first = await client.messages.create(**ASKED, stop_sequences=["STOP"])
        assert (first.stop_reason, first.stop_sequence) == ("stop_sequence", "STOP")
        assert first.content[0].to_dict()["text"] == "The code "
        assert (await client.messages.create(**ASKED)).stop_reason == "max_tokens"
        params = r.engine.requests[0]["sampling_params"]
        assert (params["stop"], params["max_new_tokens"]) == (["STOP"], 32)


async def test_count_tokens_is_the_length_of_the_prompt_and_records_nothing(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r, client_of(r) as client:
        counted = await client.messages.count_tokens(model="claude-x", messages=USER, tools=TOOLS, system="Be brief.")
        assert await r.only_calls() == []
        made = await client.messages.create(**ASKED, tools=TOOLS, system="Be brief.")
        assert counted.input_tokens == made.usage.input_tokens > 0


async def test_the_sync_client_raw_responses_and_a_bearer(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:

        def agent() -> tuple[Any, Any]:
            with anthropic.Anthropic(base_url=r.url, api_key="agent") as client:
                raw = client.messages.with_raw_response.create(**ASKED)
            with anthropic.Anthropic(base_url=r.url, auth_token="agent") as client:
                return raw, client.messages.create(**ASKED)

        raw, by_bearer = await asyncio.to_thread(agent)
        found = raw.parse()
        assert raw.headers["request-id"] == found.id == found._request_id
        assert raw.headers["x-rlagent-session"].startswith("s-")
        assert by_bearer.content[0].text == "ok"
        assert len(await r.only_calls()) == 2  # of one session


async def test_a_session_of_its_own_by_its_path(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        opened = (await r.http.post("/sessions", json={})).json()
        base_url = opened["base_url"].removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=opened["api_key"]) as client:
            assert (await client.messages.count_tokens(model="m", messages=USER)).input_tokens > 0
            assert (await client.messages.create(**ASKED)).content[0].type == "text"
        assert [call["dialect"] for call in await r.admin.calls(opened["session_id"])] == ["messages"]


async def test_its_errors_are_the_sdks(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r, client_of(r, max_retries=0) as client:
        long: Any = [{"role": "user", "content": "7 " * 1100}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as overflow:
            await client.messages.create(model="m", max_tokens=9, messages=long)
        assert overflow.value.request_id
        assert overflow.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        data = base64.b64encode(png(255)).decode()
        image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        with pytest.raises(anthropic.BadRequestError, match="text model"):
            await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [image]}])
        (session,) = await r.admin.sessions()
        await r.admin.finish(session["session_id"])
        with pytest.raises(anthropic.ConflictError, match="new key"):
            await client.messages.create(**ASKED)
    config = RouterConfig(open_sessions_by_key=False)
    async with router(tmp_path / "b", always(said("ok")), config=config) as r, client_of(r) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**ASKED)


async def test_a_failure_in_mid_stream_is_raised(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("The code is 7")
    bad = Reply(ids=[*ids, EOS], logprobs=[-1.0] * len(ids) + [float("nan")], finish={"type": "stop", "matched": EOS})
    async with (
        router(tmp_path, always(bad)) as r,
        client_of(r, max_retries=0) as client,
        client.messages.stream(**ASKED) as stream,
    ):
        with pytest.raises(anthropic.APIError, match="not recorded"):
            await stream.get_final_message()


async def test_a_forced_tool_goes_to_the_engines_grammar_and_is_never_trained(tmp_path: Path) -> None:
    async with (
        router(tmp_path, always(said('{"name": "look", "arguments": {"key": "b"}}'))) as r,
        client_of(r) as client,
    ):
        with pytest.raises(anthropic.BadRequestError, match="no grammars"):
            await client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "any"})
    async with (
        router(tmp_path / "b", always(said('{"name": "look", "arguments": {"key": "b"}}'))) as r,
        client_of(r) as client,
    ):
        r.engine.grammar_backend = "xgrammar"
        found = await client.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "tool", "name": "look"})
        assert found.stop_reason == "tool_use"
        assert found.content[0].to_dict()["input"] == {"key": "b"}
        assert '"look"' in r.engine.requests[0]["sampling_params"]["json_schema"]
        (call,) = await r.only_calls()
        assert call["choices"][0]["trainable"] is False
        (session,) = await r.admin.sessions()
        rows = await r.admin.trajectories(session["session_id"])
        assert sum(sum(row["loss_mask"]) for row in rows) == 0


class Code(pydantic.BaseModel):
    code: int


async def test_a_parsed_answer_and_the_beta_resource(tmp_path: Path) -> None:
    async with router(tmp_path, in_turn(said('{"code": 7}'), said("ok"))) as r, client_of(r) as client:
        r.engine.grammar_backend = "xgrammar"
        found = await client.messages.parse(**ASKED, output_format=Code)
        assert found.parsed_output == Code(code=7)
        assert (await client.beta.messages.create(**ASKED, betas=["x"])).content[0].to_dict()["text"] == "ok"
        assert [call["choices"][0]["trainable"] for call in await r.only_calls()] == [False, True]


@pytest.mark.slow
async def test_an_agent_on_the_embedded_engine_is_recorded_exactly(tmp_path: Path) -> None:
    async with serving(
        model_dir=MODEL, router=RouterConfig(), sampling=SamplingConfig(max_tokens=200),
        engine=EngineConfig(max_total_tokens=8192), buffer=BufferConfig(), buffer_path=tmp_path / "buffer.db",
    ) as url:  # fmt: skip
        async with anthropic.AsyncAnthropic(base_url=url, api_key="agent") as client:
            history: list[Any] = [{"role": "user", "content": "Parcel 12: what is the pickup code?"}]
            for turn in range(3):
                if turn == 1:
                    async with client.messages.stream(
                        model="m", max_tokens=200, messages=history, tools=TOOLS
                    ) as stream:
                        found = await stream.get_final_message()
                else:
                    found = await client.messages.create(model="m", max_tokens=200, messages=history, tools=TOOLS)
                uses = [block.id for block in found.content if block.type == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": use, "content": "7"} for use in uses]
                said_back = [*results, {"type": "text", "text": "Go on."}]
                history += [{"role": "assistant", "content": found.content}, {"role": "user", "content": said_back}]
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            (session,) = (await http.get("/sessions")).json()["sessions"]
            calls = (await http.get(f"/sessions/{session['session_id']}/calls")).json()["calls"]
    assert [call["origin"] for call in calls] == ["fresh", "extended", "extended"]
    for parent, child in itertools.pairwise(calls):
        known = parent["prompt_ids"] + parent["choices"][0]["output_ids"]
        assert child["prompt_ids"][: len(known)] == known
