"""What was trained on, read again: the consumptions on the way to where the learner stands, and the groups of each.

Invariant: nothing changes, and the groups of a batch come in the order, and with the rows, that the learner was given.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlagent.buffer import leases
from rlagent.buffer.database import Transaction
from rlagent.errors import NotFoundError
from rlagent.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """One batch as a learner step took it.

    >>> Consumption(number=7, batch=5, step=6)  # batch 5 was delivered again, to the step after step 6
    Consumption(number=7, batch=5, step=6)
    """

    number: int
    batch: int
    step: int


def lineage(tx: Transaction) -> list[Consumption]:
    """The consumptions that made the learner's present weights, oldest first. A batch that had become too old when it was to be
    delivered again has a number, but made nothing.
    """
    numbers = leases.numbers_of_lineage(tx, leases.head(tx))
    rows = tx.rows("SELECT number, batch, step FROM consumptions WHERE lease_id IS NOT NULL ORDER BY number")
    return [Consumption(number=row[0], batch=row[1], step=row[2]) for row in rows if row[0] in numbers]


def groups_of(tx: Transaction, batch: int) -> list[Group]:
    """A consumed batch's groups. NotFoundError if none of it was consumed."""
    found = tx.rows("SELECT unit_id FROM units WHERE batch = ? AND state = 'consumed' ORDER BY position", batch)
    if not found:
        raise NotFoundError(f"batch {batch} holds no group that was trained on")
    return [leases.group(tx, unit_id) for (unit_id,) in found]
