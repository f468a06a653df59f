"""Transactions on sessions and calls: open, record, deliver, reward, seal, expire.

Invariant: once a session is sealed nothing about it changes any more (calls, delivery states, rewards), so its rows
are the same whenever they are built, and the versions noted at the seal are those of its trained tokens. Calls are
taken from the epoch that took the session over last, so two replicas never both extend it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import orjson

from rlagent.buffer import groups
from rlagent.buffer.config import BufferConfig
from rlagent.buffer.database import SESSION, Transaction, Value
from rlagent.buffer.records import (
    CALL_COLUMNS,
    SESSION_COLUMNS,
    add_rewards,
    decode_call,
    decode_session,
    encode_call,
    encode_reward,
    encode_session,
    marks,
)
from rlagent.errors import ConflictError, MovedError, NotFoundError, StoreError
from rlagent.trajectory import CallHead, kept_calls
from rlagent.types import GREEDY, OPENED_BY_DRIVER, Call, Delivery, ParentRef, Reward, Session, SessionState

# Most sessions that one listing returns: a page, not the database.
MAX_LISTED: Final = 10_000


def insert(tx: Transaction, session: Session, config: BufferConfig) -> None:
    """A new open session. ConflictError if its id or key was ever used."""
    if session.state != "open":
        raise StoreError(f"session {session.session_id!r} must start open, not {session.state!r}")
    if find(tx, session.session_id) is not None:
        raise ConflictError(f"session {session.session_id!r} exists; use a new id")
    if find_by_key(tx, session.key_hash) is not None:
        raise ConflictError("this api key was used by another session; one key is one episode, use a new key")
    groups.join(tx, session, config)
    tx.run(
        f"INSERT INTO sessions ({SESSION_COLUMNS}, unit_id) VALUES ({marks(SESSION_COLUMNS)}, ?)",
        *encode_session(session),
        session.group_id if session.train else None,
    )


def claim(tx: Transaction, session_id: str) -> tuple[Session | None, int]:
    """Take an open session over, and its new epoch: calls of an older epoch are refused from now on."""
    session, epoch = _held(tx, session_id)
    if session is not None and session.state == "open":
        epoch += 1
        tx.run("UPDATE sessions SET epoch = ? WHERE session_id = ?", epoch, session_id)
        tx.notify(f"{SESSION} {session_id}")
    return session, epoch


def is_open(tx: Transaction, session_id: str, epoch: int) -> bool:
    """Whether a session may still be extended by those who took it over at an epoch."""
    return tx.row("SELECT state, epoch FROM sessions WHERE session_id = ?", session_id) == ("open", epoch)


def insert_call(
    tx: Transaction, call: Call, values: tuple[Value, ...], *, epoch: int, images: Mapping[str, bytes]
) -> None:
    """A call of an open session, whose parent is recorded and whose prompt length adds up. MovedError: another epoch.

    images: the bytes of the call's, by digest; each content is stored once.
    """
    held, parent = _need_open_for(tx, call)
    if epoch != held:
        raise MovedError(
            f"session {call.session_id!r} was taken over while call {call.call_id} was made; send it again"
        )
    length = len(call.prompt_suffix)
    if call.parent is not None:
        if parent is None:
            raise StoreError(
                f"call {call.call_id}: its parent {call.parent.call_id} is not an earlier call of this session"
            )
        head = orjson.loads(parent)
        if not 0 <= call.parent.choice < len(head["choices"]):
            raise StoreError(
                f"call {call.call_id}: its parent has {len(head['choices'])} choices, not number {call.parent.choice}"
            )
        length += head["prompt_len"] + head["choices"][call.parent.choice]["length"]
    if length != call.prompt_len:
        raise StoreError(f"call {call.call_id}: prompt_len is {call.prompt_len}, its pieces add up to {length}")
    insert = f"INSERT INTO calls ({CALL_COLUMNS}) VALUES ({marks(CALL_COLUMNS)}) ON CONFLICT (call_id) DO NOTHING"
    if not tx.run(insert, *values):
        raise ConflictError(f"call {call.call_id} is recorded already")
    for digest in dict.fromkeys(image.digest for image in call.images):
        if tx.row("SELECT 1 FROM images WHERE digest = ?", digest) is None:
            if digest not in images:
                raise StoreError(f"call {call.call_id}: its image {digest} is not given, and not known")
            tx.run("INSERT INTO images (digest, data) VALUES (?, ?) ON CONFLICT DO NOTHING", digest, images[digest])


def mark(tx: Transaction, call_id: str, delivery: Delivery) -> None:
    """Note what became of a call's answer.

    Does nothing once the session is sealed, or for a call that was never recorded.
    """
    tx.run(
        "UPDATE calls SET delivery = ? WHERE call_id = ? AND session_id IN (SELECT session_id FROM sessions "
        f"WHERE session_id = (SELECT session_id FROM calls WHERE call_id = ?) AND state = 'open'{tx.for_update})",
        delivery,
        call_id,
        call_id,
    )


def add_reward(tx: Transaction, session_id: str, reward: Reward) -> None:
    """Add components and per-call rewards to those of an open session."""
    session, _ = _need_open(tx, session_id)
    _need_calls(tx, session_id, reward)
    total = encode_reward(add_rewards(session.reward, reward))
    tx.run("UPDATE sessions SET reward = ? WHERE session_id = ?", total, session_id)


def finish(
    tx: Transaction, session_id: str, *, status: str, reward: Reward | None, now: float, config: BufferConfig
) -> tuple[Session, bool]:
    """Seal a session.

    The same body again gives the same answer; another is a ConflictError. Second: whether a unit became ready.
    """
    body = f"{status} {encode_reward(None if reward is None else _sorted(reward))}"
    session, _ = _need(tx, session_id)
    if session.state != "open":
        found = tx.row("SELECT finish FROM sessions WHERE session_id = ?", session_id)
        if found == (body,):
            return session, False
        raise ConflictError(
            f"session {session_id!r} is already finished as {session.status!r}; its outcome cannot change"
        )
    if reward is not None:
        _need_calls(tx, session_id, reward)
        calls = {} if session.reward is None else dict(session.reward.calls)
        session = replace(session, reward=replace(reward, calls={**calls, **reward.calls}))
    state: SessionState = "sealed" if status == "completed" else "failed"
    return seal(tx, session, state=state, status=status, now=now, config=config, body=body)


def _sorted(reward: Reward) -> Reward:
    """The same reward, whatever the order in which its names were given."""
    return Reward(components=dict(sorted(reward.components.items())), calls=dict(sorted(reward.calls.items())))


def seal(
    tx: Transaction,
    session: Session,
    *,
    state: SessionState,
    status: str,
    now: float,
    config: BufferConfig,
    body: str | None = None,
) -> tuple[Session, bool]:
    """End an open session, note the versions of its trained tokens, and place it in its unit.

    Second: whether a unit became ready.
    """
    session = replace(session, state=state, status=status, sealed_at=now)
    versions, has_images = _trained_versions(tx, session)
    tx.run(
        "UPDATE sessions SET state = ?, status = ?, reward = ?, sealed_at = ?, finish = ?, versions = ? "
        "WHERE session_id = ?",
        state,
        status,
        encode_reward(session.reward),
        now,
        body,
        orjson.dumps(versions).decode(),
        session.session_id,
    )
    tx.notify(f"{SESSION} {session.session_id}")
    problem = groups.HAS_IMAGES if has_images else "" if versions else groups.NOTHING_TRAINABLE
    return session, groups.place(tx, session, problem=problem, config=config)


def expire(tx: Transaction, now: float, config: BufferConfig) -> bool:
    """Seal the open sessions whose time ran out. True if a unit became ready."""
    ready = False
    where = "WHERE state = 'open' AND expires_at <= ? ORDER BY expires_at, session_id" + tx.for_update
    for row in tx.rows(f"SELECT {SESSION_COLUMNS} FROM sessions {where}", now):
        ready |= seal(tx, decode_session(row), state="expired", status="expired", now=now, config=config)[1]
    return ready


def interrupt_drivers(tx: Transaction, now: float, config: BufferConfig) -> int:
    """Seal the open sessions of a dead driver's own rollouts as interrupted; how many. Agents from outside outlive a driver."""
    found = tx.rows(f"SELECT {SESSION_COLUMNS} FROM sessions WHERE state = 'open' ORDER BY session_id{tx.for_update}")
    own = [session for session in map(decode_session, found) if session.metadata.items() >= OPENED_BY_DRIVER.items()]
    for session in own:
        seal(tx, session, state="failed", status="interrupted", now=now, config=config)
    return len(own)


def find(tx: Transaction, session_id: str) -> Session | None:
    """A session by id."""
    row = tx.row(f"SELECT {SESSION_COLUMNS} FROM sessions WHERE session_id = ?", session_id)
    return None if row is None else decode_session(row)


def find_by_key(tx: Transaction, key_hash: str) -> Session | None:
    """A session by the hash of its key."""
    row = tx.row(f"SELECT {SESSION_COLUMNS} FROM sessions WHERE key_hash = ?", key_hash)
    return None if row is None else decode_session(row)


def listed(tx: Transaction, state: SessionState | None, limit: int) -> list[Session]:
    """The newest sessions first."""
    limit = max(0, min(limit, MAX_LISTED))
    where, values = ("", ()) if state is None else ("WHERE state = ?", (state,))
    order = "ORDER BY created_at DESC, session_id DESC LIMIT ?"
    return [
        decode_session(row)
        for row in tx.rows(f"SELECT {SESSION_COLUMNS} FROM sessions {where} {order}", *values, limit)
    ]


def calls_of(tx: Transaction, session_id: str) -> list[Call]:
    """A session's calls in order of arrival."""
    return [
        decode_call(row)
        for row in tx.rows(f"SELECT {CALL_COLUMNS} FROM calls WHERE session_id = ? ORDER BY position", session_id)
    ]


def chain_of(tx: Transaction, session_id: str, call_id: str) -> list[Call]:
    """A call behind all those that it goes on from; none if the session has no such call."""
    chain = (
        "WITH RECURSIVE chain (call_id, parent_id) AS ("
        "SELECT call_id, parent_id FROM calls WHERE call_id = ? AND session_id = ? UNION ALL "
        "SELECT calls.call_id, calls.parent_id FROM calls JOIN chain ON calls.call_id = chain.parent_id)"
    )
    found = f"{chain} SELECT {CALL_COLUMNS} FROM calls WHERE call_id IN (SELECT call_id FROM chain) ORDER BY position"
    return [decode_call(row) for row in tx.rows(found, call_id, session_id)]


def find_call(tx: Transaction, session_id: str, call_id: str) -> Call | None:
    """A call of a session by its id."""
    row = tx.row(f"SELECT {CALL_COLUMNS} FROM calls WHERE call_id = ? AND session_id = ?", call_id, session_id)
    return None if row is None else decode_call(row)


def image(tx: Transaction, digest: str) -> bytes | None:
    """The bytes of a recorded image."""
    row = tx.row("SELECT data FROM images WHERE digest = ?", digest)
    return None if row is None else bytes(row[0])


def encode(call: Call) -> tuple[Value, ...]:
    """The values that insert_call stores; made outside the transaction, since it compresses."""
    return encode_call(call)


def _held(tx: Transaction, session_id: str) -> tuple[Session | None, int]:
    """A session and its epoch, which do not change until the end of this transaction."""
    row = tx.row(f"SELECT {SESSION_COLUMNS}, epoch FROM sessions WHERE session_id = ?{tx.for_update}", session_id)
    return (None, 0) if row is None else (decode_session(row), row[-1])


def _need(tx: Transaction, session_id: str) -> tuple[Session, int]:
    session, epoch = _held(tx, session_id)
    if session is None:
        raise NotFoundError(f"there is no session {session_id!r}")
    return session, epoch


def _need_open_for(tx: Transaction, call: Call) -> tuple[int, str | None]:
    """The epoch of a call's open session, and its parent's head: one trip for what every call needs."""
    parent = "SELECT head FROM calls WHERE call_id = ? AND session_id = ? AND position < ?"
    row = tx.row(
        f"SELECT state, status, epoch, ({parent}) FROM sessions WHERE session_id = ?{tx.for_update}",
        None if call.parent is None else call.parent.call_id,
        call.session_id,
        call.index,
        call.session_id,
    )
    if row is None:
        raise NotFoundError(f"there is no session {call.session_id!r}")
    state, status, epoch, head = row
    _check_open(call.session_id, state, status)
    return epoch, head


def _need_open(tx: Transaction, session_id: str) -> tuple[Session, int]:
    session, epoch = _need(tx, session_id)
    _check_open(session_id, session.state, session.status)
    return session, epoch


def _check_open(session_id: str, state: str, status: str) -> None:
    if state != "open":
        raise ConflictError(f"session {session_id!r} is {state} ({status}) and takes nothing more; use a new session")


def _need_calls(tx: Transaction, session_id: str, reward: Reward) -> None:
    for call_id in reward.calls.keys() - {GREEDY}:
        if tx.row("SELECT 1 FROM calls WHERE call_id = ? AND session_id = ?", call_id, session_id) is None:
            raise NotFoundError(f"session {session_id!r} has no call {call_id!r} to reward")


def _trained_versions(tx: Transaction, session: Session) -> tuple[list[int], bool]:
    """The versions of the tokens with loss mask True, and whether others saw an image; read from the heads alone."""
    if not session.train:
        return [], False
    columns = "call_id, position, parent_id, parent_choice, delivery, prompt_digest, head"
    found = tx.rows(f"SELECT {columns} FROM calls WHERE session_id = ?", session.session_id)
    kept = kept_calls(
        CallHead(
            call_id=call_id,
            index=position,
            parent=None if parent_id is None else ParentRef(call_id=parent_id, choice=choice),
            delivery=delivery,
            prompt=digest,
        )
        for call_id, position, parent_id, choice, delivery, digest, _ in found
    )
    versions: set[int] = set()
    num_with_images = 0
    for head in (orjson.loads(row[6]) for row in found if row[0] in kept):
        sampled = {
            version
            for choice in head["choices"]
            if choice["trainable"]
            for version, start, end in choice["versions"]
            if end > start
        }
        if "num_fed" in head:
            num_with_images += bool(sampled)
        else:
            versions |= sampled
    return sorted(versions), num_with_images > 0
