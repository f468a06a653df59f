"""Transactions of the learner: lease, consume, release, restore. Consumption is exactly once along a lineage.

Consumptions form a tree: each has a number (given out once, increasing), a parent (the consumption before it), and
the batch it consumed; `head` is where the learner stands, and a checkpoint stores it as its cursor. A batch is named
by the number of the consumption that took it first, and stays together: what is delivered again comes in the same
batches, in the order of those numbers.

Invariant: a unit that was ever consumed is `consumed` or `dropped` if its batch lies on the path from the head to the
root, and otherwise is ready (or leased) for redelivery, before anything new. A redelivered batch whose units all
became too old takes a number too, so that a later restore knows that this lineage is past it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import orjson

from rlagent.buffer import groups, policies, sessions
from rlagent.buffer.config import BufferConfig
from rlagent.buffer.database import QUEUE, Transaction
from rlagent.buffer.ledger import count
from rlagent.buffer.records import SESSION_COLUMNS, decode_session
from rlagent.errors import ConflictError, NotFoundError
from rlagent.trajectory import rows
from rlagent.types import Group, Lease, Reward, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSlip:
    """A lease without its contents: what the transaction decides, before the arrays are read.

    >>> LeaseSlip(lease_id="l1", step=4, unit_ids=("g1", "g2"), expires_at=1e9, redelivered=False).step
    4
    """

    lease_id: str
    step: int
    unit_ids: tuple[str, ...]
    expires_at: float
    redelivered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did: batches to be delivered again, and open sessions of the driver before that were sealed as interrupted."""

    redelivered: int
    interrupted: int


def take(
    tx: Transaction, *, lease_id: str, num_groups: int, step: int, now: float, config: BufferConfig
) -> LeaseSlip | None:
    """Lease the next batch.

    One to be redelivered if there is any, else `num_groups` ready units; None if there are too few.
    """
    expire(tx, now)
    current = policies.current(tx)
    if current is None:
        raise ConflictError("the buffer has no policy version yet; start serve with a model before leasing")
    batch, unit_ids = _next_redelivery(tx, current.version, step, config)
    if batch is None:
        unit_ids = _next_new(tx, num_groups, current.version, config)
    if not unit_ids:
        return None
    slip = LeaseSlip(
        lease_id=lease_id,
        step=step,
        unit_ids=tuple(unit_ids),
        expires_at=now + config.lease_s,
        redelivered=batch is not None,
    )
    tx.run(
        "INSERT INTO leases (lease_id, step, expires_at, state, batch) VALUES (?, ?, ?, 'out', ?)",
        lease_id,
        step,
        slip.expires_at,
        batch,
    )
    for unit_id in unit_ids:
        tx.run("UPDATE units SET state = 'leased', lease_id = ? WHERE unit_id = ?", lease_id, unit_id)
    return slip


def consume(tx: Transaction, lease_id: str, *, step: int) -> int:
    """Count a lease as trained on.

    The number of its consumption, which is the new head. Asking again gives the same number.
    """
    state, batch, consumption = _lease(tx, lease_id)
    if state == "consumed":
        assert isinstance(consumption, int)
        return consumption
    if state != "out":
        raise ConflictError(f"lease {lease_id} is {state}: its groups went back to the queue; lease again")
    number = _append(tx, batch=batch, lease_id=lease_id, step=step)
    units = tx.run(
        "UPDATE units SET state = 'consumed', batch = ?, lease_id = NULL WHERE lease_id = ?",
        number if batch is None else batch,
        lease_id,
    )
    tx.run("UPDATE leases SET state = 'consumed', consumption = ? WHERE lease_id = ?", number, lease_id)
    count(tx, "group_consumed", "first" if batch is None else "again", units)
    return number


def release(tx: Transaction, lease_id: str) -> None:
    """Give a lease's groups back to the front of the queue. Nothing happens to a lease that ended unconsumed before."""
    state, _, _ = _lease(tx, lease_id)
    if state == "consumed":
        raise ConflictError(f"lease {lease_id} is consumed and cannot be released")
    if state == "out":
        _end(tx, lease_id, "released")


def expire(tx: Transaction, now: float) -> bool:
    """End the leases whose time ran out. True if there were any."""
    due = tx.rows("SELECT lease_id FROM leases WHERE state = 'out' AND expires_at <= ?", now)
    for (lease_id,) in due:
        _end(tx, lease_id, "lease_expired")
    return bool(due)


def restore(tx: Transaction, *, cursor: int, version: int, now: float, config: BufferConfig) -> RestoreReport:
    """The learner stands at a checkpoint again.

    Everything that its lineage has not consumed will be delivered (again).
    """
    policies.get(tx, version)
    if cursor != 0 and tx.row("SELECT 1 FROM consumptions WHERE number = ?", cursor) is None:
        raise NotFoundError(
            f"cursor {cursor} was never given out by this data buffer; restore with the buffer the run was trained from"
        )
    policies.fail_all(tx, "restored")
    policies.set_current(tx, version)
    for (lease_id,) in tx.rows("SELECT lease_id FROM leases WHERE state = 'out'"):
        _end(tx, lease_id, "restored")
    _set_head(tx, cursor)
    past = _batches_of_lineage(tx, cursor)
    redelivered = 0
    for (batch,) in tx.rows("SELECT DISTINCT batch FROM units WHERE batch IS NOT NULL"):
        if batch in past:
            tx.run("UPDATE units SET state = 'consumed' WHERE batch = ?", batch)
        else:
            redelivered += 1
            units = tx.run("UPDATE units SET state = 'ready', reason = '' WHERE batch = ?", batch)
            count(tx, "group_delayed", "restored", units)
    tx.notify(QUEUE)
    lineage = numbers_of_lineage(tx, cursor)
    for lease_id, number in tx.rows("SELECT lease_id, consumption FROM leases WHERE state = 'consumed'"):
        if number not in lineage:
            tx.run("UPDATE leases SET state = 'undone' WHERE lease_id = ?", lease_id)
    return RestoreReport(redelivered=redelivered, interrupted=sessions.interrupt_drivers(tx, now, config))


def head(tx: Transaction) -> int:
    """The number of the consumption where the learner stands; 0 before the first."""
    row = tx.row("SELECT value FROM meta WHERE name = 'head'")
    return 0 if row is None else int(row[0])


def contents(tx: Transaction, slip: LeaseSlip) -> Lease:
    """The groups of a lease, with their rows. Rows in which nothing is trained are left out."""
    found = tuple(group(tx, unit_id) for unit_id in slip.unit_ids)
    return Lease(
        lease_id=slip.lease_id,
        step=slip.step,
        groups=found,
        lags=_lags(tx, found),
        expires_at=slip.expires_at,
        redelivered=slip.redelivered,
    )


def _lags(tx: Transaction, found: tuple[Group, ...]) -> dict[int, int]:
    """How far behind the current version the tokens' versions are."""
    current, lookup = policies.current(tx), policies.lookup_in(tx)
    rows_of = (row for one in found for rollout in one.rollouts for row in rollout.rows)
    versions = {int(version) for row in rows_of for version in np.unique(row.versions[row.loss_mask])}
    if current is None:
        return {}
    lags = {version: policies.lag(version, current.version, lookup) for version in sorted(versions)}
    return {version: lag for version, lag in lags.items() if lag is not None}


def group(tx: Transaction, unit_id: str) -> Group:
    """A unit with its rollouts and their rows that train."""
    unit = tx.row("SELECT num_missing, ungrouped FROM units WHERE unit_id = ?", unit_id)
    assert unit is not None
    sql = (
        f"SELECT {SESSION_COLUMNS} FROM sessions WHERE unit_id = ? AND member = 'valid' ORDER BY sealed_at, session_id"
    )
    rollouts = []
    for row in tx.rows(sql, unit_id):
        session = decode_session(row)
        trained = tuple(row for row in rows(session, sessions.calls_of(tx, session.session_id)) if row.loss_mask.any())
        rollouts.append(
            Rollout(
                rollout_id=session.session_id, task_id=session.task_id, reward=session.reward or Reward(), rows=trained
            )
        )
    return Group(group_id=unit_id, rollouts=tuple(rollouts), num_missing=unit[0], ungrouped=bool(unit[1]))


def _next_redelivery(tx: Transaction, current: int, step: int, config: BufferConfig) -> tuple[int | None, list[str]]:
    """The oldest batch that waits for redelivery and still has a unit that is fresh enough, and those units."""
    while True:
        found = tx.row("SELECT MIN(batch) FROM units WHERE state = 'ready' AND batch IS NOT NULL")
        assert found is not None
        batch = found[0]
        if batch is None:
            return None, []
        unit_ids = [
            row[0]
            for row in tx.rows("SELECT unit_id FROM units WHERE state = 'ready' AND batch = ? ORDER BY position", batch)
        ]
        fresh = _drop_old(tx, unit_ids, current, config)
        if fresh:
            return batch, fresh
        _append(tx, batch=batch, lease_id=None, step=step)


def _next_new(tx: Transaction, num_groups: int, current: int, config: BufferConfig) -> list[str]:
    """The first `num_groups` ready units that are fresh enough; none if there are too few."""
    fresh: list[str] = []
    for (unit_id,) in tx.rows("SELECT unit_id FROM units WHERE state = 'ready' AND batch IS NULL ORDER BY position"):
        fresh += _drop_old(tx, [unit_id], current, config)
        if len(fresh) == num_groups:
            return fresh
    return []


def _drop_old(tx: Transaction, unit_ids: list[str], current: int, config: BufferConfig) -> list[str]:
    """Drop, and count, the units that may not be trained on by the current version; the others."""
    fresh = []
    for unit_id in unit_ids:
        reason = _too_old(tx, unit_id, current, config)
        if reason:
            groups.drop(tx, unit_id, reason)
        else:
            fresh.append(unit_id)
    return fresh


def _too_old(tx: Transaction, unit_id: str, current: int, config: BufferConfig) -> str:
    lookup = policies.lookup_in(tx)
    for (text,) in tx.rows("SELECT versions FROM sessions WHERE unit_id = ? AND member = 'valid'", unit_id):
        for version in orjson.loads(text):
            lag = policies.lag(version, current, lookup)
            if lag is None:
                return "unknown_version"
            if config.abandoned == "drop" and not policies.in_lineage(version, current, lookup):
                return "abandoned"
            if lag > config.max_staleness:
                return "stale"
    return ""


def _append(tx: Transaction, *, batch: int | None, lease_id: str | None, step: int) -> int:
    """A new consumption after the head; it becomes the head."""
    found = tx.row("SELECT COALESCE(MAX(number), 0) + 1 FROM consumptions")
    assert found is not None
    number: int = found[0]
    tx.run(
        "INSERT INTO consumptions (number, parent, batch, lease_id, step) VALUES (?, ?, ?, ?, ?)",
        number,
        head(tx),
        number if batch is None else batch,
        lease_id,
        step,
    )
    _set_head(tx, number)
    return number


def _set_head(tx: Transaction, number: int) -> None:
    tx.run("INSERT INTO meta VALUES ('head', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", str(number))


def _lease(tx: Transaction, lease_id: str) -> tuple[str, int | None, int | None]:
    found = tx.row("SELECT state, batch, consumption FROM leases WHERE lease_id = ?", lease_id)
    if found is None:
        raise NotFoundError(f"there is no lease {lease_id!r}")
    return found[0], found[1], found[2]


def _end(tx: Transaction, lease_id: str, reason: str) -> None:
    """A lease ends unconsumed: its units are ready again, at their old place."""
    tx.run("UPDATE leases SET state = ? WHERE lease_id = ?", reason, lease_id)
    units = tx.run("UPDATE units SET state = 'ready', lease_id = NULL WHERE lease_id = ?", lease_id)
    count(tx, "group_delayed", reason, units)
    tx.notify(QUEUE)


def numbers_of_lineage(tx: Transaction, cursor: int) -> set[int]:
    """The consumptions on the way from the root to `cursor`."""
    parents: dict[int, int] = dict(tx.rows("SELECT number, parent FROM consumptions"))
    lineage = set()
    while cursor != 0:
        lineage.add(cursor)
        cursor = parents[cursor]
    return lineage


def _batches_of_lineage(tx: Transaction, cursor: int) -> set[int]:
    numbers = numbers_of_lineage(tx, cursor)
    return {batch for number, batch in tx.rows("SELECT number, batch FROM consumptions") if number in numbers}
