"""The one way to the data buffer's database: group commit on one connection, reads on others.

One writer thread owns the writing connection. It drains its queue, runs every pending transaction inside one of the
database (once one was refused, all again, each in a savepoint, so that it harms no neighbour), commits once, and only then
resolves the callers, all in one callback of the event loop: group commit without a timer. What nobody waits for
(`write_later`) joins the next commit. Reads go to other connections, on threads of their own, and see all that was asked
for before.

Invariant: a `write` that returned is durable; a `write` that raised left nothing, but for StoreUncertainError: the
database went away during the commit. What was lost before the commit is run again, on a new connection, so a
transaction is a function of what it reads. When the disk is full or the database is down every caller of that commit
gets StoreError, and the next commit is tried afresh.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rlagent.buffer.database import Connection, Database, Transaction
from rlagent.errors import StoreError, StoreUncertainError

T = TypeVar("T")

# Transactions waiting for the disk. Beyond it callers are refused rather than kept waiting without end.
MAX_PENDING: Final = 65_536
# Transactions in one commit: bounds how long the first caller of a burst waits for the last one.
MAX_GROUP: Final = 512
# How long what nobody waits for may wait for a commit of others.
LATER_S: Final = 0.05
# How often a commit is tried that a deadlock or a lost connection undid.
MAX_TRIES: Final = 10


@dataclass(slots=True)
class _Pending:
    work: Callable[[Transaction], object]
    exclusive: bool
    future: asyncio.Future[Any] | None  # None: nobody waits for it
    result: object = None
    error: Exception | None = None


class _Refused(Exception):
    """One of the transactions of a commit failed by itself: they are run again so that it harms no other."""


class Store:
    """A database with one writer thread and its reader threads. Made by `open`, ended by `close`."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._writer: Connection | None = None
        self._readers: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._later: deque[_Pending] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="buffer-writer", daemon=True)
        self._thread.start()
        self._read_pool = ThreadPoolExecutor(database.num_readers, thread_name_prefix="buffer-reader")

    @classmethod
    async def open(cls, database: Callable[[], Database]) -> Store:
        """Open or create the database, off the event loop; StoreError as the database's class says."""
        return cls(await asyncio.to_thread(database))

    async def close(self) -> None:
        """Commit what is pending, then close. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._stop)

    async def write(self, work: Callable[[Transaction], T], *, exclusive: bool = True) -> T:
        """Run `work` in a transaction of its own and return its result once it is durable.

        exclusive: it touches what all sessions share, and so runs while no other such runs, in any process.
        """
        return await self.write_soon(work, exclusive=exclusive)

    def write_soon(self, work: Callable[[Transaction], T], *, exclusive: bool = True) -> asyncio.Future[T]:
        """Queue `work` for the next commit. It is done also where the future is cancelled."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(_Pending(work, exclusive, future))
        return future

    def _enqueue(self, pending: _Pending) -> None:
        self._check_open()
        if self._queue.qsize() >= MAX_PENDING:
            raise StoreError(f"{MAX_PENDING} changes wait for the disk of {self.database.name}; send fewer at a time")
        self._queue.put(pending)

    def write_later(self, work: Callable[[Transaction], object]) -> None:
        """Let `work` join the next commit, which comes within LATER_S. Nobody learns whether it was refused."""
        self._check_open()
        if len(self._later) >= MAX_PENDING:
            raise StoreError(f"{MAX_PENDING} changes wait for the disk of {self.database.name}; send fewer at a time")
        self._later.append(_Pending(work, False, None))
        if self._timer is None:
            self._timer = self._loop.call_later(LATER_S, self._hurry)

    def _hurry(self) -> None:
        """A commit for what was to come later."""
        self._timer = None
        if self._later:
            self._enqueue(_Pending(lambda _tx: None, False, None))

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on a reading connection, in one snapshot."""
        self._check_open()
        if self._later:
            await self.write(lambda _tx: None, exclusive=False)
        return await self._loop.run_in_executor(self._read_pool, self._read, work)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the data buffer {self.database.name} is closed")

    def _read(self, work: Callable[[Transaction], T]) -> T:
        for _ in range(MAX_TRIES):
            try:
                connection = self._readers.get_nowait()
            except queue.Empty:
                connection = self.database.connect()
            try:
                return _read_on(connection, work)
            except self.database.error as error:
                if not connection.lost:
                    raise StoreError(f"cannot read the data buffer {self.database.name}: {error}") from error
            finally:
                self._put_back(connection)
        raise StoreError(f"the data buffer {self.database.name} goes away at every read; {self.database.remedy}")

    def _put_back(self, connection: Connection) -> None:
        if connection.lost:
            connection.close()
        else:
            self._readers.put(connection)

    def _run(self) -> None:
        stop = False
        while not stop:
            arrived = [self._queue.get()]
            arrived += [self._queue.get() for _ in range(min(self._queue.qsize(), MAX_GROUP - 1))]
            group = [self._later.popleft() for _ in range(min(len(self._later), MAX_GROUP))]
            group += [pending for pending in arrived if pending is not None]
            stop = arrived[-1] is None  # nothing is queued behind the end
            if stop:
                group += self._later
            if group:
                self._commit(group)
                with suppress(RuntimeError):  # the loop has ended, and all who waited with it
                    self._loop.call_soon_threadsafe(_resolve, group)

    def _commit(self, group: Sequence[_Pending]) -> None:
        """One commit of all, tried again while that can help and cannot do anything twice."""
        step = self._hopeful_step
        tries, deadlocked = 0, False
        while True:
            tries += 1
            committing = False
            try:
                writer = self._writer = self._writer or self.database.connect()
                # What a deadlock undid is run again alone, so that two commits do not undo one another for ever.
                writer.begin_write(exclusive=deadlocked or any(pending.exclusive for pending in group))
                for pending in group:
                    step(writer, pending)
                committing = True
                writer.commit()
                return
            except _Refused:
                step = self._step
                self._undo(writer)
            except StoreError as error:  # cannot connect
                _fail(group, error)
                return
            except self.database.error as error:
                deadlocked = deadlocked or writer.retryable(error)
                again = writer.retryable(error) or (writer.lost and not committing)
                failure = self._failure(error, uncertain=writer.lost and committing)
                self._undo(writer)
                if not again or tries >= MAX_TRIES:
                    _fail(group, failure)
                    return

    def _step(self, writer: Connection, pending: _Pending) -> None:
        """One transaction in its savepoint. Raises the database's error when the whole commit is lost."""
        pending.result = pending.error = None
        writer.execute("SAVEPOINT one")
        try:
            pending.result = pending.work(Transaction(writer))
        except Exception as error:  # the caller's, whatever it is: it is handed to the caller's future
            pending.error = error
            if isinstance(error, self.database.error):
                pending.error = None
                # A full disk, an I/O error or a lost connection undo everything; a deadlock is run again as a whole.
                if not writer.in_transaction or writer.retryable(error):
                    raise
                pending.error = StoreError(f"the data buffer {self.database.name} refused a change: {error}")
                pending.error.__cause__ = error
            writer.execute("ROLLBACK TO one")
        writer.execute("RELEASE one")

    def _hopeful_step(self, writer: Connection, pending: _Pending) -> None:
        """One transaction without a savepoint, to save two statements. Raises _Refused if it needs one."""
        pending.error = None
        try:
            pending.result = pending.work(Transaction(writer))
        except Exception as error:  # whatever it is: all are run again, each in its savepoint
            if isinstance(error, self.database.error) and (not writer.in_transaction or writer.retryable(error)):
                raise
            raise _Refused from error

    def _failure(self, error: Exception, *, uncertain: bool) -> StoreError:
        kind = StoreUncertainError if uncertain else StoreError
        what = "went away during a commit, which may be stored or not" if uncertain else "could not store a change"
        failure = kind(f"the data buffer {self.database.name} {what}: {error}; {self.database.remedy}")
        failure.__cause__ = error
        return failure

    def _undo(self, writer: Connection) -> None:
        try:
            writer.rollback()
        except self.database.error:
            assert writer.lost, "a rollback fails only where the connection is gone"
        if writer.lost:
            writer.close()
            self._writer = None

    def _stop(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._read_pool.shutdown()
        while not self._readers.empty():
            self._readers.get().close()
        if self._writer is not None:
            self._writer.close()
        self.database.close()


def _read_on(connection: Connection, work: Callable[[Transaction], T]) -> T:
    connection.begin_read()
    try:
        return work(Transaction(connection))
    finally:
        if not connection.lost:
            connection.rollback()


def _fail(group: Sequence[_Pending], failure: StoreError) -> None:
    for pending in group:
        pending.error = pending.error or failure


def _resolve(group: Sequence[_Pending]) -> None:
    for pending in group:
        if pending.future is None or pending.future.done():
            continue
        if pending.error is not None:
            pending.future.set_exception(pending.error)
        else:
            pending.future.set_result(pending.result)
