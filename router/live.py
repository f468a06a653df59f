"""Sessions in memory: the forest of an open session's calls, what is in flight, and what can be answered again.

In the flow: the app finds the LiveSession of a request here. It is rebuilt from the buffer after a restart, and dropped
when the session ends. Invariant: the buffer decides what a session's state is; memory only saves reading it. Reading
a session takes it over: a new epoch, under which alone its calls are recorded, here or at any other replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from rlagent.buffer import Buffer
from rlagent.errors import NotFoundError
from rlagent.router.errors import ApiError
from rlagent.router.forest import Forest, rebuild
from rlagent.types import Call, Session

# An SDK retries the call it has just lost: older answers are not asked for again.
MAX_REPLAYS: Final = 16
# Messages of a call that are kept in memory beside its answer, though nobody asks for them: to leave them out is a copy.
_MAX_KEPT_BYTES: Final = 1024
# Keys of ended sessions that are remembered, so that their late calls need no look into the database.
MAX_KEYS: Final = 65_536
# Under which no call is recorded.
_NO_EPOCH: Final = -1
_SEALED: Final = "one key is one episode: start the next one with a new key or a new session"


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One call that is being made (or was: a retry's), and how many requests wait for it."""

    call_id: str
    started_at: float
    future: asyncio.Future[Call] = field(init=False)
    prompt_len: int = 0  # once it is known: before anything is sampled
    waiters: int = 0

    def set_prompt_len(self, prompt_len: int) -> None:
        """What its engine told: with images the prompt is longer than its ids."""
        self.prompt_len = prompt_len


@dataclass(slots=True, eq=False)
class LiveSession:
    """An open session and its forest."""

    session: Session
    forest: Forest
    epoch: int = 0  # of the claim under which it was read; 0 for who opened it
    doubtful: bool = False  # another replica may have taken it over
    flights: dict[str, Flight] = field(default_factory=dict)  # by body digest
    answered: OrderedDict[str, Call] = field(default_factory=OrderedDict)  # by body digest
    tasks: set[asyncio.Future[Call]] = field(default_factory=set)
    closing: bool = False
    _num_answering: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around a request, until its answer is sent and its delivery noted. 409 once the session is being finished."""
        if self.closing:
            raise sealed(self.session)
        self._num_answering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            if self._num_answering == 0:
                self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing more, and wait for the requests in flight; what is not done by then is given up."""
        self.closing = True
        if self._num_answering:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                pass
        for task in tuple(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(tuple(self.tasks))

    def distrust(self) -> None:
        """What is in memory is not all that is recorded: the next request reads everything again."""
        self.doubtful = True
        self.epoch = _NO_EPOCH

    def remember(self, call: Call) -> None:
        """Keep an answer for a retry: without the messages that were asked, where they are long."""
        self.answered[call.body_digest] = (
            replace(call, messages=b"[]") if len(call.messages) > _MAX_KEPT_BYTES else call
        )
        if len(self.answered) > MAX_REPLAYS:
            self.answered.popitem(last=False)


def sealed(session: Session) -> ApiError:
    """The answer to a call of a session that takes no more."""
    state = session.state if session.state != "open" else "being finished"
    return ApiError(409, f"session {session.session_id} is {state}; {_SEALED}", code="session_sealed", retry=False)


def hash_key(key: str) -> str:
    """How a key is stored."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()  # a header may hold any bytes


class LiveSessions:
    """All open sessions that were touched since the start."""

    def __init__(self, buffer: Buffer, *, ttl_s: float) -> None:
        self._buffer = buffer
        self._ttl_s = ttl_s
        self._live: dict[str, LiveSession] = {}
        self._ids: dict[str, str] = {}  # key hash -> session id
        self._loading: dict[str, asyncio.Lock] = {}
        buffer.on_session(self._doubt)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(tuple(self._live.values()))

    async def by_id(self, session_id: str) -> LiveSession:
        """An open session. NotFoundError, or 409 once it is sealed."""
        live = self._live.get(session_id)
        if live is not None and not live.doubtful and not _expired(live.session):
            return live
        async with self._lock(session_id):
            live = self._live.get(session_id)
            if live is not None and not _expired(live.session) and await self._holds(live):
                return live
            session, epoch = await self._buffer.claim_session(session_id)
            if session is None:
                raise NotFoundError(f"there is no session {session_id!r}")
            if session.state != "open" or _expired(session):
                self.drop(session_id)
                raise sealed(session)
            calls = await self._buffer.calls(session_id)
            return self._enter(session, rebuild(calls), calls, epoch)

    async def _holds(self, live: LiveSession) -> bool:
        """Whether nobody else took the session over, or sealed it."""
        if live.doubtful:
            live.doubtful = False  # before the look: what is heard meanwhile is a doubt again
            try:
                if not await self._buffer.may_extend(live.session.session_id, live.epoch):
                    live.distrust()
            except BaseException:
                live.doubtful = True
                raise
        return live.epoch != _NO_EPOCH

    def _doubt(self, session_id: str) -> None:
        """Another replica took a session over or sealed it; "" is any."""
        for live in (self._live.get(session_id),) if session_id else self:
            if live is not None:
                live.doubtful = True

    def loaded(self, session_id: str) -> LiveSession | None:
        """A session that is in memory."""
        return self._live.get(session_id)

    async def id_of_key(self, key_hash: str) -> str | None:
        """The session that a key belongs to, sealed ones too."""
        if key_hash not in self._ids:
            session = await self._buffer.session_by_key(key_hash)
            if session is None:
                return None
            if len(self._ids) >= MAX_KEYS:
                self._ids = {live.session.key_hash: session_id for session_id, live in self._live.items()}
            self._ids[key_hash] = session.session_id
        return self._ids[key_hash]

    async def open(self, session: Session) -> LiveSession:
        """Make a new session. ConflictError if its key was used before."""
        await self._buffer.open_session(session)
        return self._enter(session, Forest(), [], 0)

    async def open_by_key(self, key_hash: str) -> LiveSession:
        """The session of a key never seen: made now, unless another request has just made it."""
        async with self._lock(key_hash):
            found = await self.id_of_key(key_hash)
            if found is not None:
                return await self.by_id(found)
            return await self.open(self.new(key_hash))

    def new(self, key_hash: str) -> Session:
        """A session's record with an id and times of its own."""
        now = time.time()
        return Session(
            session_id=f"s-{uuid.uuid4().hex}", key_hash=key_hash, created_at=now, expires_at=now + self._ttl_s
        )

    def drop(self, session_id: str) -> None:
        """Forget a session that ended."""
        live = self._live.pop(session_id, None)
        if live is not None:
            live.closing = True
            self._ids.pop(live.session.key_hash, None)

    def drop_all(self) -> None:
        """The buffer changed behind our back (a restore): read everything again."""
        for session_id in tuple(self._live):
            self.drop(session_id)

    def drop_expired(self) -> list[str]:
        """Forget the sessions whose time ran out; their ids."""
        expired = [session_id for session_id, live in self._live.items() if _expired(live.session)]
        for session_id in expired:
            self.drop(session_id)
        return expired

    def _enter(self, session: Session, forest: Forest, calls: list[Call], epoch: int) -> LiveSession:
        live = LiveSession(session, forest, epoch)
        for call in calls[-MAX_REPLAYS:]:
            live.remember(call)
        self._live[session.session_id] = live
        self._ids[session.key_hash] = session.session_id
        return live

    def _lock(self, name: str) -> asyncio.Lock:
        """One loader a name; the locks of loaded ones go with the first who finds no waiter."""
        if len(self._loading) > 1024:
            self._loading = {key: lock for key, lock in self._loading.items() if lock.locked()}
        return self._loading.setdefault(name, asyncio.Lock())


def new_key() -> str:
    """A session's api key."""
    return f"sk-rlagent-{secrets.token_urlsafe(32)}"


def _expired(session: Session) -> bool:
    return session.expires_at is not None and session.expires_at <= time.time()
