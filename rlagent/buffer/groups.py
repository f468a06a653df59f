"""Transactions on units: a sealed session joins its group; complete groups queue for the learner as they complete.

A unit is what is handed out: a named group, or a bundle of ungrouped sessions. Its states: filling -> ready -> leased
-> consumed, or dropped (with a reason), and back to ready when a lease ends or a restore undoes its consumption.

A session's `member` column says what it is to its unit: running; valid (trained on); invalid (finished, its slot is
used up: failed, timed out, no reward, images, nothing trainable); vacated (interrupted: its slot is open again); waiting
(ungrouped, bundle not full); late (its unit was complete); untrained.
"""

from __future__ import annotations

from typing import Final

from rlagent.buffer.config import BufferConfig
from rlagent.buffer.database import QUEUE, Transaction
from rlagent.buffer.ledger import count
from rlagent.errors import ConflictError, RequestError
from rlagent.types import Session

# Statuses that leave a group's slot open for a replacement; any other failure uses its slot up.
VACATING: Final = frozenset({"interrupted"})
# Why a finished and rewarded session is not trained on. The learner trains text models: it would see other prompts.
HAS_IMAGES: Final = "images"
NOTHING_TRAINABLE: Final = "no_trainable_call"
# Names of bundles of ungrouped sessions.
BUNDLE_PREFIX: Final = "ungrouped-"


def join(tx: Transaction, session: Session, config: BufferConfig) -> None:
    """A new session takes part in its group; the group's first session founds it with its size and deadline."""
    if not session.train or session.group_id is None:
        return
    if session.group_id.startswith(BUNDLE_PREFIX):
        raise RequestError(
            f"group id {session.group_id!r}: ids that start with {BUNDLE_PREFIX!r} are the buffer's own; use another"
        )
    found = tx.row("SELECT state, size FROM units WHERE unit_id = ?", session.group_id)
    if found is None:
        if session.group_size is None or session.group_size < 1:
            raise RequestError(f"group {session.group_id!r} is new: its first session must give group_size >= 1")
        deadline = (
            session.deadline_at if session.deadline_at is not None else session.created_at + config.group_deadline_s
        )
        tx.run(
            "INSERT INTO units (unit_id, task_id, size, deadline_at, ungrouped, state) "
            "VALUES (?, ?, ?, ?, 0, 'filling')",
            session.group_id,
            session.task_id,
            session.group_size,
            deadline,
        )
        return
    state, size = found
    if session.group_size is not None and session.group_size != size:
        raise ConflictError(
            f"group {session.group_id!r} has size {size}, not {session.group_size}; give the same size every time"
        )
    if state != "filling":
        raise ConflictError(f"group {session.group_id!r} is complete ({state}); use a new group id")


def place(tx: Transaction, session: Session, *, problem: str, config: BufferConfig) -> bool:
    """A session was just sealed, with a `problem` ("", HAS_IMAGES, NOTHING_TRAINABLE) of its calls.

    Decide what it is to its unit, and complete the unit if it was the last. True if one became ready.
    """
    if not session.train:
        _set_member(tx, session, "untrained")
        return False
    count(tx, "rollout_finished", session.status)
    if session.status in VACATING:
        count(tx, "rollout_dropped", session.status)
        _set_member(tx, session, "vacated")
        return False
    problem = _problem(session) or problem
    if session.group_id is None:
        if problem:
            count(tx, "rollout_dropped", problem)
            _set_member(tx, session, "invalid")
            return False
        _set_member(tx, session, "waiting")
        return _bundle(tx, config)
    unit = tx.row("SELECT state, size FROM units WHERE unit_id = ?", session.group_id)
    assert unit is not None, "a trained session with a group id founded or joined its unit when it opened"
    state, size = unit
    if state != "filling":
        count(tx, "rollout_dropped", problem or "late")
        _set_member(tx, session, "late")
        return False
    if problem:
        count(tx, "rollout_dropped", problem)
    _set_member(tx, session, "invalid" if problem else "valid")
    num_valid, num_invalid = num_members(tx, session.group_id)
    if num_valid + num_invalid < size:
        return False
    return _complete(tx, session.group_id, size=size, num_valid=num_valid, how="full", config=config)


def pass_deadlines(tx: Transaction, now: float, config: BufferConfig) -> bool:
    """Complete the groups whose deadline passed, the missing counted. True if one became ready."""
    ready = False
    for unit_id, size in tx.rows(
        "SELECT unit_id, size FROM units WHERE state = 'filling' AND deadline_at <= ? ORDER BY deadline_at, unit_id",
        now,
    ):
        num_valid, _ = num_members(tx, unit_id)
        ready |= _complete(tx, unit_id, size=size, num_valid=num_valid, how="deadline", config=config)
    return ready


def num_members(tx: Transaction, unit_id: str) -> tuple[int, int]:
    """How many valid and how many invalid finished members a unit has."""
    found = tx.row(
        "SELECT COALESCE(SUM(CASE WHEN member = 'valid' THEN 1 ELSE 0 END), 0), "
        "COALESCE(SUM(CASE WHEN member = 'invalid' THEN 1 ELSE 0 END), 0) FROM sessions WHERE unit_id = ?",
        unit_id,
    )
    assert found is not None
    return found[0], found[1]


def drop(tx: Transaction, unit_id: str, reason: str) -> None:
    """A unit will not be handed out (unless a restore reopens the question)."""
    tx.run("UPDATE units SET state = 'dropped', reason = ?, lease_id = NULL WHERE unit_id = ?", reason, unit_id)
    count(tx, "group_dropped", reason)


def _problem(session: Session) -> str:
    """Why a session is not trained on by how it finished; "" if it is."""
    if session.status != "completed":
        return session.status
    return "no_reward" if session.reward is None else ""


def _set_member(tx: Transaction, session: Session, member: str) -> None:
    tx.run("UPDATE sessions SET member = ? WHERE session_id = ?", member, session.session_id)


def _complete(tx: Transaction, unit_id: str, *, size: int, num_valid: int, how: str, config: BufferConfig) -> bool:
    tx.run("UPDATE units SET num_missing = ? WHERE unit_id = ?", max(0, size - num_valid), unit_id)
    count(tx, "group_completed", how)
    if num_valid < max(1, config.min_group_rollouts):
        drop(tx, unit_id, "too_few_rollouts")
        return False
    _queue(tx, unit_id)
    return True


def _queue(tx: Transaction, unit_id: str) -> None:
    tx.run(
        "UPDATE units SET state = 'ready', position = (SELECT COALESCE(MAX(position), 0) + 1 FROM units) "
        "WHERE unit_id = ?",
        unit_id,
    )
    tx.notify(QUEUE)


def _bundle(tx: Transaction, config: BufferConfig) -> bool:
    """Make a unit of the waiting ungrouped sessions once there are enough of them."""
    waiting = tx.rows("SELECT session_id FROM sessions WHERE member = 'waiting' ORDER BY sealed_at, session_id")
    if len(waiting) < config.ungrouped_size:
        return False
    found = tx.row("SELECT COUNT(*) FROM units WHERE ungrouped = 1")
    assert found is not None
    unit_id = f"{BUNDLE_PREFIX}{found[0] + 1}"
    tx.run(
        "INSERT INTO units (unit_id, size, ungrouped, state) VALUES (?, ?, 1, 'filling')",
        unit_id,
        config.ungrouped_size,
    )
    for (session_id,) in waiting[: config.ungrouped_size]:
        tx.run("UPDATE sessions SET member = 'valid', unit_id = ? WHERE session_id = ?", unit_id, session_id)
    count(tx, "group_completed", "full")
    _queue(tx, unit_id)
    return True
