"""OpenEnv: any environment behind its step / reset / state, over its WebSocket, one episode a connection.

    rlagent train --rollout-function-path rlagent.envs.openenv_client:rollout --tasks tasks.jsonl ...

with tasks like {"url": "http://127.0.0.1:8000", "reset": {"seed": 3}, "action": "message", "observation": "text"}: the model's
text goes into the action's field `action`, the observation's field `observation` (default: all of it, as JSON) is what it sees
next. Environments that need more than one field, or tools, take a rollout function of their own on `OpenEnv`. The messages are
those of openenv-core 0.3 and openenv 0.10.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from rlagent.envs.converse import converse
from rlagent.envs.verifiers.attempt import Endpoint, Message, text_of
from rlagent.errors import EnvironmentFailedError
from rlagent.types import Reward

_MAX_MESSAGE_BYTES = 100 * 1024 * 1024  # screenshots; OpenEnv's own client takes as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a reset or a step gave. reward is None where the environment gives none there."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class OpenEnv:
    """One episode at a time of an environment server. An async context manager; EnvironmentFailedError for what it refuses."""

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        self._url = url.rstrip("/") + "/ws"
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession()
        try:
            self._socket = await self._http.ws_connect(self._url, max_msg_size=_MAX_MESSAGE_BYTES)
        except aiohttp.ClientError as error:
            await self._http.close()
            raise EnvironmentFailedError(
                f"no environment answers at {self._url}: {error}; is its server running?"
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        assert self._socket is not None
        if not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        await self._http.close()

    async def reset(self, **given: Any) -> Step:
        """Begin an episode; given: seed, episode_id and what else the environment takes."""
        return _step(await self._exchange({"type": "reset", "data": given}, "observation"))

    async def step(self, action: Mapping[str, Any]) -> Step:
        """Act."""
        return _step(await self._exchange({"type": "step", "data": dict(action)}, "observation"))

    async def state(self) -> dict[str, Any]:
        """What the environment tells of itself: episode_id, step_count, ..."""
        return await self._exchange({"type": "state"}, "state")

    async def _exchange(self, message: Mapping[str, Any], wanted: str) -> dict[str, Any]:
        assert self._socket is not None
        try:
            await self._socket.send_json(message)
            answer = await self._socket.receive_json(timeout=self._timeout_s)
            kind, data = answer["type"], answer["data"]
        except (aiohttp.ClientError, TimeoutError, TypeError, KeyError, ValueError) as error:
            raise EnvironmentFailedError(
                f"{self._url}: {message['type']} was not answered: {type(error).__name__} {error}"
            ) from error
        if kind != wanted:
            raise EnvironmentFailedError(f"{self._url}: {message['type']} was refused: {data.get('message', data)}")
        found: dict[str, Any] = data
        return found


def _step(data: Mapping[str, Any]) -> Step:
    return Step(observation=data["observation"], reward=data.get("reward"), done=bool(data.get("done")))


async def rollout(task: Mapping[str, Any], session: Endpoint) -> Reward:
    """Play one episode; the reward is the sum of the steps' rewards."""
    total = 0.0

    def shown(step: Step) -> Message:
        field = task.get("observation")
        text = json.dumps(step.observation) if field is None else str(step.observation[field])
        return {"role": "user", "content": text}

    async with OpenEnv(task["url"]) as env:

        async def reply(message: Message) -> Sequence[Message]:
            nonlocal total
            step = await env.step({task.get("action", "message"): text_of(message)})
            total += step.reward or 0.0
            return [] if step.done else [shown(step)]

        first = await env.reset(**task.get("reset", {}))
        await converse(session, task, [shown(first)], reply=reply, max_turns=int(task.get("max_turns", 20)))
    return Reward(components={"return": total})
