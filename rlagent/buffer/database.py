"""What the data buffer needs of a SQL database; sqlite.py and postgres.py give it.

A transaction of the buffer is a function of a `Transaction`: statements that both databases read, with `?` marks, over
the tables of schema.py. Where they differ, the difference has a name here: types, row locks, the lock of what all
sessions share, notices to other replicas, and which failures are worth a second try.

Invariant: two replicas never interleave where it matters. A transaction on one session holds that session's row
(`for_update`); one on what all sessions share (units, leases, policies, the ledger) is `exclusive`: one at a time over
all replicas, taken before any row.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

Row = tuple[Any, ...]
Value = str | int | float | bytes | None

# What another replica did, as a word and, behind a space, the session it did it to.
QUEUE: Final = "queue"  # groups may have become ready
POLICY: Final = "policy"  # the current version, or a publish under way, changed
ENGINES: Final = "engines"  # a replica let go of the engines
SESSION: Final = "session"  # a session was taken over or sealed
EVERYTHING: Final = "everything"  # notices may have been missed


class Cursor(Protocol):
    """The part of a database cursor that transactions read."""

    @property
    def rowcount(self) -> int:
        """How many rows the statement changed."""

    def fetchone(self) -> Any:
        """The next row, or None."""

    def fetchall(self) -> list[Any]:
        """All rows that are left."""


class Connection(ABC):
    """One connection, used by one thread at a time. Statements outside of begin ... commit stand alone."""

    # Types of schema.py that this database knows by another name.
    types: ClassVar[Mapping[str, str]] = {}
    # Appended to a SELECT: keep the rows from changing until the end of this transaction.
    for_update: ClassVar[str] = ""

    @abstractmethod
    def execute(self, sql: str, values: Sequence[Value] = ()) -> Cursor:
        """Run one statement with `?` marks."""

    @abstractmethod
    def begin_write(self, *, exclusive: bool) -> None:
        """Start a transaction that writes; an exclusive one when no other is under way, in any process."""

    @abstractmethod
    def begin_read(self) -> None:
        """Start a transaction in which all reads see one state."""

    @abstractmethod
    def commit(self) -> None:
        """Make the transaction durable."""

    def rollback(self) -> None:
        """Undo the transaction, if there is one."""
        if self.in_transaction:
            self.execute("ROLLBACK")

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether a transaction is open: false too when the database undid it, or went away."""

    @property
    def lost(self) -> bool:
        """Whether the database went away."""
        return False

    def retryable(self, _error: Exception) -> bool:
        """Whether the whole transaction may succeed when it is run again (a deadlock)."""
        return False

    @abstractmethod
    def notify(self, notice: str) -> None:
        """Tell the other replicas, once the transaction is durable."""

    @abstractmethod
    def close(self) -> None:
        """End it."""


class Database(ABC):
    """One database, open for this process. Made by its class, ended by `close`."""

    def __init__(self) -> None:
        # This process among those that share the database.
        self.replica = f"replica-{uuid.uuid4().hex}"

    # For messages: where the data is, without any password.
    name: str
    # What every failure of the database is an instance of.
    error: type[Exception]
    # What a user can do about a change that could not be stored.
    remedy: str
    # Whether other processes may have the same database open.
    shared: ClassVar[bool]
    # Reads that run at the same time.
    num_readers: ClassVar[int]

    @abstractmethod
    def connect(self) -> Connection:
        """A new connection."""

    def listener(self, heard: Callable[[str], None]) -> Listener | None:
        """What passes on the notices of other replicas; None where there are none."""
        del heard
        return None

    @abstractmethod
    def close(self) -> None:
        """Give it back; connections are closed before."""


class Listener(Protocol):
    """Passes on what other replicas say, in the event loop that runs it."""

    async def run(self) -> None:
        """Until cancelled; connects again when the connection is lost, and then says EVERYTHING."""


class Transaction:
    """What a transaction may do: run a statement, read one row, read all rows, tell others."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.for_update = connection.for_update

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

    def notify(self, notice: str) -> None:
        """Tell the other replicas (QUEUE, POLICY, ENGINES, SESSION + " " + id), once this is durable."""
        self._connection.notify(notice)
