"""A pool: bounds how many sandboxes are open, keeps some warm, and hands out forks of prepared filesystems.

Invariant: a sandbox is handed out once and closed after; nothing an episode leaves in its files meets the next one. What is shared is
what was prepared: one snapshot a key (a task at a revision, say), made by the first who asks for it, forked by all.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Backend, Sandbox, Snapshot

Prepare = Callable[[Sandbox], Awaitable[None]]


class SandboxPool:
    """Sandboxes of an open backend. An async context manager; `close` closes the warm ones and deletes what was prepared.

    max_open: sandboxes open at once, warm ones and those that prepare counted; who asks beyond waits. num_warm: empty ones kept ready.
    """

    def __init__(self, backend: Backend, *, max_open: int, num_warm: int = 0) -> None:
        if not 0 <= num_warm < max_open:
            raise SandboxError(f"num_warm is {num_warm} and max_open {max_open}; give 0 <= num_warm < max_open")
        self._backend = backend
        self._room = asyncio.Semaphore(max_open)
        self._num_warm = num_warm
        self._warm: deque[Sandbox] = deque()
        self._warming: asyncio.Task[None] | None = None
        self._prepared: dict[Hashable, asyncio.Task[Snapshot]] = {}
        self._closed = False

    @property
    def num_warm(self) -> int:
        """Sandboxes that wait ready."""
        return len(self._warm)

    async def __aenter__(self) -> Self:
        await self._fill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def sandbox(self, key: Hashable = None, prepare: Prepare | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox for one episode: empty, or a fork of what `prepare` made for `key` the first time it was asked for.

        SandboxError when preparing fails; the next who asks tries again.
        """
        if self._closed:
            raise SandboxError("the pool is closed")
        snapshot = None if prepare is None else await self._snapshot(key, prepare)
        taken = await self._take(snapshot)
        try:
            yield taken
        finally:
            await asyncio.shield(self._give_back(taken))

    async def forget(self, key: Hashable) -> None:
        """Delete what was prepared for a key, once no fork of it is open."""
        task = self._prepared.pop(key, None)
        if task is not None:
            await self._backend.delete(await task)

    async def close(self) -> None:
        """Close what is warm, delete what was prepared. Sandboxes handed out stay their holders' until given back."""
        self._closed = True
        if self._warming is not None:
            await asyncio.wait([self._warming])
        while self._warm:
            await self._give_back(self._warm.popleft())
        for key, task in list(self._prepared.items()):
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                await self.forget(key)

    async def _snapshot(self, key: Hashable, prepare: Prepare) -> Snapshot:
        task = self._prepared.get(key)
        if task is None:
            task = self._prepared[key] = asyncio.create_task(self._prepare(prepare))
        try:
            return await asyncio.shield(task)  # others wait for it too
        except BaseException:
            if task.done() and self._prepared.get(key) is task and (task.cancelled() or task.exception()):
                del self._prepared[key]
            raise

    async def _prepare(self, prepare: Prepare) -> Snapshot:
        base = await self._take(None)
        try:
            await prepare(base)
            return await base.snapshot()
        finally:
            await self._give_back(base)

    async def _take(self, snapshot: Snapshot | None) -> Sandbox:
        if self._warm and (snapshot is None or self._room.locked()):
            found = self._warm.popleft()
            if snapshot is None:
                self._refill()
                return found
            await self._give_back(found)  # a fork is wanted and all the room is taken by warm ones
        await self._room.acquire()
        try:
            return await self._backend.open(snapshot)
        except BaseException:
            self._room.release()
            raise

    async def _give_back(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.close()
        finally:
            self._room.release()
        self._refill()

    def _refill(self) -> None:
        if self._num_warm and not self._closed and (self._warming is None or self._warming.done()):
            self._warming = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        while len(self._warm) < self._num_warm and not self._room.locked() and not self._closed:
            await self._room.acquire()
            try:
                self._warm.append(await self._backend.open())
            except BaseException:
                self._room.release()
                raise
