"""What the buffer holds, for the driver (which tasks need more rollouts), the dashboard and the metrics. Read only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlagent.buffer import leases, ledger, policies
from rlagent.buffer.database import Transaction
from rlagent.buffer.ledger import LedgerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteGroup:
    """A group that is not complete. size - num_valid - num_invalid - num_running rollouts are still to be started.

    num_running counts its open sessions; num_invalid its finished ones that cannot be trained on.
    """

    group_id: str
    task_id: str | None
    size: int
    num_valid: int
    num_invalid: int
    num_running: int
    deadline_at: float  # unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStatus:
    """Counts of groups and sessions; `version` is -1 before the first policy version.

    backlog: complete groups that wait for a lease, redelivered ones included; leased: groups out with a learner;
    redelivery: batches that wait to be delivered again; running: open sessions, and of these running_trained are
    trained on; waiting: finished ungrouped sessions whose bundle is not full; cursor: the newest consumption of this
    lineage.
    """

    backlog: int
    leased: int
    redelivery: int
    running: int
    running_trained: int
    waiting: int
    incomplete: tuple[IncompleteGroup, ...]
    ledger: tuple[LedgerEntry, ...]
    cursor: int
    version: int
    depth: int
    step: int
    newest_version: int  # the highest number given out, committed or not
    newest_group: str | None  # the greatest id, in text order, of all groups that ever were; None without groups

    def count(self, event: str, reason: str | None = None) -> int:
        """Sum of the ledger's counters of an event, of one reason or of all."""
        return sum(entry.count for entry in self.ledger if entry.event == event and reason in (None, entry.reason))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, the inverse of from_json."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> BufferStatus:
        """Build from to_json's output; TypeError or KeyError if it is not that."""
        return cls(
            **{
                **body,
                "incomplete": tuple(IncompleteGroup(**group) for group in body["incomplete"]),
                "ledger": tuple(LedgerEntry(**entry) for entry in body["ledger"]),
            }
        )


def read(tx: Transaction) -> BufferStatus:
    """The whole status, in one snapshot."""
    current = policies.current(tx)
    return BufferStatus(
        backlog=_number(tx, "SELECT COUNT(*) FROM units WHERE state = 'ready'"),
        leased=_number(tx, "SELECT COUNT(*) FROM units WHERE state = 'leased'"),
        redelivery=_number(tx, "SELECT COUNT(DISTINCT batch) FROM units WHERE state = 'ready' AND batch IS NOT NULL"),
        running=_number(tx, "SELECT COUNT(*) FROM sessions WHERE state = 'open'"),
        running_trained=_number(tx, "SELECT COUNT(*) FROM sessions WHERE state = 'open' AND train = 1"),
        waiting=_number(tx, "SELECT COUNT(*) FROM sessions WHERE member = 'waiting'"),
        incomplete=tuple(_incomplete(tx)),
        ledger=ledger.entries(tx),
        cursor=leases.head(tx),
        version=-1 if current is None else current.version,
        depth=-1 if current is None else current.depth,
        step=-1 if current is None else current.step,
        newest_version=_number(tx, "SELECT COALESCE(MAX(version), -1) FROM policies"),
        newest_group=_first(tx, "SELECT MAX(unit_id) FROM units WHERE ungrouped = 0"),
    )


def _incomplete(tx: Transaction) -> list[IncompleteGroup]:
    found = tx.rows(
        "SELECT units.unit_id, units.task_id, units.size, units.deadline_at, "
        "COALESCE(SUM(CASE WHEN sessions.member = 'valid' THEN 1 ELSE 0 END), 0), "
        "COALESCE(SUM(CASE WHEN sessions.member = 'invalid' THEN 1 ELSE 0 END), 0), "
        "COALESCE(SUM(CASE WHEN sessions.state = 'open' THEN 1 ELSE 0 END), 0) "
        "FROM units LEFT JOIN sessions ON sessions.unit_id = units.unit_id WHERE units.state = 'filling' "
        "GROUP BY units.unit_id, units.task_id, units.size, units.deadline_at ORDER BY units.deadline_at, units.unit_id"
    )
    return [
        IncompleteGroup(
            group_id=row[0],
            task_id=row[1],
            size=row[2],
            deadline_at=row[3],
            num_valid=row[4],
            num_invalid=row[5],
            num_running=row[6],
        )
        for row in found
    ]


def _number(tx: Transaction, sql: str) -> int:
    return int(_first(tx, sql))


def _first(tx: Transaction, sql: str) -> Any:
    found = tx.row(sql)
    assert found is not None
    return found[0]
