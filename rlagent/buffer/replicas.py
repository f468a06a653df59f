"""Transactions on the replicas of the router that share a database: who is alive, and who may touch the engines.

Only one replica at a time pauses, loads or continues engines: the one that holds them. Invariants: a publish is failed
by others only when its replica was not seen for DEAD_S by one that was itself alive all that time; a holder that died
holds nothing.
"""

from __future__ import annotations

from typing import Final

from rlagent.buffer.database import ENGINES, POLICY, Transaction

# A replica that wrote nothing for so long is dead: ten times the interval in which each says that it lives.
DEAD_S: Final = 10.0


def seen(tx: Transaction, replica: str, now: float) -> None:
    """This replica lives."""
    tx.run(
        "INSERT INTO replicas VALUES (?, ?) ON CONFLICT (replica) DO UPDATE SET seen_at = excluded.seen_at",
        replica,
        now,
    )


def bury(tx: Transaction, now: float) -> bool:
    """Forget the replicas that died, and give up what they were publishing. True if there was a publish."""
    tx.run("DELETE FROM replicas WHERE seen_at < ?", now - DEAD_S)
    failed = tx.run(
        "UPDATE policies SET state = 'failed', reason = 'its router went away' "
        "WHERE state = 'begun' AND replica NOT IN (SELECT replica FROM replicas)"
    )
    if failed:
        tx.notify(POLICY)
    return failed > 0


def bury_all(tx: Transaction) -> None:
    """No other replica is there: the database was opened by this process alone."""
    tx.run("DELETE FROM replicas")
    bury(tx, 0.0)


def leave(tx: Transaction, replica: str) -> None:
    """This replica ends: give up what it was publishing, and let go of the engines."""
    free(tx, replica)
    tx.run("DELETE FROM replicas WHERE replica = ?", replica)
    failed = tx.run(
        "UPDATE policies SET state = 'failed', reason = 'serve ended' WHERE state = 'begun' AND replica = ?", replica
    )
    if failed:
        tx.notify(POLICY)


def hold(tx: Transaction, replica: str) -> bool:
    """Keep the other replicas from touching engines. False while another one that lives holds them."""
    held = tx.row("SELECT value FROM meta WHERE name = 'engines' AND value IN (SELECT replica FROM replicas)")
    if held is not None and held[0] != replica:
        return False
    tx.run("INSERT INTO meta VALUES ('engines', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", replica)
    return True


def free(tx: Transaction, replica: str) -> None:
    """Let go of the engines."""
    if tx.run("DELETE FROM meta WHERE name = 'engines' AND value = ?", replica):
        tx.notify(ENGINES)
