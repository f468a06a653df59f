"""Which engine a call goes to: its session's (its prefix is cached there), else its group's (the task is), else the least loaded.

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
# Groups whose engine is remembered; the oldest are forgotten first. Far more than are ever sampled at once.
_MAX_GROUPS: Final = 4096


class NoEngine(EngineError):
    """No engine can take a call now."""


class Pool:
    """The engines of one router, and small tasks that concern them (aborts)."""

    def __init__(self, engines: Sequence[Engine], *, start_wait_s: float = START_WAIT_S) -> None:
        """start_wait_s: how long a call waits for an engine that is being started, at least START_WAIT_S."""
        self.engines = tuple(engines)
        self._start_wait_s = max(start_wait_s, START_WAIT_S)
        self._homes: dict[str, Engine] = {}
        self._groups: dict[str, Engine] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> list[Engine]:
        """Engines that take requests."""
        return [engine for engine in self.engines if engine.state == "ready"]

    async def pick(self, session_id: str, group_id: str | None = None, avoid: Collection[Engine] = ()) -> Engine:
        """The engine for a session's next request. NoEngine when none is ready and none is being started."""
        home = self._homes.get(session_id)
        if home is not None and home.state == "ready" and home not in avoid:
            return home
        found = self._open(avoid)
        if not found:
            await self._wait(avoid)
            found = self._open(avoid)
        if not found:
            states = ", ".join(f"{engine.url} {engine.state}" for engine in self.engines)
            raise NoEngine(f"no engine can take the call now ({states}); try again in a few seconds")
        home = self._homes.get(session_id)
        if home is None or home not in found:
            home = self._homes[session_id] = self._group_home(group_id, found)
        return home

    async def _wait(self, avoid: Collection[Engine]) -> None:
        """Until one is ready or none is being started, for a while."""
        try:
            async with asyncio.timeout(self._start_wait_s), self._changed:
                await self._changed.wait_for(
                    lambda: self._open(avoid) or not any(engine.state == "starting" for engine in self.engines)
                )
        except TimeoutError:
            pass

    def _group_home(self, group_id: str | None, found: Sequence[Engine]) -> Engine:
        """Where a group's first member went, and where the others of one whose engine left go together."""
        least = min(found, key=lambda engine: engine.running)
        if group_id is None:
            return least
        home = self._groups.get(group_id)
        if home is None or home not in found:
            home = self._groups[group_id] = least
            if len(self._groups) > _MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
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
