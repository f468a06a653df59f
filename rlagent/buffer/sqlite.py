"""The data buffer in a SQLite file: WAL, synchronous=FULL, one process at a time.

Invariant: the lock on the file beside the database ends with the process, however it ends, so nobody else writes.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rlagent.buffer.database import Connection, Cursor, Database, Value
from rlagent.buffer.schema import prepare
from rlagent.errors import StoreError


class SqliteConnection(Connection):
    """One connection to the file."""

    def __init__(self, path: Path) -> None:
        self.raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
        self.raw.execute("PRAGMA journal_mode=WAL")
        self.raw.execute("PRAGMA synchronous=FULL")
        self.raw.execute("PRAGMA foreign_keys=ON")

    def execute(self, sql: str, values: Sequence[Value] = ()) -> Cursor:
        """Run one statement."""
        return self.raw.execute(sql, values)

    def begin_write(self, *, exclusive: bool) -> None:
        """SQLite has one writer at a time in any case."""
        del exclusive
        self.raw.execute("BEGIN IMMEDIATE")

    def begin_read(self) -> None:
        """All reads of a SQLite transaction see one state."""
        self.raw.execute("BEGIN")

    def commit(self) -> None:
        """Returns when the log is on disk."""
        self.raw.execute("COMMIT")

    @property
    def in_transaction(self) -> bool:
        """False too after a full disk or an I/O error, which undo everything."""
        return self.raw.in_transaction

    def notify(self, notice: str) -> None:
        """Nobody else has the file open."""

    def close(self) -> None:
        """Close the file."""
        self.raw.close()


class SqliteDatabase(Database):
    """A SQLite file, locked for this process. StoreError if it is in use, of another schema, or not writable."""

    error = sqlite3.Error
    remedy = "free space or fix the disk"
    shared: ClassVar[bool] = False
    num_readers: ClassVar[int] = 1

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.name = str(path)
        self._lock_fd = _lock(path)
        try:
            connection = self.connect()
            try:
                prepare(connection, self)
            finally:
                connection.close()
        except BaseException:
            self.close()
            raise

    def connect(self) -> SqliteConnection:
        """A connection to the file."""
        try:
            return SqliteConnection(self.path)
        except sqlite3.Error as error:
            raise StoreError(f"cannot open the data buffer {self.path}: {error}") from error

    def close(self) -> None:
        """Let others open the file."""
        os.close(self._lock_fd)


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
            f"the data buffer {path} is in use by another process; stop it, choose another buffer.path, or use "
            "buffer.url = 'postgresql://...' for several replicas"
        ) from error
    return descriptor
