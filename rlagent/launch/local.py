"""Learner ranks as processes of this machine.

The driver calls a method by name on every rank at once; each rank runs it in the same order, so that collectives meet.
A rank that raises or dies ends the run: a failed learner is never papered over.
"""

import asyncio
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlagent.errors import ConfigError, LearnerError, LoadError, RlagentError
from rlagent.launch.child import Child
from rlagent.trainer.config import LearnerConfig, ParallelConfig, SyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a learner rank is built from; the same on all ranks but for `rank`."""

    learner: LearnerConfig
    parallel: ParallelConfig
    sync: SyncConfig
    model_dir: Path
    engine_dtype: str
    master_port: int
    seed: int
    total_steps: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a rank, as text: type name, message, traceback (none of an RlagentError)."""

    kind: str
    message: str
    traceback: str


class LocalRanks:
    """All ranks of one learner. `async with LocalRanks.start(...) as ranks: await ranks.call("train_step", batch)`."""

    def __init__(self, spec: RankSpec, logs: Path) -> None:
        self._spec = spec
        self._logs = logs
        self._stack = ExitStack()
        self._children: list[Child] = []

    async def __aenter__(self) -> "LocalRanks":
        threads = str(self._spec.learner.threads)
        for rank in range(self._spec.parallel.world_size):
            child = Child(
                f"learner rank {rank}",
                "rlagent.trainer.rank",
                log=self._logs / f"learner-{rank}.log",
                environ={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )
            self._stack.enter_context(child)
            self._children.append(child)
            child.connection.send(replace(self._spec, rank=rank))
        try:
            await self._answers()  # each rank answers once when it is built
        except BaseException:
            self._stack.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self._stack.close)

    async def call(self, method: str, *args: Any) -> Any:
        """Run `method(*args)` on all ranks; rank 0's result.

        Raises LearnerError when any rank fails or dies; ConfigError and LoadError, of a setting, stay what they are.
        """
        for child in self._children:
            try:
                child.connection.send((method, args))
            except OSError:
                raise LearnerError(await asyncio.to_thread(lambda: child.fate)) from None  # noqa: B023
        return (await self._answers())[0]

    async def _answers(self) -> Sequence[Any]:
        pending = {asyncio.create_task(asyncio.to_thread(self._answer, child)): child for child in self._children}
        try:
            for done in asyncio.as_completed(pending):
                await done  # the first failure ends the wait: the other ranks may hang in a collective
        except (RlagentError, asyncio.CancelledError):
            for child in self._children:
                child.process.kill()
            await asyncio.gather(*pending, return_exceptions=True)
            raise
        return [task.result() for task in pending]

    @staticmethod
    def _answer(child: Child) -> Any:
        try:
            answer = child.connection.recv()
        except (EOFError, OSError):
            raise LearnerError(child.fate) from None
        if isinstance(answer, Failure):
            kind = {"ConfigError": ConfigError, "LoadError": LoadError}.get(answer.kind, LearnerError)
            raise kind(f"{child.name}: {answer.kind}: {answer.message}\n{answer.traceback}".rstrip())
        return answer


def free_port() -> int:
    """A TCP port of the loopback for torch.distributed's rendezvous.

    Below the range from which the kernel gives out ports by itself: gloo's own connections could take it before it is used.
    """
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
