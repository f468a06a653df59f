"""The ledger: counters of what was generated, consumed, dropped and delayed, each with its reason.

Counts change in the transaction that makes the change they count, so they survive a crash and never count twice.
A reason is a short fixed word, so that the ledger stays small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlagent.buffer.database import Transaction

# rollout_*: sessions that are trained on. group_*: groups, also bundles of ungrouped sessions.
Event = Literal[
    "rollout_finished",  # by status
    "rollout_dropped",  # not in any batch, and why
    "group_completed",  # "full", or "deadline" with members missing
    "group_dropped",  # never consumed, and why
    "group_delayed",  # handed back: "released", "lease_expired", "restored"
    "group_consumed",  # "first", or "again" after a restore
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One counter.

    >>> LedgerEntry(event="group_dropped", reason="stale", count=2)
    LedgerEntry(event='group_dropped', reason='stale', count=2)
    """

    event: str
    reason: str
    count: int


def count(tx: Transaction, event: Event, reason: str, by: int = 1) -> None:
    """Add `by` to one counter."""
    if by:
        tx.run(
            "INSERT INTO ledger (event, reason, count) VALUES (?, ?, ?) "
            "ON CONFLICT (event, reason) DO UPDATE SET count = ledger.count + excluded.count",
            event,
            reason,
            by,
        )


def entries(tx: Transaction) -> tuple[LedgerEntry, ...]:
    """All counters, sorted."""
    found = tx.rows("SELECT event, reason, count FROM ledger ORDER BY event, reason")
    return tuple(LedgerEntry(event=event, reason=reason, count=number) for event, reason, number in found)
