"""OpenEnv's WebSocket surface for an environment of yours: any OpenEnv client can then play it, ours too.

    python -m rlagent.envs.openenv_server my_env.py:MyEnv --port 8000

Invariant: a connection has an environment of its own, which is closed with it; what an environment raises is told, and ends nothing else.
OpenEnv's plain HTTP calls keep no episode between them, and are not served.
"""

import argparse
import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from aiohttp import WSMsgType, web

from rlagent.envs.openenv_client import Step
from rlagent.loading import load_function

_HEARTBEAT_S: Final = 30.0  # finds out that a client is gone
_ERROR: Final = "EXECUTION_ERROR"


class Environment(Protocol):
    """What is served. Methods may be async; plain ones run in a thread, one at a time for each environment."""

    def reset(self, **given: Any) -> Any:
        """Begin an episode: a Step. given: seed, episode_id, what the client says."""
        ...

    def step(self, action: dict[str, Any]) -> Any:
        """Act: a Step. Raise for what cannot be done."""
        ...

    def state(self) -> Mapping[str, Any]:
        """What it tells of itself."""
        ...


def application(make: Callable[[], Environment], *, max_environments: int = 256) -> web.Application:
    """An aiohttp application that makes an environment for each connection, at most so many at once."""
    room = asyncio.Semaphore(max_environments)

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def socket(request: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse(heartbeat=_HEARTBEAT_S)
        await response.prepare(request)
        if room.locked():
            await response.send_json(_error(f"{max_environments} environments are open", "CAPACITY_REACHED"))
            await response.close()
            return response
        async with room:
            await _serve(response, make)
        return response

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/ws", socket)])
    return app


async def _serve(socket: web.WebSocketResponse, make: Callable[[], Environment]) -> None:
    env = await asyncio.to_thread(make)
    try:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            try:
                asked = json.loads(message.data)
                kind = asked["type"]
                data = asked.get("data", {})
            except (ValueError, TypeError, KeyError) as error:
                await socket.send_json(_error(f"not a message: {error}", "INVALID_JSON"))
                continue
            if kind == "close":
                break
            await socket.send_json(await _answer(env, kind, data))
    finally:
        close = getattr(env, "close", None)
        if close is not None:
            await _call(close)


async def _answer(env: Environment, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    try:
        if kind == "state":
            return {"type": "state", "data": dict(await _call(env.state))}
        if kind == "reset":
            step = await _call(env.reset, **data)
        elif kind == "step":
            step = await _call(env.step, data)
        else:
            return _error(f"unknown message type {kind!r}; use reset, step, state or close", "UNKNOWN_TYPE")
        assert isinstance(step, Step)
        body = {"observation": dict(step.observation), "reward": step.reward, "done": step.done}
        return {"type": "observation", "data": body}
    except Exception as error:  # the boundary to the environment
        return _error(f"{type(error).__name__}: {error}", _ERROR)


async def _call(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*given, **named)
    return await asyncio.to_thread(function, *given, **named)


def _error(message: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m rlagent.envs.openenv_server", description=main.__doc__)
    parser.add_argument("environment", help="file.py:Class, made without arguments")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    make = load_function(given.environment, what="environment")
    web.run_app(application(make), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
