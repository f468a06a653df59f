"""Plain functions as verifiers in processes of their own, which are killed when they hang: sympy, patterns, a user's own code.

In the flow: `Rubric` waits for a free process (`ready`), then gives it one attempt; cancelling the wait kills the process, and the
next attempt starts another. Not a sandbox: the function is trusted, what it is given is data. Invariant: one attempt a process at a time.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import orjson

from rlagent.envs.verifiers.attempt import Attempt, Staged, Verifier
from rlagent.errors import ConfigError, LoadError, VerifierCrashError, VerifierError
from rlagent.launch.child import Child

_MEMORY_BYTES: Final = 4 * 1024**3  # of addresses, many of which are never touched


class Isolated(Staged):
    """A function `f(attempt, **arguments) -> float`, named `file.py:function` or `module:function`, in `processes` processes.

    They start with the first attempt and stay; memory_bytes bounds each (None: not). Messages and task must be JSON. Of a conversation
    they see what is in the attempt, but not its session. Ends with `close`, or with the process that it is in.
    """

    def __init__(
        self, function: str, *, arguments: Mapping[str, Any] | None = None, processes: int = 1,
        memory_bytes: int | None = _MEMORY_BYTES,
    ) -> None:  # fmt: skip
        if processes < 1:
            raise ConfigError(f"processes is {processes}; give at least 1")
        source, _, name = function.rpartition(":")
        self._function = f"{Path(source).absolute()}:{name}" if source.endswith(".py") else function
        self._arguments = dict(arguments or {})
        self._memory_bytes = memory_bytes
        self._processes = processes
        self._room = asyncio.Semaphore(processes)
        self._idle: list[_Process] = []
        self._logs: tempfile.TemporaryDirectory[str] | None = None

    @property
    def concurrency(self) -> int:
        """As many attempts as processes."""
        return self._processes

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[Verifier]:
        """A process that has loaded the function. LoadError when it cannot be loaded."""
        async with self._room:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                yield process.ask
            finally:
                if process.usable:
                    self._idle.append(process)
                else:
                    process.kill()

    async def close(self) -> None:
        """End the processes that are idle; those at work end with their attempt."""
        while self._idle:
            self._idle.pop().kill()
        if self._logs is not None:
            self._logs.cleanup()
            self._logs = None

    async def _start(self) -> "_Process":
        if self._logs is None:
            self._logs = tempfile.TemporaryDirectory(prefix="rlagent-verifier-", ignore_cleanup_errors=True)
        process = _Process(self._function, Path(self._logs.name) / "log")
        try:
            hello = {"function": self._function, "arguments": self._arguments, "memory_bytes": self._memory_bytes}
            answer = await process.exchange(hello)
            if "load_error" in answer:
                raise LoadError(answer["load_error"])
        except BaseException:
            process.kill()
            raise
        return process


class _Process:
    def __init__(self, function: str, log: Path) -> None:
        self._child = Child(f"verifier {function}", "rlagent.envs.verifiers.isolated_worker", log=log)
        self.usable = True

    async def ask(self, attempt: Attempt) -> float:
        """The function's value of one attempt."""
        seen = {"task": dict(attempt.task), "answer": attempt.answer, "messages": [dict(m) for m in attempt.messages]}
        answer = await self.exchange(seen)
        if "error" in answer:
            raise VerifierError(answer["error"])
        value: float = answer["value"]
        return value

    async def exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send and receive. Whoever is cancelled meanwhile leaves a process that cannot be used again."""
        content = orjson.dumps(message)
        self.usable = False
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        descriptor = self._child.connection.fileno()

        def read() -> None:
            if not readable.done():
                readable.set_result(None)

        loop.add_reader(descriptor, read)
        try:
            self._child.connection.send_bytes(content)
            await readable
            answer: dict[str, Any] = orjson.loads(self._child.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise VerifierCrashError(self._child.fate) from error
        finally:
            loop.remove_reader(descriptor)
        self.usable = True
        return answer

    def kill(self) -> None:
        self.usable = False
        self._child.kill()
