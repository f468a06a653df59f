"""Several calls and several answers: siblings, tool calls, retries, disconnects, streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from router_harness import TOKENIZER, TOOLS, USER, always, in_turn, router, said

CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'


def events_of(text: str) -> list[Any]:
    """The JSON events of a stream that ended with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


async def until_metric(http: httpx.AsyncClient, line: str) -> None:
    async with asyncio.timeout(5):
        while line not in (await http.get("/metrics")).text:
            pass


async def test_same_prompt_parallel_calls_are_both_kept(tmp_path: Path) -> None:
    async with router(tmp_path, in_turn(said("one"), said("two"))) as r:
        responses = await asyncio.gather(r.chat(), r.chat())
        texts = {response.json()["choices"][0]["message"]["content"] for response in responses}
        assert texts == {"one", "two"}
        session_id = responses[0].headers["x-rlagent-session"]
        await r.admin.finish(session_id, reward=1.0)
        assert len(await r.admin.trajectories(session_id)) == 2


async def test_n_4_gives_four_siblings(tmp_path: Path) -> None:
    async with router(tmp_path, in_turn(said("a"), said("b"), said("c"), said("d"))) as r:
        response = await r.chat(n=4)
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert {choice["message"]["content"] for choice in choices} == {"a", "b", "c", "d"}
        assert len(r.engine.requests) == 4
        assert len(await r.admin.trajectories(response.headers["x-rlagent-session"])) == 4
        answer = choices[2]["message"]
        again = await r.chat([*USER, answer, {"role": "user", "content": "?"}])
        assert (await r.calls(again))[-1]["parent"]["choice"] == 2


async def test_parallel_tool_calls_keep_order_and_ids(tmp_path: Path) -> None:
    other = CALL.replace('"a"', '"b"')
    async with router(tmp_path, in_turn(said(f"{CALL}\n{other}"), said("ok"))) as r:
        response = await r.chat(tools=TOOLS)
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        arguments = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert arguments == ['{"key": "a"}', '{"key": "b"}']
        ids = [call["id"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == 2
        results = [{"role": "tool", "tool_call_id": name, "content": "x"} for name in ids]
        again = await r.chat([*USER, choice["message"], *results], tools=TOOLS)
        assert (await r.calls(again))[-1]["origin"] == "extended"


async def test_a_malformed_tool_call_is_served_as_text_and_flagged(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "look", "arguments": {"key"\n</tool_call>'
    async with router(tmp_path, always(said(broken))) as r:
        response = await r.chat(tools=TOOLS)
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (broken, "stop")
        (call,) = await r.calls(response)
        assert call["choices"][0]["parse_status"] == "malformed"
        assert call["choices"][0]["output_ids"] == list(said(broken).ids)


async def test_a_marked_retry_after_completion_gets_the_same_answer(tmp_path: Path) -> None:
    async with router(tmp_path, in_turn(said("one"), said("two"))) as r:
        first = await r.chat()
        again = await r.chat(headers={"x-stainless-retry-count": "1"})
        assert again.content == first.content
        streamed = await r.chat(stream=True)
        replayed = await r.chat(stream=True, headers={"x-stainless-retry-count": "1"})
        assert events_of(replayed.text)[0]["id"] == events_of(streamed.text)[0]["id"]
        assert len(r.engine.requests) == 2


async def test_a_marked_retry_in_flight_joins_it(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with router(tmp_path, always(said("one", hold=hold))) as r:
        first = asyncio.create_task(r.chat())
        await r.engine.started.wait()
        second = asyncio.create_task(r.chat(headers={"x-stainless-retry-count": "1"}))
        await until_metric(r.http, 'rlagent_retries_total{kind="joined"} 1')
        hold.set()
        assert (await first).content == (await second).content
        assert len(r.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_frees_the_engines_slot(tmp_path: Path, stream: bool) -> None:
    async with router(tmp_path, always(said("one two three", hold=asyncio.Event()))) as r:
        task = asyncio.create_task(r.chat(stream=stream))
        await r.engine.started.wait()
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(1):
            await r.engine.aborted.wait()
            await r.engine.idle.wait()
        (session,) = await r.admin.sessions()
        assert await r.admin.calls(session["session_id"]) == []


async def test_the_undelivered_first_attempt_of_a_duplicate_is_not_trained_on(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with router(tmp_path, in_turn(said("lost", hold=hold, held_ids=1), said("kept"))) as r:
        async with r.http.stream(
            "POST", "/v1/chat/completions", json={"model": "m", "messages": USER, "stream": True},
            headers={"authorization": "Bearer agent"},
        ) as response:  # fmt: skip
            assert response.status_code == 200
        await r.engine.aborted.wait()
        kept = await r.chat()
        session_id = kept.headers["x-rlagent-session"]
        await r.admin.finish(session_id, reward=1.0)
        rows = await r.admin.trajectories(session_id)
        assert [TOKENIZER.decode(row["token_ids"]).endswith("kept<|im_end|>") for row in rows] == [True]


async def test_streaming_says_the_same_as_a_whole_answer(tmp_path: Path) -> None:
    text = f"<think>\nhm\n</think>\n\nLet me look.\n{CALL}"
    async with router(tmp_path, always(said(text))) as r:
        whole = (await r.chat(tools=TOOLS)).json()["choices"][0]
        stream = await r.chat(tools=TOOLS, stream=True, stream_options={"include_usage": True}, key="other")
        events = events_of(stream.text)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(d.get("content") or "" for d in deltas) == whole["message"]["content"] == "Let me look."
        assert "".join(d.get("reasoning_content", "") for d in deltas) == whole["message"]["reasoning_content"] == "hm"
        (call,) = [call for d in deltas for call in d.get("tool_calls", ())]
        assert call["function"] == whole["message"]["tool_calls"][0]["function"]
        assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"
        assert events[-1]["usage"]["completion_tokens"] == len(said(text).ids)


async def test_the_commit_precedes_the_terminal_event(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("one two"))) as r, r.http.stream(
        "POST", "/v1/chat/completions", json={"model": "m", "messages": USER, "stream": True},
        headers={"authorization": "Bearer agent"},
    ) as response:  # fmt: skip
        async for line in response.aiter_lines():
            if '"finish_reason":"stop"' in line:
                assert len(await r.admin.calls(response.headers["x-rlagent-session"])) == 1
