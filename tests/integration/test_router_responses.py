"""OpenAI's responses with its SDK, unchanged: typed objects, events in their order, history by items and by id."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from fake_engine import Reply
from router_harness import EOS, MODEL, TOKENIZER, Harness, always, in_turn, router, said

from rlagent.buffer.config import BufferConfig
from rlagent.engine.config import EngineConfig
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving

CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "look",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        "strict": False,
    }
]
ASKED = "What is the code?"


def client_of(r: Harness, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="agent", **options)


async def test_a_tool_loop_by_items(tmp_path: Path) -> None:
    thoughtful = f"<think>\nI should look.\n</think>\nLet me look.\n{CALL}\n{CALL}"
    async with router(tmp_path, in_turn(said(thoughtful), said("The code is 7."))) as r, client_of(r) as client:
        history: list[Any] = [{"role": "user", "content": ASKED}]
        first = await client.responses.create(model="gpt-x", input=history, tools=TOOLS, instructions="Be brief.")
        assert (first.status, first.model, first.output_text) == ("completed", "gpt-x", "Let me look.")
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        history += [item.to_dict() for item in first.output]
        for number, item in enumerate(first.output[2:]):
            assert item.type == "function_call"
            assert (item.name, item.arguments) == ("look", '{"key": "a"}')
            history.append({"type": "function_call_output", "call_id": item.call_id, "output": str(number)})
        second = await client.responses.create(model="gpt-x", input=history, tools=TOOLS, instructions="Be brief.")
        assert second.output_text == "The code is 7."
        calls = await r.only_calls()
        assert [call["origin"] for call in calls] == ["fresh", "extended"]
        assert second.usage is not None
        assert second.usage.input_tokens == len(calls[1]["prompt_ids"])
        assert second.usage.output_tokens == len(calls[1]["choices"][0]["output_ids"])
        assert first.usage is not None
        thought = TOKENIZER.decode(
            calls[0]["choices"][0]["output_ids"][: first.usage.output_tokens_details.reasoning_tokens]
        )
        assert thought == "<think>\nI should look.\n</think>"


async def test_a_response_is_retrieved_as_it_was_given(tmp_path: Path) -> None:
    script = in_turn(said(f"<think>\nhm\n</think>\nLook.\n{CALL}"), said("Yes."))
    async with router(tmp_path, script) as r, client_of(r) as client:
        first = await client.responses.create(
            model="m", input=ASKED, tools=TOOLS, instructions="Be brief.", metadata={"a": "b"},
            include=["message.output_text.logprobs"], temperature=0.7,
        )  # fmt: skip
        streamed = ""
        async for event in await client.responses.create(model="m", input=ASKED, stream=True):
            if event.type == "response.completed":
                streamed = event.response.id
        raw = await client.responses.with_raw_response.retrieve(first.id)
        assert raw.parse().to_dict() == first.to_dict()
        assert (await client.responses.retrieve(streamed)).output_text == "Yes."
        for wrong in ("resp_x", "a\0b"):
            with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
                await client.responses.retrieve(wrong)
        with pytest.raises(openai.BadRequestError, match="stream"):
            await client.responses.with_raw_response.retrieve(first.id, stream=True)
        (session,) = await r.admin.sessions()
        await r.admin.finish(session["session_id"], reward=1.0)
        assert (await client.responses.retrieve(first.id)).id == first.id
        with pytest.raises(openai.APIStatusError, match="405"):
            await client.responses.delete(first.id)


async def test_a_response_of_another_session_or_dialect_is_not_found(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("hi"))) as r, client_of(r) as client:
        found = await client.responses.create(model="m", input=ASKED)
        chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(chat.id)
        other = openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="other", max_retries=0)
        async with other:
            await other.responses.create(model="m", input=ASKED)
            with pytest.raises(openai.NotFoundError, match="own answers"):
                await other.responses.retrieve(found.id)
            with pytest.raises(openai.BadRequestError, match="own answers"):
                await other.responses.create(model="m", input="Sure?", previous_response_id=found.id)


async def test_previous_response_id_goes_on_from_what_is_recorded(tmp_path: Path) -> None:
    script = in_turn(said(f"<think>\nHm.\n</think>\n{CALL}"), said("The code is 7."), said("Yes."))
    async with router(tmp_path, script) as r, client_of(r) as client:
        first = await client.responses.create(model="m", input=ASKED, tools=TOOLS, instructions="Be brief.")
        (call,) = [item for item in first.output if item.type == "function_call"]
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
        second = await client.responses.create(
            model="m", input=output, tools=TOOLS, instructions="Be brief.", previous_response_id=first.id
        )
        third = await client.responses.create(
            model="m", input="Sure?", tools=TOOLS, instructions="Be brief.", previous_response_id=second.id
        )
        assert (second.previous_response_id, third.output_text) == (first.id, "Yes.")
        calls = await r.only_calls()
        assert [call["origin"] for call in calls] == ["fresh", "extended", "extended"]
        for parent, child in itertools.pairwise(calls):
            known = parent["prompt_ids"] + parent["choices"][0]["output_ids"]
            assert child["prompt_ids"][: len(known)] == known
        other = await client.responses.create(model="m", input="Sure?", tools=TOOLS, previous_response_id=second.id)
        assert other.instructions is None
        assert "Be brief." not in TOKENIZER.decode((await r.only_calls())[3]["prompt_ids"])  # not carried over
        with pytest.raises(openai.BadRequestError, match="not found") as missing:
            await client.responses.create(model="m", input="Sure?", previous_response_id="resp_x")
        assert missing.value.code == "previous_response_not_found"


async def test_streamed_events_come_in_openais_order(tmp_path: Path) -> None:
    thoughtful = f"<think>\nHm.\n</think>\nLet me look.\n{CALL}"
    async with router(tmp_path, always(said(thoughtful))) as r, client_of(r) as client:
        stream = await client.responses.create(model="m", input=ASKED, tools=TOOLS, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [kind for kind, _ in itertools.groupby(event.type.removeprefix("response.") for event in events)] == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
            "content_part.done", "output_item.done",
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done",
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        last = events[-1]
        assert last.type == "response.completed"
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert last.response.output == done
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == last.response.output_text


async def test_the_stream_helper_and_a_whole_answer_agree(tmp_path: Path) -> None:
    async with router(tmp_path, always(said(f"Let me look.\n{CALL}"))) as r, client_of(r) as client:
        whole = await client.responses.create(model="m", input=ASKED, tools=TOOLS)
        async with client.responses.stream(model="m", input=ASKED, tools=TOOLS) as stream:
            streamed = await stream.get_final_response()
        assert [item.type for item in streamed.output] == [item.type for item in whole.output]
        assert (streamed.output_text, streamed.usage) == (whole.output_text, whole.usage)


async def test_limits_logprobs_and_what_is_echoed(tmp_path: Path) -> None:
    cut = Reply(ids=TOKENIZER.encode("The code"), finish={"type": "length", "length": 2})
    async with router(tmp_path, always(cut)) as r, client_of(r) as client:
        found = await client.responses.create(
            model="m", input=ASKED, max_output_tokens=9, store=False, metadata={"a": "b"}, user="me",
            include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        )  # fmt: skip
        assert found.status == "incomplete"
        assert found.incomplete_details is not None
        assert found.incomplete_details.reason == "max_output_tokens"
        assert (found.max_output_tokens, found.metadata, found.store) == (9, {"a": "b"}, False)  # type: ignore[attr-defined]
        (message,) = found.output
        assert message.type == "message"
        (text,) = message.content
        assert text.type == "output_text"
        assert text.logprobs is not None
        assert "".join(token.token for token in text.logprobs) == text.text == "The code"
        (call,) = await r.only_calls()
        assert call["client"]["ignored"] == {"store": False, "metadata": {"a": "b"}, "user": "me"}


async def test_the_sync_client_and_raw_responses(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:

        def agent() -> Any:
            with openai.OpenAI(base_url=f"{r.url}/v1", api_key="agent") as client:
                return client.responses.with_raw_response.create(model="m", input=ASKED)

        raw = await asyncio.to_thread(agent)
        assert raw.headers["x-rlagent-session"].startswith("s-")
        assert raw.parse().id == raw.headers["x-request-id"] == raw.parse()._request_id
        assert raw.parse().output_text == "ok"


class Code(pydantic.BaseModel):
    code: int


async def test_parse_goes_to_the_engines_grammar_and_is_never_trained(tmp_path: Path) -> None:
    async with router(tmp_path, always(said('{"code": 7}'))) as r, client_of(r) as client:
        with pytest.raises(openai.BadRequestError, match="no grammars"):
            await client.responses.parse(model="m", input=ASKED, text_format=Code)
    async with router(tmp_path / "b", always(said('{"code": 7}'))) as r, client_of(r) as client:
        r.engine.grammar_backend = "xgrammar"
        found = await client.responses.parse(model="m", input=ASKED, text_format=Code)
        assert found.output_parsed == Code(code=7)
        assert "code" in r.engine.requests[0]["sampling_params"]["json_schema"]
        (call,) = await r.only_calls()
        assert call["choices"][0]["trainable"] is False


async def test_its_errors_are_the_sdks(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("The code is 7")
    bad = Reply(ids=[*ids, EOS], logprobs=[-1.0] * len(ids) + [float("nan")], finish={"type": "stop", "matched": EOS})
    async with router(tmp_path, always(bad)) as r, client_of(r, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as overflow:
            await client.responses.create(model="m", input="7 " * 1100)
        assert overflow.value.code == "context_length_exceeded"
        stream = await client.responses.create(model="m", input=ASKED, stream=True)
        with pytest.raises(openai.APIError, match="not recorded"):
            async for _ in stream:
                pass


@pytest.mark.slow
async def test_an_agent_on_the_embedded_engine_is_recorded_exactly(tmp_path: Path) -> None:
    async with serving(
        model_dir=MODEL, router=RouterConfig(), sampling=SamplingConfig(max_tokens=200),
        engine=EngineConfig(max_total_tokens=8192), buffer=BufferConfig(), buffer_path=tmp_path / "buffer.db",
    ) as url:  # fmt: skip
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client:
            sent: list[Any] = [{"role": "user", "content": "Parcel 12: what is the pickup code?"}]
            previous: str | None = None
            for turn in range(3):
                if turn == 1:
                    async with client.responses.stream(
                        model="m", input=sent, tools=TOOLS, previous_response_id=previous
                    ) as stream:
                        found: Any = await stream.get_final_response()
                else:
                    found = await client.responses.create(
                        model="m", input=sent, tools=TOOLS, previous_response_id=previous
                    )
                uses = [item.call_id for item in found.output if item.type == "function_call"]
                sent = [{"type": "function_call_output", "call_id": use, "output": "7"} for use in uses]
                sent.append({"role": "user", "content": "Go on."})
                previous = found.id
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            (session,) = (await http.get("/sessions")).json()["sessions"]
            calls = (await http.get(f"/sessions/{session['session_id']}/calls")).json()["calls"]
    assert [call["origin"] for call in calls] == ["fresh", "extended", "extended"]
    for parent, child in itertools.pairwise(calls):
        known = parent["prompt_ids"] + parent["choices"][0]["output_ids"]
        assert child["prompt_ids"][: len(known)] == known
