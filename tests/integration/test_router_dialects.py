"""What holds in every dialect: one history, retries, counted fields, errors of their own shape, models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest
from router_harness import Harness, always, in_turn, router, said

ASKED = "What is the code?"
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": [{"role": "user", "content": ASKED}]},
    "completions": {"model": "m", "prompt": ASKED},
    "responses": {"model": "m", "input": ASKED},
    "messages": {"model": "m", "max_tokens": 30, "messages": [{"role": "user", "content": ASKED}]},
}
SAID = "The code is 7."


def text_of(path: str, body: Any) -> str:
    """The text of a whole answer."""
    match path:
        case "chat/completions":
            return str(body["choices"][0]["message"]["content"])
        case "completions":
            return str(body["choices"][0]["text"])
        case "responses":
            return str(body["output"][0]["content"][0]["text"])
    return str(body["content"][0]["text"])


async def post(r: Harness, path: str, body: Any, *, key: str = "agent", retry: int = 0) -> Any:
    headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry)}
    return await r.http.post(f"/v1/{path}", json=body, headers=headers)


@pytest.mark.parametrize("path", BODIES)
async def test_a_marked_retry_gets_the_same_answer_again(tmp_path: Path, path: str) -> None:
    async with router(tmp_path, in_turn(said(SAID), said("something else"))) as r:
        first = await post(r, path, BODIES[path])
        again = await post(r, path, BODIES[path], retry=1)
        assert again.json() == first.json()
        assert text_of(path, first.json()) == SAID
        streamed = await post(r, path, {**BODIES[path], "stream": True}, key="b")
        replayed = await post(r, path, {**BODIES[path], "stream": True}, key="b", retry=1)
        assert len(r.engine.requests) == 2
        assert "something else" in replayed.text
        ends = [re.sub(r'"sequence_number":[0-9]+', "", s.text).splitlines()[-3:] for s in (streamed, replayed)]
        assert ends[0] == ends[1]
        assert len(await r.calls(again)) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_fields_without_effect_are_recorded_and_counted_and_wishes_overridden(tmp_path: Path, path: str) -> None:
    async with router(tmp_path, always(said(SAID))) as r:
        more = {"metadata": {"a": "b"}, "service_tier": "auto", "x_unknown": 1, "temperature": 0.1}
        response = await post(r, path, BODIES[path] | more)
        assert response.status_code == 200, response.text
        assert response.headers["x-rlagent-overridden"] == "temperature"
        (call,) = await r.calls(response)
        assert call["dialect"] == path.partition("/")[0]
        assert call["client"]["ignored"] == {"metadata": {"a": "b"}, "service_tier": "auto", "x_unknown": 1}
        assert call["client"]["asked"]["temperature"] == 0.1
        params = r.engine.requests[0]["sampling_params"]
        assert params["temperature"] == 1.0
        assert "x_unknown" not in orjson.dumps(r.engine.requests[0]).decode()
        assert "x_unknown" in (await r.http.get("/metrics")).text


async def test_one_history_goes_on_in_another_dialect(tmp_path: Path) -> None:
    async with router(tmp_path, in_turn(said("one"), said("two"), said("three"))) as r:
        answers = ["one", "two"]
        told = [{"role": "user", "content": ASKED}]
        last = await post(r, "chat/completions", {"model": "m", "messages": told})
        told += [{"role": "assistant", "content": answers[0]}, {"role": "user", "content": "Sure?"}]
        await post(r, "messages", {"model": "m", "max_tokens": 9, "messages": told})
        told += [{"role": "assistant", "content": answers[1]}, {"role": "user", "content": "Really?"}]
        last = await post(r, "responses", {"model": "m", "input": told})
        calls = await r.calls(last)
        assert [(call["dialect"], call["origin"]) for call in calls] == [
            ("chat", "fresh"),
            ("messages", "extended"),
            ("responses", "extended"),
        ]
        assert [call["call_id"].rpartition("_")[0] or call["call_id"].partition("-")[0] for call in calls] == [
            "chatcmpl",
            "msg",
            "resp",
        ]
        (row,) = await r.admin.trajectories(last.headers["x-rlagent-session"])
        assert sum(row["loss_mask"]) == sum(len(call["choices"][0]["output_ids"]) for call in calls)


@pytest.mark.parametrize("path", BODIES)
async def test_a_refusal_has_the_dialects_shape_and_names_the_request(tmp_path: Path, path: str) -> None:
    async with router(tmp_path, always(said(SAID))) as r:
        response = await post(r, path, {**BODIES[path], "model": 3})
        assert response.status_code == 400
        body = response.json()
        if path == "messages":
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert response.headers["request-id"].startswith("req_")
        else:
            assert body["error"]["param"] == "model"
            assert response.headers["x-request-id"].startswith("req_")
        unknown = await post(r, f"{path}/batches", {})
        assert unknown.status_code in (404, 405)
        assert ("type" in unknown.json()) == (path == "messages")


async def test_models_for_both_sdks(tmp_path: Path) -> None:
    async with router(tmp_path, always(said(SAID))) as r:
        async with openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="agent") as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("gpt-x")).id == "gpt-x"
        async with anthropic.AsyncAnthropic(base_url=r.url, api_key="agent") as other:
            (model,) = [model async for model in other.models.list()]
            assert (model.id, model.type, model.display_name) == ("policy", "model", "policy")
            assert (await other.models.retrieve("claude-x")).created_at.year >= 2026
