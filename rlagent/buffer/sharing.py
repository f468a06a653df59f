"""This process among the replicas that share a database: it says that it lives, hears the others, and holds the engines.

In the flow: part of the Buffer. For a SQLite file, which nobody shares, it does nothing but bury the process before.
Invariant: what a replica remembers of the policy is read again, through the writer's queue, after each notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol

from rlagent.buffer import policies, replicas
from rlagent.buffer.database import ENGINES, EVERYTHING, POLICY, Transaction
from rlagent.buffer.store import Store
from rlagent.errors import StoreError

_log: Final = logging.getLogger(__name__)
# Between two tries to hold engines, when no notice comes: their holder may have died.
_RETRY_S: Final = 1.0


class WritePolicy(Protocol):
    """A write after which the copy of the policy in memory is as durable."""

    def __call__(self, work: Callable[[Transaction], Any], *, exclusive: bool = True) -> Awaitable[Any]:
        """Run it."""


class Sharing:
    """Made and ended by the Buffer. `write` also reads the policy again; `heard` gets each notice of another replica."""

    def __init__(self, store: Store, write: WritePolicy, heard: Callable[[str], None]) -> None:
        self._store = store
        self._write = write
        self._heard = heard
        self._replica = store.database.replica
        self._shared = store.database.shared
        self._tasks: list[asyncio.Task[None]] = []
        self._dirty = asyncio.Event()  # the policy changed elsewhere
        self._moved = asyncio.Event()  # and was read again
        self._free = asyncio.Event()
        self._must_free = False
        self._last_beat = self._beating_since = float("-inf")
        self._buried = False

    async def join(self, now: float) -> None:
        """Say that this process lives, and listen to the others."""

        def work(tx: Transaction) -> None:
            if not self._shared:
                replicas.bury_all(tx)
            replicas.seen(tx, self._replica, now)

        await self._write(work)
        self._last_beat = self._beating_since = now
        listener = self._store.database.listener(self._hear)
        if listener is not None:
            self._tasks = [asyncio.create_task(listener.run()), asyncio.create_task(self._keep_policy())]

    async def leave(self) -> None:
        """Say good-bye. If the database is down the others find out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        with suppress(StoreError):
            await self._store.write(lambda tx: replicas.leave(tx, self._replica))

    def beat(self, tx: Transaction, now: float) -> None:
        """Part of a transaction that runs every second or so. Who has just come judges nobody: others could not beat either."""
        if not self._shared:
            return
        replicas.seen(tx, self._replica, now)
        if self._must_free:
            replicas.free(tx, self._replica)
        self._buried = now - self._beating_since >= replicas.DEAD_S and replicas.bury(tx, now)

    def beaten(self, now: float) -> None:
        """The transaction is durable."""
        if not self._shared:
            return
        if now - self._last_beat > replicas.DEAD_S / 2:
            self._beating_since = now
        self._last_beat = now
        self._must_free = False
        if self._buried:
            self._hear(POLICY)

    @asynccontextmanager
    async def engines_held(self) -> AsyncIterator[int | None]:
        """No other replica touches engines meanwhile; the version that is being published, by any."""
        if not self._shared:
            yield None
            return
        self._must_free = False
        while True:
            self._free.clear()
            held, publishing = await self._write(lambda tx: (replicas.hold(tx, self._replica), policies.publishing(tx)))
            if held:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._free.wait()
        try:
            yield publishing
        finally:
            try:
                await self._store.write(lambda tx: replicas.free(tx, self._replica))
            except StoreError as error:
                self._must_free = True
                _log.warning("the engines are let go of later: %s", error)

    async def policy_moved(self) -> None:
        """Wait for a change of the policy by another replica, or in place of one that died. For one waiter."""
        await self._moved.wait()
        self._moved.clear()

    def _hear(self, notice: str) -> None:
        if notice in (POLICY, EVERYTHING):
            self._dirty.set()
        if notice in (ENGINES, EVERYTHING):
            self._free.set()
        self._heard(notice)

    async def _keep_policy(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._write(lambda _tx: None, exclusive=False)
            except StoreError as error:
                _log.warning("the policy is read again later: %s", error)
                await asyncio.sleep(_RETRY_S)
                self._dirty.set()
            else:
                self._moved.set()
