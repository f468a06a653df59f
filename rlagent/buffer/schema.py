"""The tables of the data buffer, in data-flow order. SQL that SQLite and PostgreSQL both read.

session -> calls (the bytes of their images aside, each content once) -> (seal) -> unit (a group that is handed out) ->
lease -> consumption; policies are the tree of published weights; replicas are the processes that share the database.

Invariants: `units.position` is the order of completion and is never changed; `units.batch` is the number of the
consumption that took the unit first, and is what keeps a redelivered batch together; `consumptions` is a tree
(`parent`), whose head is in `meta`; `policies.version` and `consumptions.number` are never reused, because their rows
are never deleted; `sessions.epoch` counts who took the session over, and only the last of them may extend it.
"""

from __future__ import annotations

import re
from typing import Final

from rlagent.buffer.database import Connection, Database
from rlagent.errors import StoreError

SCHEMA_VERSION: Final = 4

TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS sessions (
        session_id TEXT PRIMARY KEY,
        key_hash TEXT NOT NULL UNIQUE,
        task_id TEXT,
        group_id TEXT,
        group_size INTEGER,
        train INTEGER NOT NULL,
        sampling TEXT NOT NULL,
        metadata TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL,
        deadline_at DOUBLE PRECISION,
        expires_at DOUBLE PRECISION,
        state TEXT NOT NULL,
        status TEXT NOT NULL,
        reward TEXT,
        sealed_at DOUBLE PRECISION,
        finish TEXT,
        member TEXT NOT NULL DEFAULT 'running',
        unit_id TEXT,
        versions TEXT NOT NULL DEFAULT '[]',
        epoch INTEGER NOT NULL DEFAULT 0
    )""",
    "CREATE INDEX IF NOT EXISTS sessions_by_state ON sessions (state, expires_at)",
    "CREATE INDEX IF NOT EXISTS sessions_by_unit ON sessions (unit_id, member)",
    "CREATE INDEX IF NOT EXISTS sessions_by_member ON sessions (member, sealed_at)",
    "CREATE INDEX IF NOT EXISTS sessions_by_creation ON sessions (created_at)",
    """CREATE TABLE IF NOT EXISTS calls (
        call_id TEXT PRIMARY KEY,
        session_id TEXT NOT NULL REFERENCES sessions (session_id),
        position INTEGER NOT NULL,
        parent_id TEXT,
        parent_choice INTEGER,
        prompt_digest TEXT NOT NULL,
        delivery TEXT NOT NULL,
        head TEXT NOT NULL,
        arrays BYTEA NOT NULL,
        experts BYTEA NOT NULL,
        messages BYTEA NOT NULL,
        served BYTEA NOT NULL,
        client BYTEA NOT NULL,
        UNIQUE (session_id, position)
    )""",
    "CREATE TABLE IF NOT EXISTS images (digest TEXT PRIMARY KEY, data BYTEA NOT NULL)",
    """CREATE TABLE IF NOT EXISTS units (
        unit_id TEXT PRIMARY KEY,
        task_id TEXT,
        size INTEGER NOT NULL,
        deadline_at DOUBLE PRECISION,
        ungrouped INTEGER NOT NULL,
        state TEXT NOT NULL,
        reason TEXT NOT NULL DEFAULT '',
        position INTEGER,
        num_missing INTEGER NOT NULL DEFAULT 0,
        lease_id TEXT,
        batch INTEGER
    )""",
    "CREATE INDEX IF NOT EXISTS units_by_state ON units (state, batch, position)",
    "CREATE INDEX IF NOT EXISTS units_by_position ON units (position)",
    "CREATE INDEX IF NOT EXISTS units_by_lease ON units (lease_id)",
    """CREATE TABLE IF NOT EXISTS leases (
        lease_id TEXT PRIMARY KEY,
        step INTEGER NOT NULL,
        expires_at DOUBLE PRECISION NOT NULL,
        state TEXT NOT NULL,
        batch INTEGER,
        consumption INTEGER
    )""",
    "CREATE INDEX IF NOT EXISTS leases_by_state ON leases (state, expires_at)",
    """CREATE TABLE IF NOT EXISTS consumptions (
        number INTEGER PRIMARY KEY,
        parent INTEGER NOT NULL,
        batch INTEGER NOT NULL,
        lease_id TEXT,
        step INTEGER NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS policies (
        version INTEGER PRIMARY KEY,
        parent INTEGER,
        depth INTEGER NOT NULL,
        step INTEGER NOT NULL,
        publish_id TEXT NOT NULL UNIQUE,
        state TEXT NOT NULL,
        reason TEXT NOT NULL DEFAULT '',
        replica TEXT NOT NULL DEFAULT '',
        published_at DOUBLE PRECISION NOT NULL,
        checksum TEXT NOT NULL DEFAULT '',
        snapshot TEXT
    )""",
    "CREATE TABLE IF NOT EXISTS replicas (replica TEXT PRIMARY KEY, seen_at DOUBLE PRECISION NOT NULL)",
    """CREATE TABLE IF NOT EXISTS ledger (
        event TEXT NOT NULL,
        reason TEXT NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (event, reason)
    )""",
)


def prepare(connection: Connection, database: Database) -> None:
    """Make the tables where they are missing. StoreError if those that are there have another layout."""
    try:
        connection.begin_write(exclusive=True)
        for statement in TABLES:
            connection.execute(re.sub(r"\b[A-Z]+\b", lambda word: connection.types.get(word[0], word[0]), statement))
        connection.execute("INSERT INTO meta VALUES ('schema', ?) ON CONFLICT DO NOTHING", (str(SCHEMA_VERSION),))
        found = connection.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()[0]
        connection.commit()
    except database.error as error:
        raise StoreError(f"cannot prepare the data buffer {database.name}: {error}") from error
    if found != str(SCHEMA_VERSION):
        raise StoreError(
            f"the data buffer {database.name} has schema {found}, this rlagent reads {SCHEMA_VERSION}; use a new run "
            "directory, or a new database"
        )
