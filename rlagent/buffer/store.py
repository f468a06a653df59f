"""The one layer between the data buffer and its SQL database: SQLite in WAL mode, synchronous=FULL.

One writer thread owns the writing connection. It drains its queue, runs every pending transaction inside one SQLite
transaction (each in a savepoint, so that a refused one does not harm its neighbours), commits once, and only then
resolves the callers: group commit without a timer. Reads go to a second connection on a thread of their own.

Invariant: a `write` that returned is on disk; a `write` that raised left nothing. When the disk is full or broken every
caller of that commit gets StoreError, and the next commit is tried afresh.

A transaction is a function of a Transaction (three methods over portable SQL with `?` marks), so that another database
can stand behind the same layer.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from rlagent.buffer.schema import SCHEMA_VERSION, TABLES
from rlagent.errors import StoreError

T = TypeVar("T")
Row = tuple[Any, ...]
Value = str | int | float | bytes | None

# Transactions waiting for the disk. Beyond it callers are refused rather than kept waiting without end.
MAX_PENDING: Final = 65_536
# Transactions in one commit: bounds how long the first caller of a burst waits for the last one.
MAX_GROUP: Final = 512


class Transaction:
    """What a transaction may do: run a statement, read one row, read all rows."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(self, sql: str, *values: Value) -> int:
        """Execute one statement; the number of rows it changed."""
        return self._connection.execute(sql, values).rowcount

    def row(self, sql: str, *values: Value) -> Row | None:
        """The first row, or None."""
        found: Row | None = self._connection.execute(sql, values).fetchone()
        return found

    def rows(self, sql: str, *values: Value) -> list[Row]:
        """All rows."""
        return self._connection.execute(sql, values).fetchall()


@dataclass(slots=True)
class _Pending:
    work: Callable[[Transaction], object]
    future: Future[Any]
    result: object = None
    error: Exception | None = None


class Store:
    """A SQLite file with one writer thread and one reader thread. Made by `open`, ended by `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = _lock(path)
        try:
            self._writer = _connect(path)
            _prepare(self._writer, path)
            self._reader = _connect(path)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._queue: queue.Queue[_Pending | None] = queue.Queue(MAX_PENDING)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="buffer-writer", daemon=True)
        self._thread.start()
        self._read_pool = ThreadPoolExecutor(1, thread_name_prefix="buffer-reader")

    @classmethod
    async def open(cls, path: Path) -> Store:
        """Open or create the database; StoreError if it is in use, of another schema, or not writable."""
        return await asyncio.to_thread(cls, path)

    async def close(self) -> None:
        """Commit what is pending, then close. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._stop)

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction of its own and return its result once it is durable."""
        return await asyncio.wrap_future(self.write_soon(work))

    def write_soon(self, work: Callable[[Transaction], T]) -> Future[T]:
        """Queue `work` for the next commit; the future may be ignored."""
        if self._closed:
            raise StoreError(f"the data buffer {self.path} is closed")
        future: Future[T] = Future()
        try:
            self._queue.put_nowait(_Pending(work, future))
        except queue.Full as error:
            raise StoreError(f"{MAX_PENDING} changes wait for the disk of {self.path}; send fewer at a time") from error
        return future

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on the reading connection, in one snapshot."""
        if self._closed:
            raise StoreError(f"the data buffer {self.path} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._read_pool, self._read, work)

    def _read(self, work: Callable[[Transaction], T]) -> T:
        try:
            self._reader.execute("BEGIN")
            try:
                return work(Transaction(self._reader))
            finally:
                if self._reader.in_transaction:
                    self._reader.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise StoreError(f"cannot read the data buffer {self.path}: {error}") from error

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            group = [first]
            stop = False
            while len(group) < MAX_GROUP:
                try:
                    pending = self._queue.get_nowait()
                except queue.Empty:
                    break
                if pending is None:
                    stop = True
                    break
                group.append(pending)
            self._commit(group)
            _resolve(group)
            if stop:
                return

    def _commit(self, group: Sequence[_Pending]) -> None:
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for pending in group:
                self._step(pending)
            self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            failure = StoreError(
                f"the data buffer {self.path} could not store a change: {error}; free space or fix the disk"
            )
            failure.__cause__ = error
            for pending in group:
                pending.error = pending.error or failure
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")

    def _step(self, pending: _Pending) -> None:
        """One transaction in its savepoint. Raises sqlite3.Error when the whole commit is lost."""
        self._writer.execute("SAVEPOINT one")
        try:
            pending.result = pending.work(Transaction(self._writer))
        except Exception as error:  # the caller's, whatever it is: it is handed to the caller's future
            pending.error = error
            if isinstance(error, sqlite3.Error):
                pending.error = StoreError(f"the data buffer {self.path} refused a change: {error}")
                pending.error.__cause__ = error
                if not self._writer.in_transaction:  # disk full and I/O errors roll everything back
                    raise
            self._writer.execute("ROLLBACK TO one")
        self._writer.execute("RELEASE one")

    def _stop(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._read_pool.shutdown()
        self._reader.close()
        self._writer.close()
        os.close(self._lock_fd)


def _resolve(group: Sequence[_Pending]) -> None:
    for pending in group:
        if not pending.future.set_running_or_notify_cancel():
            continue
        if pending.error is not None:
            pending.future.set_exception(pending.error)
        else:
            pending.future.set_result(pending.result)


def _lock(path: Path) -> int:
    """One process owns a buffer: the lock ends with the process, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreError(f"cannot write the data buffer {path}: {error}; choose another buffer.path") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"the data buffer {path} is in use by another process; stop it or choose another buffer.path"
        ) from error
    return descriptor


def _connect(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
    except sqlite3.Error as error:
        raise StoreError(f"cannot open the data buffer {path}: {error}") from error
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    try:
        connection.execute("BEGIN IMMEDIATE")
        for statement in TABLES:
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('schema', ?) ON CONFLICT DO NOTHING", (str(SCHEMA_VERSION),))
        found = connection.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()[0]
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreError(f"cannot prepare the data buffer {path}: {error}") from error
    if found != str(SCHEMA_VERSION):
        raise StoreError(
            f"the data buffer {path} has schema {found}, this rlagent reads {SCHEMA_VERSION}; use a new run directory"
        )
