"""Which engine a call goes to: the one that its session used before (its prefix is cached there), else the least loaded.

In the flow: generate.py picks an engine per request. Invariant: only engines in state "ready" get requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Final

from rlagent.errors import EngineError
from rlagent.router.engine_client import Engine

# A supervised engine that restarts is waited for so long; an SDK's own retries give up earlier than that.
START_WAIT_S: Final = 60.0


class NoEngine(EngineError):
    """No engine can take a call now."""


class Pool:
    """The engines of one router, and small tasks that concern them (aborts)."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._homes: dict[str, Engine] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> list[Engine]:
        """Engines that take requests."""
        return [engine for engine in self.engines if engine.state == "ready"]

    async def pick(self, session_id: str, avoid: Collection[Engine] = ()) -> Engine:
        """The engine for a session's next request. NoEngine when none is ready and none is being started."""
        try:
            async with asyncio.timeout(START_WAIT_S), self._changed:
                await self._changed.wait_for(
                    lambda: self._open(avoid) or not any(engine.state == "starting" for engine in self.engines)
                )
        except TimeoutError:
            pass
        found = self._open(avoid)
        if not found:
            states = ", ".join(f"{engine.url} {engine.state}" for engine in self.engines)
            raise NoEngine(f"no engine can take the call now ({states}); try again in a few seconds")
        home = self._homes.get(session_id)
        if home not in found:
            home = min(found, key=lambda engine: engine.running)
            self._homes[session_id] = home
        return home

    def _open(self, avoid: Collection[Engine]) -> list[Engine]:
        return [engine for engine in self.ready if engine not in avoid]

    def forget(self, session_id: str) -> None:
        """A session ended."""
        self._homes.pop(session_id, None)

    async def announce(self) -> None:
        """Some engine's state changed: wake the calls that wait for one."""
        async with self._changed:
            self._changed.notify_all()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a small task that the pool owns; one that fails is of no consequence (the engine is gone)."""
        task = asyncio.create_task(_harmless(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for the small tasks."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _harmless(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except EngineError:
        return
