"""Transactions on the tree of published weights: begin, commit and fail a publish; lag along the lineage.

Every version is a node with a parent of a lower number, from the moment its number is given out; depth counts publishes
of new weights from version 0. A publish of the same weights again (a resume sends those of its checkpoint) adds no
depth: nothing becomes staler by it.
Invariants: a number is given out once, even when its publish fails or the process dies; only committed versions
become current.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rlagent.buffer.database import POLICY, Row, Transaction
from rlagent.errors import ConflictError, NotFoundError
from rlagent.types import PolicyVersion

_COLUMNS: Final = "version, parent, depth, step, published_at, checksum, snapshot"
# Version -> (parent, depth), or None for a version that was never given out.
Lookup = Callable[[int], tuple[int | None, int] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """A publish under way: its number is taken, its weights are not yet stamped."""

    publish_id: str
    version: int


def lag(version: int, current: int, lookup: Lookup) -> int | None:
    """depth(current) - depth(last common ancestor of version and current); None for an unknown version."""
    found, here = lookup(version), lookup(current)
    assert here is not None, "the current version is in the tree"
    if found is None:
        return None
    current_depth = here[1]
    while version != current:
        if version > current:
            version, found = _up(found, lookup)
        else:
            current, here = _up(here, lookup)
    return current_depth - here[1]


def _up(node: tuple[int | None, int], lookup: Lookup) -> tuple[int, tuple[int | None, int]]:
    parent = node[0]
    assert parent is not None, "all versions descend from version 0"
    above = lookup(parent)
    assert above is not None
    return parent, above


def in_lineage(version: int, current: int, lookup: Lookup) -> bool:
    """Whether current descends from version, or is it."""
    found, here = lookup(version), lookup(current)
    if found is None or here is None:
        return False
    while current > version:
        current, here = _up(here, lookup)
    return current == version


def lookup_in(tx: Transaction) -> Lookup:
    """The tree as this transaction sees it, each node read once."""
    seen: dict[int, tuple[int | None, int] | None] = {}

    def lookup(version: int) -> tuple[int | None, int] | None:
        if version not in seen:
            row = tx.row("SELECT parent, depth FROM policies WHERE version = ?", version)
            seen[version] = None if row is None else (row[0], row[1])
        return seen[version]

    return lookup


def ensure_initial(tx: Transaction, *, checksum: str, snapshot: str, now: float) -> None:
    """Version 0, if the database is new."""
    if current(tx) is None:
        tx.run(
            "INSERT INTO policies (version, parent, depth, step, publish_id, state, published_at, checksum, snapshot) "
            "VALUES (0, NULL, 0, 0, 'initial', 'committed', ?, ?, ?)",
            now,
            checksum,
            snapshot,
        )
        set_current(tx, 0)


def begin(
    tx: Transaction, *, publish_id: str, step: int, parent: int, now: float, replica: str, same_weights: bool = False
) -> Publish:
    """Give out the next version number. ConflictError while another publish is under way."""
    above = tx.row("SELECT depth FROM policies WHERE version = ? AND state = 'committed'", parent)
    if above is None:
        raise NotFoundError(
            f"version {parent} was never published; a publish must name the published version it was trained from"
        )
    open_publish = tx.row("SELECT publish_id, version FROM policies WHERE state = 'begun'")
    if open_publish is not None:
        raise ConflictError(
            f"publish {open_publish[0]} of version {open_publish[1]} is under way; commit it or fail it first"
        )
    newest = tx.row("SELECT MAX(version) FROM policies")
    assert newest is not None
    version = newest[0] + 1
    tx.run(
        "INSERT INTO policies (version, parent, depth, step, publish_id, state, replica, published_at) "
        "VALUES (?, ?, ?, ?, ?, 'begun', ?, ?)",
        version,
        parent,
        above[0] + (not same_weights),
        step,
        publish_id,
        replica,
        now,
    )
    tx.notify(POLICY)
    return Publish(publish_id=publish_id, version=version)


def commit(
    tx: Transaction, publish_id: str, *, checksum: str, snapshot: str | None, now: float, replica: str
) -> PolicyVersion:
    """Stamp the version and make it current. The same commit again gives the same answer."""
    version, state, reason = _publish(tx, publish_id, replica)
    if state == "failed":
        raise ConflictError(f"publish {publish_id} of version {version} has failed ({reason}); begin a new one")
    if state == "begun":
        tx.run(
            "UPDATE policies SET state = 'committed', checksum = ?, snapshot = ?, published_at = ? WHERE version = ?",
            checksum,
            snapshot,
            now,
            version,
        )
        set_current(tx, version)
    return get(tx, version)


def fail(tx: Transaction, publish_id: str, reason: str, *, replica: str) -> None:
    """Give a publish up. Its number stays taken. Nothing happens to one that failed before."""
    version, state, _ = _publish(tx, publish_id, replica)
    if state == "committed":
        raise ConflictError(f"publish {publish_id} of version {version} is committed and cannot fail any more")
    if state == "begun":
        tx.run("UPDATE policies SET state = 'failed', reason = ? WHERE version = ?", reason, version)
        tx.notify(POLICY)


def fail_all(tx: Transaction, reason: str) -> None:
    """Give up what is under way."""
    if tx.run("UPDATE policies SET state = 'failed', reason = ? WHERE state = 'begun'", reason):
        tx.notify(POLICY)


def current(tx: Transaction) -> PolicyVersion | None:
    """The current version; None in a new database."""
    row = tx.row("SELECT value FROM meta WHERE name = 'version'")
    return None if row is None else get(tx, int(row[0]))


def set_current(tx: Transaction, version: int) -> None:
    """Make a committed version the current one."""
    tx.run(
        "INSERT INTO meta VALUES ('version', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", str(version)
    )
    tx.notify(POLICY)


def get(tx: Transaction, version: int) -> PolicyVersion:
    """A committed version; NotFoundError if there is none of this number."""
    row = tx.row(f"SELECT {_COLUMNS} FROM policies WHERE version = ? AND state = 'committed'", version)
    if row is None:
        raise NotFoundError(f"version {version} was never published by this run's data buffer")
    return _decode(row)


def is_published(tx: Transaction, version: int) -> bool:
    """Whether a version of this number was committed."""
    return tx.row("SELECT 1 FROM policies WHERE version = ? AND state = 'committed'", version) is not None


def newest_snapshot(tx: Transaction) -> PolicyVersion | None:
    """The nearest ancestor of the current version (or itself) whose weights are on disk."""
    found = current(tx)
    while found is not None and found.snapshot is None:
        found = None if found.parent is None else get(tx, found.parent)
    return found


def publishing(tx: Transaction) -> int | None:
    """The version that a replica is publishing now."""
    found = tx.row("SELECT version FROM policies WHERE state = 'begun'")
    return None if found is None else found[0]


def _publish(tx: Transaction, publish_id: str, replica: str) -> Row:
    """Version, state and reason of a publish; one under way is for the replica that paused its engines."""
    found = tx.row("SELECT version, state, reason, replica FROM policies WHERE publish_id = ?", publish_id)
    if found is None:
        raise NotFoundError(f"there is no publish {publish_id!r}")
    if found[1] == "begun" and found[3] != replica:
        raise ConflictError(
            f"publish {publish_id} of version {found[0]} was begun at another replica of the router; end it there"
        )
    return found[:3]


def _decode(row: Row) -> PolicyVersion:
    return PolicyVersion(
        version=row[0], parent=row[1], depth=row[2], step=row[3], published_at=row[4], checksum=row[5], snapshot=row[6]
    )
