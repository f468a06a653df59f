"""kill -9 of replicas at random moments, under agents that turn to another replica: each turn is recorded once."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, fake_engine
from postgres_server import PostgresServer
from replicas import Replica, answer, replica
from router_harness import USER

NUM_AGENTS = 4
NUM_TURNS = 12
NUM_KILLS = 3


class Fleet:
    """Two replicas; who is killed is started again."""

    def __init__(self, stack: AsyncExitStack, engine: FakeEngine, database: str, directory: Path) -> None:
        self._stack = stack
        self._arguments = (engine, database, directory)
        self.replicas: list[Replica] = []

    async def start(self) -> None:
        self.replicas.append(await self._stack.enter_async_context(replica(*self._arguments)))

    async def kill(self, number: int) -> None:
        await self.replicas.pop(number).kill()
        await self.start()


class Agent:
    """One episode under a key of its own. `seen` are the answers of which the end was seen."""

    def __init__(self, fleet: Fleet, number: int, progress: asyncio.Semaphore) -> None:
        self._fleet = fleet
        self._key = f"agent-{number}"
        self._home = number
        self._progress = progress
        self.session_id = ""
        self.seen: list[dict[str, Any]] = []

    async def run(self) -> None:
        history: list[Any] = list(USER)
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            for _ in range(NUM_TURNS):
                body = await self._turn(http, history)
                self.seen.append(body)
                self._progress.release()
                history += [body["choices"][0]["message"], {"role": "user", "content": "And then?"}]

    async def _turn(self, http: httpx.AsyncClient, history: list[Any]) -> dict[str, Any]:
        for retry in range(200):
            at = self._fleet.replicas[self._home % len(self._fleet.replicas)]
            try:
                response = await http.post(
                    f"{at.url}/v1/chat/completions", json={"model": "policy", "messages": history},
                    headers={"authorization": f"Bearer {self._key}", "x-stainless-retry-count": str(retry)},
                )  # fmt: skip
            except httpx.TransportError:
                self._home += 1
                continue
            if response.headers.get("x-should-retry") == "true":
                continue
            assert response.status_code == 200, response.text
            self.session_id = response.headers["x-rlagent-session"]
            return response.json()
        raise AssertionError("no replica answers")


@pytest.mark.slow
async def test_kill_9_of_replicas_at_random_moments_records_each_turn_once(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    chance = random.Random(5)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(fake_engine(answer))
        fleet = Fleet(stack, engine, postgres.new_schema(), tmp_path)
        await fleet.start()
        await fleet.start()
        progress = asyncio.Semaphore(0)
        agents = [Agent(fleet, number, progress) for number in range(NUM_AGENTS)]
        running = [asyncio.create_task(agent.run()) for agent in agents]
        for _ in range(NUM_KILLS):
            for _ in range(chance.randrange(4, 12)):
                await progress.acquire()
            await fleet.kill(chance.randrange(2))
        await asyncio.gather(*running)
        for agent in agents:
            await check(fleet.replicas[0], agent)


async def check(at: Replica, agent: Agent) -> None:
    """What the agent saw is what is recorded, in one chain of exact prefixes."""
    calls = await at.admin.calls(agent.session_id)
    assert [call["call_id"] for call in calls] == [body["id"] for body in agent.seen]
    assert [call["origin"] for call in calls] == ["fresh"] + ["extended"] * (NUM_TURNS - 1)
    for body, call in zip(agent.seen, calls, strict=True):
        assert body["usage"]["prompt_tokens"] == len(call["prompt_ids"])
        assert body["usage"]["completion_tokens"] == len(call["choices"][0]["output_ids"])
    await at.admin.finish(agent.session_id, reward=1.0)
    (row,) = await at.admin.trajectories(agent.session_id)
    assert row["token_ids"] == calls[-1]["prompt_ids"] + calls[-1]["choices"][0]["output_ids"]
