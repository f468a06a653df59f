"""The data buffer in PostgreSQL, for several replicas of the router that share it. Imported only where it is used.

Everything in one schema of one database: the current one of the connection (`?options=-csearch_path%3Drun1` in the URL
names another), so that several runs fit into one database.

Invariants: an exclusive transaction holds the schema's advisory lock from its first statement to its end, and reads
what was committed before (READ COMMITTED); a commit returns when it is on the server's disk, whatever the server's
default for synchronous_commit is. A replica that hangs inside a transaction is cut off by the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import DeadlockDetected, InFailedSqlTransaction, SerializationFailure
from psycopg.pq import TransactionStatus

from rlagent.buffer.database import EVERYTHING, Connection, Cursor, Database, Value
from rlagent.buffer.schema import prepare
from rlagent.errors import StoreError

_log: Final = logging.getLogger(__name__)

# How long a connection may take to be made, in whole seconds: calls are answered 503 meanwhile.
CONNECT_TIMEOUT_S: Final = 5
# Between two tries of the listener to connect again.
RECONNECT_PAUSE_S: Final = 0.5
# The first half of the advisory lock's key; the second is the schema's hash. Any fixed number that is ours.
_LOCK_CLASS: Final = 0x726C6167
# No wait for a lock, and no transaction that waits for its replica, is longer than this.
_SETTINGS: Final = """SELECT
    set_config('lock_timeout', '30s', false),
    set_config('idle_in_transaction_session_timeout', '30s', false),
    set_config('jit', 'off', false),
    set_config('synchronous_commit', CASE current_setting('synchronous_commit')
        WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false)"""
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"
_LOCK: Final = f"SELECT pg_advisory_xact_lock({_LOCK_CLASS}, hashtext(current_schema()))"


class PostgresConnection(Connection):
    """One connection to the server."""

    # Text is ordered by its code points, as SQLite does.
    types: ClassVar[Mapping[str, str]] = {"TEXT": 'TEXT COLLATE "C"', "INTEGER": "BIGINT"}
    for_update: ClassVar[str] = " FOR UPDATE"

    def __init__(self, raw: psycopg.Connection[Any], replica: str) -> None:
        self._raw = raw
        self._replica = replica
        self._notices: set[str] = set()
        raw.execute(_SETTINGS)

    def execute(self, sql: str, values: Sequence[Value] = ()) -> Cursor:
        """Run one statement; blobs and numbers travel in binary."""
        return self._raw.cursor(binary=True).execute(sql.replace("?", "%s").encode(), values or None)

    def begin_write(self, *, exclusive: bool) -> None:
        """Exclusive: behind the schema's advisory lock."""
        self._notices.clear()
        self._raw.execute(f"{_BEGIN}; {_LOCK}".encode() if exclusive else _BEGIN)

    def begin_read(self) -> None:
        """One snapshot for all reads."""
        self._raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def commit(self) -> None:
        """Send the notices with the commit. A transaction that the server had given up is an error, not a success."""
        if self._notices:
            self._raw.execute(
                "SELECT pg_notify('rlagent_' || current_schema(), notice) FROM unnest(%s::text[]) AS notice",
                [[f"{self._replica} {notice}" for notice in sorted(self._notices)]],
            )
        done = self._raw.execute("COMMIT")
        if done.statusmessage != "COMMIT":
            raise InFailedSqlTransaction(f"COMMIT was answered by {done.statusmessage}")

    @property
    def in_transaction(self) -> bool:
        """Also one that an error has spoilt."""
        return not self.lost and self._raw.info.transaction_status != TransactionStatus.IDLE

    @property
    def lost(self) -> bool:
        """Whether the server went away, or ended this connection."""
        return self._raw.closed

    def retryable(self, error: Exception) -> bool:
        """Deadlocks between replicas (a session that two of them touch)."""
        return isinstance(error, DeadlockDetected | SerializationFailure)

    def notify(self, notice: str) -> None:
        """Sent once with the commit, however often it was said; superfluous where its transaction was undone."""
        self._notices.add(notice)

    def close(self) -> None:
        """Tell the server good-bye, if it is there."""
        self._raw.close()


class PostgresDatabase(Database):
    """A schema of a PostgreSQL database. StoreError if the URL is wrong, the server down, or the tables of another layout."""

    error = psycopg.Error
    remedy = "start the server, or free its disk; rlagent connects again by itself"
    shared: ClassVar[bool] = True
    num_readers: ClassVar[int] = 4

    def __init__(self, url: str) -> None:
        super().__init__()
        try:
            parts = conninfo_to_dict(url)
        except psycopg.Error as error:
            raise StoreError(
                f"buffer.url is no PostgreSQL URL: {error}; write postgresql://user@host:5432/db"
            ) from None
        self.name = (
            f"{parts.get('dbname', '(default)')!r} at {parts.get('host', '(default)')}:{parts.get('port', 5432)}"
        )
        self.conninfo = make_conninfo(
            url,
            connect_timeout=parts.get("connect_timeout", CONNECT_TIMEOUT_S),
            application_name=parts.get("application_name", "rlagent"),
        )
        connection = self.connect()
        try:
            if connection.execute("SHOW fsync").fetchone()[0] == "off":
                _log.warning(
                    "PostgreSQL %s runs with fsync=off: a crash of its machine loses answered calls", self.name
                )
            prepare(connection, self)
        finally:
            connection.close()

    def connect(self) -> PostgresConnection:
        """A connection to the server."""
        try:
            return PostgresConnection(psycopg.connect(self.conninfo, autocommit=True), self.replica)
        except psycopg.Error as error:
            raise StoreError(
                f"cannot reach the data buffer, PostgreSQL database {self.name}: {str(error).strip()}; "
                "start the server or mend buffer.url"
            ) from error

    def listener(self, heard: Callable[[str], None]) -> PostgresListener:
        """Notices of the other replicas, through LISTEN."""
        return PostgresListener(self, heard)

    def close(self) -> None:
        """Nothing is held beside the connections."""


class PostgresListener:
    """A connection of its own that waits for notices, as an asyncio task."""

    def __init__(self, database: PostgresDatabase, heard: Callable[[str], None]) -> None:
        self._database = database
        self._heard = heard

    async def run(self) -> None:
        """Until cancelled. What was said while there was no connection is not known, so all may have changed."""
        while True:
            try:
                await self._listen()
            except psycopg.Error as error:
                _log.warning("no notices from PostgreSQL %s: %s", self._database.name, str(error).strip())
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _listen(self) -> None:
        connection = await psycopg.AsyncConnection.connect(self._database.conninfo, autocommit=True)
        async with connection:
            found = await (await connection.execute("SELECT current_schema()")).fetchone()
            assert found is not None
            await connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(f"rlagent_{found[0]}")))
            self._heard(EVERYTHING)
            async for notice in connection.notifies():
                replica, _, words = notice.payload.partition(" ")
                if replica != self._database.replica:
                    self._heard(words)
