"""The driver's side of the rollout workers: hand out jobs, bound how many run, end what hangs, replace what dies.

Invariant: every job that was handed out gets exactly one Outcome. A job whose worker died under it is "interrupted" (it
was not its fault, it may be tried again); one that outlived its timeout is a "timeout".
"""

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from rlagent.errors import LoadError, RolloutError
from rlagent.launch.child import Child
from rlagent.rollout import Outcome, Task
from rlagent.types import Reward

_BACKSTOP_S = 5.0  # an async rollout times out by itself; this much later its process is taken to be stuck


class RolloutPool:
    """Worker processes that run one rollout function. An async context manager."""

    def __init__(self, function: str, *, workers: int, concurrency: int, timeout_s: float, logs: Path) -> None:
        self._function = function
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._logs = logs
        self._num_workers = workers
        self._workers: list[_Worker] = []
        self._free: asyncio.Condition = asyncio.Condition()

    async def __aenter__(self) -> "RolloutPool":
        try:
            for index in range(self._num_workers):
                self._workers.append(_Worker(index, self._function, self._timeout_s, self._logs))
                await self._workers[-1].start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def run(self, task: Task, session: Mapping[str, str]) -> Outcome:
        """Run the function on a task; waits for a free place first."""
        async with self._free:
            await self._free.wait_for(lambda: self._place() is not None)
            worker = self._place()
            assert worker is not None
            worker.num_running += 1
        try:
            return await worker.run(task, session)
        finally:
            async with self._free:
                worker.num_running -= 1
                self._free.notify()

    def _place(self) -> "_Worker | None":
        share = -(-self._concurrency // self._num_workers)
        open_workers = [w for w in self._workers if w.num_running < (share if w.is_async else 1)]
        return min(open_workers, key=lambda w: w.num_running, default=None)


class _Worker:
    def __init__(self, index: int, function: str, timeout_s: float, logs: Path) -> None:
        self.num_running = 0
        self.is_async = True
        self._name = f"rollout worker {index}"
        self._log = logs / f"rollout-{index}.log"
        self._function = function
        self._timeout_s = timeout_s
        self._jobs: dict[int, asyncio.Future[Outcome]] = {}
        self._numbers = itertools.count()
        self._child: Child | None = None
        self._restart = asyncio.Lock()

    async def start(self) -> None:
        child = Child(self._name, "rlagent.launch.rollout_worker", log=self._log)
        child.connection.send_bytes(orjson.dumps({"function": self._function, "timeout_s": self._timeout_s}))
        try:
            hello = orjson.loads(await asyncio.to_thread(child.connection.recv_bytes))
        except (EOFError, OSError):
            raise RolloutError(child.fate) from None
        if "error" in hello:
            child.close()
            raise LoadError(hello["error"])
        self.is_async = hello["is_async"]
        self._child = child
        asyncio.get_running_loop().add_reader(child.connection.fileno(), self._read)

    async def close(self) -> None:
        self._lose("interrupted", "the run ended")

    async def run(self, task: Task, session: Mapping[str, str]) -> Outcome:
        async with self._restart:
            if self._child is None:
                await self.start()
        assert self._child is not None
        number = next(self._numbers)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._jobs[number] = outcome
        try:
            self._child.connection.send_bytes(orjson.dumps({"job": number, "task": task, "session": session}))
        except OSError:
            self._lose("interrupted", "its worker died")
        limit_s = self._timeout_s + (_BACKSTOP_S if self.is_async else 0.0)
        done, _ = await asyncio.wait([outcome], timeout=limit_s)
        if not done:
            self._give_up(number)
        return await outcome

    def _give_up(self, number: int) -> None:
        """A job that does not end by itself: its process goes, and what else ran there is interrupted."""
        error = f"the rollout blocked its process for longer than rollout.timeout_s = {self._timeout_s}"
        self._jobs.pop(number).set_result(Outcome(status="timeout", error=error))
        self._lose("interrupted", "another rollout in the same worker process hung; its worker was ended")

    def _read(self) -> None:
        assert self._child is not None
        try:
            answer: dict[str, Any] = orjson.loads(self._child.connection.recv_bytes())
        except (EOFError, OSError):
            self._lose("interrupted", f"its worker died; see {self._log}")
            return
        reward = answer["reward"]
        outcome = Outcome(
            status=answer["status"], error=answer["error"], reward=None if reward is None else Reward(**reward)
        )
        job = self._jobs.pop(answer["job"], None)
        if job is not None and not job.done():
            job.set_result(outcome)

    def _lose(self, status: str, error: str) -> None:
        """Give the process up: it is ended if it still runs, and all its jobs get an outcome."""
        if self._child is not None:
            asyncio.get_running_loop().remove_reader(self._child.connection.fileno())
            self._child.kill()
            self._child = None
        for job in self._jobs.values():
            if not job.done():
                job.set_result(Outcome(status=status, error=error))
        self._jobs.clear()
