"""The data buffer's face: async methods over durable transactions. The router and the learner's routes hold one Buffer.

In the flow it stands between the router (which records calls) and the learner (which leases groups).
Invariant: a method that returned is on disk, and one that raised changed nothing (StoreUncertainError: may have); the
same across kill -9. What is kept in memory is read again when another replica says that it changed it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from rlagent.buffer import groups, history, leases, policies, sessions, status
from rlagent.buffer.config import BufferConfig
from rlagent.buffer.database import EVERYTHING, QUEUE, SESSION, Database, Transaction
from rlagent.buffer.history import Consumption
from rlagent.buffer.leases import LeaseSlip, RestoreReport
from rlagent.buffer.policies import Publish
from rlagent.buffer.sharing import Sharing
from rlagent.buffer.sqlite import SqliteDatabase
from rlagent.buffer.status import BufferStatus
from rlagent.buffer.store import Store
from rlagent.errors import StoreError
from rlagent.trajectory import rows
from rlagent.types import Call, Delivery, Group, Lease, PolicyVersion, Reward, Session, SessionState, Trajectory

T = TypeVar("T")
_NO_IMAGES: Final[Mapping[str, bytes]] = MappingProxyType({})

# A waiting lease looks at the queue again at least so often: a notice of another replica may have been missed.
LOOK_AGAIN_S: Final = 5.0


class Buffer:
    """The durable data buffer of one run. Made by `open`, ended by `close`.

    A SQLite file is open in one process at a time, a PostgreSQL database in as many as like.
    """

    def __init__(self, store: Store, config: BufferConfig, clock: Callable[[], float]) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._policy: PolicyVersion | None = None
        self._snapshot: PolicyVersion | None = None
        self._publishing: int | None = None
        self._closing = False
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_session: Callable[[str], None] | None = None
        self._sharing = Sharing(store, self._write_policy, self._hear)

    @classmethod
    async def open(cls, path: Path, config: BufferConfig, *, clock: Callable[[], float] = time.time) -> Buffer:
        """Open or create the buffer at config.url, or else at `path`. A publish that a dead process left is failed."""
        buffer = cls(await Store.open(partial(_database, path, config)), config, clock)
        try:
            await buffer._sharing.join(clock())
        except BaseException:
            await buffer.close()
            raise
        return buffer

    def stop_leasing(self) -> None:
        """The process is about to leave: leases that wait, and those asked for from now on, end with None."""
        self._closing = True
        self._announce()

    async def close(self) -> None:
        """Commit what is pending and close the database. Leases that wait end with None."""
        self.stop_leasing()
        await self._sharing.leave()
        await self._store.close()

    def on_session(self, told: Callable[[str], None]) -> None:
        """Call `told` with a session's id when another replica takes it over or seals it; "" may be any of them."""
        self._on_session = told

    def _hear(self, notice: str) -> None:
        """Another replica says what it changed."""
        word, _, session_id = notice.partition(" ")
        if word in (QUEUE, EVERYTHING):
            self._announce()
        if word in (SESSION, EVERYTHING) and self._on_session is not None:
            self._on_session(session_id)

    # Sessions and calls

    async def open_session(self, session: Session) -> None:
        """Make a new session durable. ConflictError if its id exists or its key was used."""
        await self._store.write(lambda tx: sessions.insert(tx, session, self._config))

    async def claim_session(self, session_id: str) -> tuple[Session | None, int]:
        """Take an open session over: its calls are recorded from now on under the epoch that is answered."""
        return await self._store.write(lambda tx: sessions.claim(tx, session_id), exclusive=False)

    async def may_extend(self, session_id: str, epoch: int) -> bool:
        """Whether a session is open, and nobody took it over since this epoch."""
        return await self._store.read(lambda tx: sessions.is_open(tx, session_id, epoch))

    def record_call(
        self, call: Call, *, epoch: int = 0, images: Mapping[str, bytes] = _NO_IMAGES
    ) -> asyncio.Future[None]:
        """Make a call durable. ConflictError once the session is sealed, MovedError once it has another epoch.

        It takes effect also where the future is cancelled.

        epoch: of the claim of the session; 0 for who opened it. images: the bytes of the call's, by digest.
        """
        values = sessions.encode(call)
        return self._store.write_soon(
            lambda tx: sessions.insert_call(tx, call, values, epoch=epoch, images=images), exclusive=False
        )

    async def image(self, digest: str) -> bytes | None:
        """The bytes of an image of a recorded call."""
        return await self._store.read(lambda tx: sessions.image(tx, digest))

    def mark_delivered(self, call_id: str) -> None:
        """The agent has seen the end of the answer.

        Durable with the next commit, within 50 ms; ignored once the session is sealed.
        """
        self._mark(call_id, "delivered")

    def mark_orphan(self, call_id: str) -> None:
        """The agent went away before the end of the answer.

        Durable with the next commit, within 50 ms; ignored once the session is sealed.
        """
        self._mark(call_id, "orphan")

    async def add_reward(self, session_id: str, reward: Reward) -> None:
        """Add to an open session's reward, component by component."""
        await self._store.write(lambda tx: sessions.add_reward(tx, session_id, reward), exclusive=False)

    async def finish_session(self, session_id: str, *, status: str, reward: Reward | None) -> Session:
        """Seal a session.

        A given reward replaces the total (per-call rewards stay). The same body again gives the same answer, another
        a ConflictError.
        """
        now = self._clock()
        session, ready = await self._store.write(
            lambda tx: sessions.finish(tx, session_id, status=status, reward=reward, now=now, config=self._config)
        )
        if ready:
            self._announce()
        return session

    async def session(self, session_id: str) -> Session | None:
        """A session by id."""
        return await self._store.read(lambda tx: sessions.find(tx, session_id))

    async def session_by_key(self, key_hash: str) -> Session | None:
        """A session by the sha256 hex of its key."""
        return await self._store.read(lambda tx: sessions.find_by_key(tx, key_hash))

    async def sessions(self, *, state: SessionState | None = None, limit: int = 100) -> list[Session]:
        """The newest sessions first."""
        return await self._store.read(lambda tx: sessions.listed(tx, state, limit))

    async def calls(self, session_id: str) -> list[Call]:
        """A session's calls in order of arrival. Full prompts: rlagent.trajectory.full_prompt_ids."""
        return await self._store.read(lambda tx: sessions.calls_of(tx, session_id))

    async def call(self, session_id: str, call_id: str) -> Call | None:
        """A call of a session."""
        return await self._store.read(lambda tx: sessions.find_call(tx, session_id, call_id))

    async def chain(self, session_id: str, call_id: str) -> list[Call]:
        """A call behind all those that it goes on from, the first one first; empty if the session has no such call."""
        return await self._store.read(lambda tx: sessions.chain_of(tx, session_id, call_id))

    async def trajectories(self, session_id: str) -> list[Trajectory]:
        """A session's rows; those of an open session as of now."""

        def work(tx: Transaction) -> list[Trajectory]:
            session = sessions.find(tx, session_id)
            return [] if session is None else list(rows(session, sessions.calls_of(tx, session_id)))

        return await self._store.read(work)

    async def expire_due(self, now: float) -> None:
        """End what is due: sessions past their time, groups past their deadline, leases past theirs."""

        def work(tx: Transaction) -> bool:
            self._sharing.beat(tx, now)
            ready = sessions.expire(tx, now, self._config)
            ready |= groups.pass_deadlines(tx, now, self._config)
            return leases.expire(tx, now) or ready

        if await self._store.write(work):
            self._announce()
        self._sharing.beaten(now)

    # The learner

    async def lease(self, *, num_groups: int, step: int, wait_s: float) -> Lease | None:
        """The next batch.

        One of before a restore, in its old extent, or `num_groups` groups; None if not ready within wait_s.
        """
        if num_groups < 1:
            raise StoreError(f"num_groups is {num_groups}; a lease takes at least 1 group")
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while not self._closing:
            changed = self._changed
            slip = await self._store.write(self._take(num_groups, step))
            if slip is not None:
                return await self._store.read(lambda tx, slip=slip: leases.contents(tx, slip))  # type: ignore[misc]
            if loop.time() >= end:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(end, loop.time() + LOOK_AGAIN_S)):
                    await asyncio.shield(changed)
        return None

    def _take(self, num_groups: int, step: int) -> Callable[[Transaction], LeaseSlip | None]:
        lease_id, now = f"lease-{uuid.uuid4().hex}", self._clock()
        return lambda tx: leases.take(
            tx, lease_id=lease_id, num_groups=num_groups, step=step, now=now, config=self._config
        )

    async def consume(self, lease_id: str, *, step: int) -> int:
        """Count a lease as trained on; the cursor. The same lease again gives the same number."""
        cursor = await self._store.write(lambda tx: leases.consume(tx, lease_id, step=step))
        self._announce()
        return cursor

    async def release(self, lease_id: str) -> None:
        """Give a lease's groups back to the front of the queue."""
        await self._store.write(lambda tx: leases.release(tx, lease_id))
        self._announce()

    async def lineage(self) -> list[Consumption]:
        """The batches that made the learner's present weights, oldest first."""
        return await self._store.read(history.lineage)

    async def consumed(self, batch: int) -> list[Group]:
        """The groups of a batch that was trained on. NotFoundError if there is none."""
        return await self._store.read(lambda tx: history.groups_of(tx, batch))

    async def restore(self, *, cursor: int, version: int) -> RestoreReport:
        """The learner stands at a checkpoint.

        Deliver again, in order, what that lineage has not consumed; seal open sessions.
        """
        now = self._clock()
        report = await self._write_policy(
            lambda tx: leases.restore(tx, cursor=cursor, version=version, now=now, config=self._config)
        )
        self._announce()
        return report

    async def status(self) -> BufferStatus:
        """Counts, incomplete groups, the ledger, the versions."""
        return await self._store.read(status.read)

    # Publishes

    async def begin_publish(self, *, step: int, parent: int, same_weights: bool = False) -> Publish:
        """Give out a version number, never to be reused. ConflictError while another publish is under way.

        same_weights: the parent's are sent again, after a resume; nothing becomes staler by it.
        """
        publish_id, now = f"publish-{uuid.uuid4().hex}", self._clock()
        replica = self._store.database.replica
        return await self._store.write(
            lambda tx: policies.begin(
                tx, publish_id=publish_id, step=step, parent=parent, now=now, replica=replica, same_weights=same_weights
            )
        )

    async def commit_publish(self, publish_id: str, *, checksum: str, snapshot: str | None) -> PolicyVersion:
        """Stamp a version and make it current. The same publish again gives the same answer.

        ConflictError if it failed, or another replica began it: that one knows its engines.
        """
        now = self._clock()
        return await self._write_policy(
            lambda tx: policies.commit(
                tx, publish_id, checksum=checksum, snapshot=snapshot, now=now, replica=self._store.database.replica
            )
        )

    async def fail_publish(self, publish_id: str, reason: str) -> None:
        """Give a publish up; its number stays taken. ConflictError if another replica began it."""
        replica = self._store.database.replica
        await self._store.write(lambda tx: policies.fail(tx, publish_id, reason, replica=replica))

    def engines_held(self) -> AbstractAsyncContextManager[int | None]:
        """Around a change of engines: no other replica changes them meanwhile. The version being published, if any."""
        return self._sharing.engines_held()

    async def policy_moved(self) -> None:
        """Wait until another replica changed the current version, or what is being published."""
        await self._sharing.policy_moved()

    async def read_policy(self) -> PolicyVersion:
        """The current version as the database has it now."""
        if self._store.database.shared:
            await self._write_policy(lambda _tx: None, exclusive=False)
        return self.policy()

    def publishing_elsewhere(self) -> int | None:
        """The version that a replica was publishing when the policy was last read; None for a file."""
        return self._publishing if self._store.database.shared else None

    async def is_published(self, version: int) -> bool:
        """Whether a version was committed."""
        return await self._store.read(lambda tx: policies.is_published(tx, version))

    def policy(self) -> PolicyVersion:
        """The current version. StoreError before ensure_initial."""
        if self._policy is None:
            raise StoreError("the data buffer has no policy version yet; call ensure_initial with the model directory")
        return self._policy

    def newest_snapshot(self) -> PolicyVersion | None:
        """The newest version of the current lineage whose weights are on disk."""
        return self._snapshot

    async def ensure_initial(self, *, checksum: str, snapshot: str) -> PolicyVersion:
        """Version 0 = the model directory, if the database is new. Returns the current version."""
        now = self._clock()
        await self._write_policy(lambda tx: policies.ensure_initial(tx, checksum=checksum, snapshot=snapshot, now=now))
        return self.policy()

    async def _write_policy(self, work: Callable[[Transaction], T], *, exclusive: bool = True) -> T:
        """A write that may change the current version: the copy in memory follows once it is durable."""

        def both(tx: Transaction) -> tuple[T, PolicyVersion | None, PolicyVersion | None, int | None]:
            result = work(tx)
            return result, policies.current(tx), policies.newest_snapshot(tx), policies.publishing(tx)

        found = await self._store.write(both, exclusive=exclusive)
        result, self._policy, self._snapshot, self._publishing = found
        return result

    def _mark(self, call_id: str, delivery: Delivery) -> None:
        self._store.write_later(lambda tx: sessions.mark(tx, call_id, delivery))

    def _announce(self) -> None:
        """Wake every waiting lease: each looked at the queue before, and looks again."""
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)


def _database(path: Path, config: BufferConfig) -> Database:
    """Where the settings say that the data is."""
    if config.url is None:
        return SqliteDatabase(path)
    try:
        from rlagent.buffer.postgres import PostgresDatabase
    except ImportError as error:
        raise StoreError(
            f"buffer.url names a PostgreSQL database, which needs psycopg ({error}); pip install 'rlagent-rl[postgres]'"
        ) from error
    return PostgresDatabase(config.url)
