"""The router client against a server that speaks DESIGN's session and policy routes: bodies, retries, errors."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlagent import client as client_module
from rlagent.client import RouterClient, SessionHandle
from rlagent.errors import RouterError
from rlagent.types import Reward

HANDLE = {"session_id": "s1", "base_url": "http://h:1/sessions/s1/v1", "api_key": "key"}


@dataclass
class Router:
    """The outside boundary: notes each request, answers what it is told to, or drops the connection."""

    url: str = ""
    answers: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    drops: int = 0
    authorization: list[str | None] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path_qs, body))
        self.authorization.append(request.headers.get("authorization"))
        if self.drops:
            self.drops -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        answer = self.answers.get(request.path, {})
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    monkeypatch.setattr(client_module, "RETRY_PAUSES_S", (0.0, 0.0))
    router = Router()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", router.handle)
    async with TestServer(app) as server:
        router.url = str(server.make_url(""))
        yield router


@pytest.fixture
async def client(router: Router) -> AsyncIterator[RouterClient]:
    async with RouterClient(router.url, admin_key="secret") as client:
        yield client


async def test_a_session_is_opened_rewarded_and_finished(router: Router, client: RouterClient) -> None:
    router.answers["/sessions"] = HANDLE
    handle = await client.new_session(
        task_id="t", group_id="g", group_size=4, deadline_s=9.0, sampling={"temperature": 0.5}
    )
    assert handle == SessionHandle(**HANDLE)
    await client.reward(handle.session_id, {"a": 1.0})
    await client.reward(handle.session_id, 0.5, call_id="c")
    await client.finish(handle.session_id, reward=1.0)
    await client.finish(handle.session_id, reward=Reward(components={"a": 1.0}, calls={"c": 2.0}), status="completed")
    await client.finish(handle.session_id, status="error")
    wanted = {"task_id": "t", "group_id": "g", "group_size": 4, "deadline_s": 9.0}
    wanted |= {"train": True, "sampling": {"temperature": 0.5}}
    assert router.requests == [
        ("POST", "/sessions", wanted),
        ("POST", "/sessions/s1/reward", {"reward": {"a": 1.0}}),
        ("POST", "/sessions/s1/reward", {"reward": 0.5, "call_id": "c"}),
        ("POST", "/sessions/s1/finish", {"status": "completed", "reward": 1.0}),
        ("POST", "/sessions/s1/reward", {"reward": 2.0, "call_id": "c"}),
        ("POST", "/sessions/s1/finish", {"status": "completed", "reward": {"a": 1.0}}),
        ("POST", "/sessions/s1/finish", {"status": "error"}),
    ]  # fmt: skip
    assert set(router.authorization) == {"Bearer secret"}


async def test_reading_sessions(router: Router, client: RouterClient) -> None:
    router.answers |= {
        "/sessions": {"sessions": [{"session_id": "s1"}]},
        "/sessions/s1": {"session_id": "s1"},
        "/sessions/s1/calls": {"calls": [{"call_id": "c"}]},
        "/sessions/s1/trajectories": {"trajectories": [{"token_ids": [1]}]},
        "/policy": {"version": 3},
        "/health": {"status": "ok"},
    }
    assert await client.sessions(state="open", limit=5) == [{"session_id": "s1"}]
    assert router.requests[-1] == ("GET", "/sessions?limit=5&state=open", None)
    assert await client.session("s1") == {"session_id": "s1"}
    assert await client.calls("s1") == [{"call_id": "c"}]
    assert await client.trajectories("s1") == [{"token_ids": [1]}]
    assert (await client.policy(), await client.health()) == ({"version": 3}, {"status": "ok"})


async def test_a_publish(router: Router, client: RouterClient) -> None:
    router.answers["/policy/begin"] = {"publish_id": "p", "version": 4, "engines": ["http://e:1"], "lease_s": 60.0}
    router.answers["/policy/commit"] = {"version": 4, "depth": 2}
    ticket = await client.begin_publish(step=2, parent=3, lease_s=60.0)
    assert (ticket.publish_id, ticket.version, ticket.engines) == ("p", 4, ("http://e:1",))
    assert await client.commit_publish("p", checksum="c", snapshot=None) == {"version": 4, "depth": 2}
    await client.fail_publish("p", "an engine died")
    assert [body for _, _, body in router.requests] == [
        {"step": 2, "parent": 3, "lease_s": 60.0},
        {"publish_id": "p", "checksum": "c", "snapshot": None},
        {"publish_id": "p", "reason": "an engine died"},
    ]


async def test_only_calls_that_may_be_repeated_are_tried_again(router: Router, client: RouterClient) -> None:
    router.drops = 2
    await client.finish("s1", reward=1.0)
    assert len(router.requests) == 3
    router.requests.clear()
    for call in (client.new_session(), client.reward("s1", 1.0), client.lease(num_groups=1, step=0, wait_s=0.0)):
        router.drops = 1
        with pytest.raises(RouterError, match="is the router running there"):
            await call
    assert len(router.requests) == 3
    router.drops = 3
    with pytest.raises(RouterError, match=r"POST http://.*/sessions/s1/finish: "):
        await client.finish("s1", reward=1.0)


async def test_errors_carry_the_routers_message(router: Router, client: RouterClient) -> None:
    body = {"error": {"message": "session 's1' is already finished", "type": "x", "param": None, "code": None}}
    router.answers["/sessions/s1/finish"] = web.json_response(body, status=409)
    with pytest.raises(RouterError, match=r"/sessions/s1/finish: 409 session 's1' is already finished"):
        await client.finish("s1", reward=1.0)
    router.answers["/health"] = web.Response(text="<html>a proxy's page</html>", status=502)
    with pytest.raises(RouterError, match="502 <html>a proxy's page"):
        await client.health()


@pytest.mark.parametrize("answer", ["text", [1], {"other": 1}])
async def test_a_server_that_is_no_router_is_named(router: Router, client: RouterClient, answer: object) -> None:
    paths = ("/sessions", "/learner/status", "/policy/begin", "/learner/consume", "/learner/restore")
    router.answers = {path: answer for path in paths}  # noqa: C420
    for call in (
        client.new_session(),
        client.status(),
        client.sessions(),
        client.begin_publish(step=1, parent=0),
        client.consume("l", step=0),
        client.restore(cursor=0, version=0),
    ):
        with pytest.raises(RouterError, match="not a router's answer"):
            await call


async def test_an_answer_that_is_not_json_is_named(router: Router, client: RouterClient) -> None:
    router.answers["/health"] = web.Response(text="hello")
    with pytest.raises(RouterError, match="not a router's answer"):
        await client.health()


async def test_no_server_at_all(router: Router) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with RouterClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(RouterError, match=f"GET http://127.0.0.1:{port}/health: ConnectError"):
            await client.health()
    assert router.requests == []


def test_the_environment_of_an_agent_that_is_a_program() -> None:
    handle = SessionHandle(**HANDLE)
    assert handle.environ() == {
        "OPENAI_BASE_URL": "http://h:1/sessions/s1/v1",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_BASE_URL": "http://h:1/sessions/s1",
        "ANTHROPIC_API_KEY": "key",
    }
    assert SessionHandle(**handle.to_json()) == handle
