"""The demo's agent over HTTP, against an endpoint that answers from a script."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from aiohttp import web

from rlagent.envs.parcels import MAX_TURNS, Task, answer_with

ROLLOUT = run_path(str(Path(__file__).parents[2] / "examples" / "parcels" / "rollout.py"))["rollout"]
MIA = Task(id="t", customer="Mia", order=41, depot="Kale", code=57)

Turn = Callable[[list[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    base_url: str
    api_key: str


def call(name: str, **arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


def found(messages: list[dict[str, Any]], field: str) -> Any:
    results = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
    return next(result[field] for result in results if field in result)


LOOK_EVERYTHING_UP: list[Turn] = [
    lambda _: call("find_order", customer="Mia"),
    lambda seen: call("track_parcel", order=found(seen, "order")),
    lambda seen: call("pickup_code", depot=found(seen, "depot"), order=found(seen, "order")),
    lambda seen: {"content": answer_with(found(seen, "code"))},
]


@asynccontextmanager
async def scripted(turns: list[Turn], requests: list[dict[str, Any]]) -> AsyncIterator[Endpoint]:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        body = await request.json()
        requests.append(body)
        message = {"role": "assistant", **turns[len(requests) - 1](body["messages"])}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/sessions/s/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield Endpoint(base_url=f"http://127.0.0.1:{port}/sessions/s/v1", api_key="key")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("turns", "reward", "num_requests"),
    [
        (LOOK_EVERYTHING_UP, 1.0, 4),
        ([*LOOK_EVERYTHING_UP[:2], lambda _: {"content": "The code is 58."}], 0.0, 3),
        ([lambda _: call("track_parcel", order=42)], 0.0, 1),
        ([lambda _: call("no_such_tool")], 0.0, 1),
        ([LOOK_EVERYTHING_UP[0]] * MAX_TURNS, 0.0, MAX_TURNS),
    ],
    ids=["expert", "guess", "wrong order", "unknown tool", "never answers"],
)
async def test_a_rollout_earns_what_the_agent_found(turns: list[Turn], reward: float, num_requests: int) -> None:
    requests: list[dict[str, Any]] = []
    async with scripted(turns, requests) as endpoint:
        assert await ROLLOUT(asdict(MIA), endpoint) == reward
    assert len(requests) == num_requests
    assert all(len(request["tools"]) == 3 for request in requests)
    # Each request repeats the one before it and appends to it.
    for before, after in pairwise(requests):
        assert after["messages"][: len(before["messages"])] == before["messages"]
