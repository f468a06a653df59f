"""Publishing weights: the engines' side of it. The version tree itself is the buffer's.

In the flow: the learner begins (engines pause), pushes to the engines directly, commits (every engine must say it holds
the version; engines continue) or fails (engines go back to the newest snapshot). A publish whose lease runs out fails.
Invariant: an engine gets requests only while it holds weights that the buffer knows by their number. Engines are touched
by one replica of the router at a time, which holds them in the buffer; a publish under way anywhere keeps all others off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from rlagent.buffer import Buffer
from rlagent.errors import ConflictError, EngineError, LoadError, NotFoundError, StoreError
from rlagent.router.balance import NoEngine, Pool
from rlagent.router.config import RouterConfig
from rlagent.router.engine_client import Engine, EngineDown
from rlagent.types import PolicyVersion

T = TypeVar("T")
_log: Final = logging.getLogger(__name__)
# Between two looks at a publish of another replica, for which an engine that comes back waits.
_ELSEWHERE_S: Final = 0.5
# Between two tries to give up a publish whose lease ran out while the database was down.
_STORE_DOWN_S: Final = 1.0


@dataclass(slots=True, kw_only=True)
class _Publish:
    """A publish under way and the engines it paused."""

    publish_id: str
    version: int
    mode: str
    engines: Sequence[Engine]
    lease: asyncio.Task[None] = field(repr=False)


class Policies:
    """Pauses, continues and restores the engines of one router, one change at a time."""

    def __init__(self, buffer: Buffer, pool: Pool, config: RouterConfig) -> None:
        self._buffer = buffer
        self._pool = pool
        self._config = config
        self._publish: _Publish | None = None
        self._changing = asyncio.Lock()
        self._settled = asyncio.Condition()
        self._changes: set[asyncio.Task[Any]] = set()

    async def whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, also when the learner that asked for it goes away: engines must not stay paused."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked was told, if still there; the lease's clock does the rest

    async def begin(
        self, *, step: int, parent: int, same_weights: bool, lease_s: float | None, mode: str | None,
        release_kv_cache: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Take a version number and pause the engines. With release_kv_cache they also give its memory back, until they continue: for
        a learner on the same GPUs, that trains under this publish.
        """
        async with self._changing, self._buffer.engines_held():
            engines = self._pool.ready
            if not engines:
                raise NoEngine("no engine is ready to take weights; try again in a few seconds")
            publish = await self._buffer.begin_publish(step=step, parent=parent, same_weights=same_weights)
            mode = "abort" if release_kv_cache else mode or self._config.pause_mode
            paused = await self._on_all(engines, lambda engine: engine.pause(mode))
            if release_kv_cache:
                paused = await self._on_all(paused, lambda engine: engine.lend())
            if self._publish is not None:  # given up by a restore
                self._publish.lease.cancel()
            lease_s = lease_s or self._config.publish_lease_s
            lease = asyncio.create_task(self._expire(publish.publish_id, lease_s))
            self._publish = _Publish(
                publish_id=publish.publish_id, version=publish.version, mode=mode, engines=paused, lease=lease
            )
        if not paused:
            await self.fail(publish.publish_id, "every engine went away")
            raise NoEngine("every engine went away while it was paused; try again in a few seconds")
        return {
            "publish_id": publish.publish_id,
            "version": publish.version,
            "engines": [engine.url for engine in paused],
            "lease_s": lease_s,
        }

    async def commit(self, publish_id: str, *, checksum: str, snapshot: str | None) -> dict[str, Any]:
        """Stamp the version once every engine says that it holds it, and continue."""
        async with self._changing, self._buffer.engines_held():
            publish = self._publish
            if publish is not None and publish.publish_id == publish_id:
                await self._check(publish)
            stamped = await self._buffer.commit_publish(publish_id, checksum=checksum, snapshot=snapshot)
            if publish is not None and publish.publish_id == publish_id:
                publish.lease.cancel()
                ready = [engine for engine in publish.engines if engine.state == "ready"]
                await self._on_all(ready, lambda engine: self._go_on(engine, publish.mode))
                await self._end()
        return {"version": stamped.version, "depth": stamped.depth}

    @staticmethod
    async def _go_on(engine: Engine, mode: str) -> None:
        """Continue with new weights. What runs on in place needs its cache; new calls ask for prefixes of their version only."""
        await engine.take_back()
        if mode != "in_place":
            await engine.flush()
        await engine.resume()

    async def _check(self, publish: _Publish) -> None:
        """ConflictError names the engines that do not hold the version. One that died meanwhile does not count."""
        wrong: list[str] = []
        for engine in publish.engines:
            if engine.state != "ready":
                continue
            try:
                held = await engine.held_version()
            except EngineDown:
                engine.lose()
                continue
            if held != str(publish.version):
                wrong.append(f"{engine.url} holds {held}")
            else:
                engine.version = publish.version
        if not any(engine.state == "ready" for engine in publish.engines):
            wrong.append("every engine went away")
        if wrong:
            raise ConflictError(
                f"publish of version {publish.version} is not complete: {'; '.join(wrong)}; push all buckets and end "
                "the update on every engine before the commit, or fail the publish"
            )

    async def fail(self, publish_id: str, reason: str) -> None:
        """Give a publish up and bring its engines back to the newest snapshot."""
        async with self._changing, self._buffer.engines_held() as publishing:
            await self._buffer.fail_publish(publish_id, reason)
            publish = self._publish
            if publish is not None and publish.publish_id == publish_id:
                if publish.lease is not asyncio.current_task():
                    publish.lease.cancel()
                if publishing in (None, publish.version):  # else another replica publishes since, and has the engines
                    await self._on_all(publish.engines, self.restore)
                await self._end()

    async def _end(self) -> None:
        self._publish = None
        async with self._settled:
            self._settled.notify_all()
        await self._pool.announce()

    async def _expire(self, publish_id: str, lease_s: float) -> None:
        await asyncio.sleep(lease_s)
        _log.warning("publish %s: its lease of %s s ran out", publish_id, lease_s)
        while True:
            try:
                return await self.fail(publish_id, f"its lease of {lease_s} s ran out")
            except (ConflictError, NotFoundError):
                raise  # it is committed
            except StoreError as error:
                _log.warning("publish %s is given up later: %s", publish_id, error)
                await asyncio.sleep(_STORE_DOWN_S)

    async def settled(self) -> None:
        """Wait until no publish is under way: an engine that comes back joins between publishes."""
        async with self._settled:
            await self._settled.wait_for(lambda: self._publish is None)

    def weights(self) -> PolicyVersion:
        """What an engine that starts now has to load."""
        found = self._buffer.newest_snapshot()
        if found is None or found.snapshot is None:
            raise LoadError("the data buffer knows no snapshot of weights on disk; publish one with a snapshot")
        return found

    async def admit(self, engine: Engine) -> None:
        """Put an engine that answers into rotation, with weights that the buffer knows. EngineError if it does not take them.

        A new process is taken at its word; one that was lost for a while may hold half an update, and loads in full.
        """
        while True:
            await self.settled()
            async with self._changing, self._buffer.engines_held() as publishing:
                if self._publish is None and publishing is None:
                    await self._take(engine)
                    break
            if publishing is not None:
                await asyncio.sleep(_ELSEWHERE_S)
        await self._pool.announce()

    async def _take(self, engine: Engine) -> None:
        known = (str(self._buffer.policy().version), str(self.weights().version))
        held = await engine.held_version()
        if engine.version is None and held in known:
            await engine.resume()
            engine.version = int(held)
        else:
            await self.restore(engine)
        engine.state = "ready"

    async def restore(self, engine: Engine) -> None:
        """Load the newest snapshot in full, and continue."""
        weights = self.weights()
        assert weights.snapshot is not None
        await engine.load(weights.snapshot, weights.version)
        engine.version = weights.version
        await engine.resume()

    async def follow(self) -> None:
        """Bring engines in line with what other replicas published or gave up, until cancelled."""
        while True:
            await self._buffer.policy_moved()
            try:
                async with self._changing, self._buffer.engines_held() as publishing:
                    publish = self._publish
                    if publish is not None and publishing != publish.version:  # given up through another replica
                        publish.lease.cancel()
                        await self._end()
                    if publishing is None:
                        await self._on_all(self._pool.ready, self._align)
            except StoreError as error:
                _log.warning("engines are brought in line later: %s", error)

    async def _align(self, engine: Engine) -> None:
        """Continue an engine that holds weights no older than the newest snapshot; load any other."""
        held = await engine.held_version()
        version = int(held) if held.isdecimal() else -1
        if version >= self.weights().version and await self._buffer.is_published(version):
            engine.version = version
            await engine.resume()
        else:
            await self.restore(engine)

    async def _on_all(self, engines: Iterable[Engine], action: Any) -> list[Engine]:
        """Do it on every engine at once; the ones on which it worked. The others leave the rotation."""
        tried = list(engines)
        results = await asyncio.gather(*(action(engine) for engine in tried), return_exceptions=True)
        done: list[Engine] = []
        for engine, result in zip(tried, results, strict=True):
            if isinstance(result, EngineError):
                _log.warning("%s leaves the rotation: %s", engine.url, result)
                engine.lose()
            elif isinstance(result, BaseException):
                raise result
            else:
                done.append(engine)
        return done

    async def shown(self) -> dict[str, Any]:
        """The current version and what each engine holds."""
        policy = await self._buffer.read_policy()
        snapshot = self._buffer.newest_snapshot()
        return {
            "version": policy.version,
            "depth": policy.depth,
            "step": policy.step,
            "checksum": policy.checksum,
            "snapshot": None if snapshot is None else {"version": snapshot.version, "path": snapshot.snapshot},
            "publishing": self._buffer.publishing_elsewhere() if self._publish is None else self._publish.version,
            "engines": [
                {"url": engine.url, "state": engine.state, "version": engine.version, "running": engine.running}
                for engine in self._pool.engines
            ],
        }

    async def close(self) -> None:
        """End the lease's clock; the buffer fails an open publish when it is opened again."""
        if self._changes:
            await asyncio.wait(self._changes)
        if self._publish is not None:
            self._publish.lease.cancel()
            await asyncio.wait([self._publish.lease])
