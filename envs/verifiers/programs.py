"""Programs that a model wrote, run in a sandbox: against unit tests, or against inputs and the outputs they are to give.

In the flow: `Rubric` waits for a sandbox (`ready`), a fork of which sees one attempt. Invariant: nothing of the attempt outlives it,
and a program that ends before the tests have ended has not passed them (it would have to print a number that it is not told).
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from rlagent.envs.verifiers.attempt import Attempt, Staged, Verifier
from rlagent.errors import ConfigError, VerifierError
from rlagent.sandboxes.base import Backend, Limits, Sandbox
from rlagent.sandboxes.pool import SandboxPool
from rlagent.sandboxes.process_backend import ProcessBackend

_FENCE: Final = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)
_Run = Callable[[Sandbox, Attempt, Sequence[str]], Awaitable[float]]
_PYTHON: Final = ("python3", "-I")
_SOLUTION: Final = "solution.py"
LIMITS: Final = Limits(wall_s=20.0, cpu_s=20, memory_bytes=512 * 1024**2, pids=32, disk_bytes=32 * 1024**2)

# Reads the number that tells its end before the solution runs, and says it when all is done.
_HARNESS: Final = """\
import sys
_told = sys.stdin.readline().strip()
sys.stdin = open("/dev/null")
exec(compile(open("solution.py").read() + "\\n" + open("tests.py").read(), "solution.py", "exec"), {"__name__": "solution"})
sys.__stdout__.write("\\n" + _told + "\\n")
"""


class Programs(Staged):
    """Verifies programs in sandboxes of `backend` (default: process sandboxes with `LIMITS`), `max_open` side by side.

    tests: the task's field with Python that raises where the solution is wrong; 1.0 if nothing raises.
    cases: the task's field with [{"input": text, "output": text}, ...], given to the program and compared by lines; the
    share that is right, or with all_or_nothing 1.0 for all of them. program_s: what a run may take; one that takes longer is wrong, not a
    failed verifier, so the check's timeout_s is to leave room for all cases. code: how the program is found in the attempt.
    """

    def __init__(
        self, *, tests: str | None = None, cases: str | None = None, all_or_nothing: bool = True, backend: Backend | None = None,
        max_open: int = 4, program_s: float = 10.0, code: Callable[[Attempt], str] | None = None, python: Sequence[str] = _PYTHON,
    ) -> None:  # fmt: skip
        if tests is not None and cases is None:
            self._run: _Run = partial(_unit_tests, field=tests, timeout_s=program_s)
        elif cases is not None and tests is None:
            self._run = partial(_cases, field=cases, timeout_s=program_s)
        else:
            raise ConfigError(f"tests is {tests!r} and cases {cases!r}; name one field of the task")
        self._all_or_nothing = all_or_nothing
        self._backend = backend or ProcessBackend(limits=LIMITS)
        self._max_open = max_open
        self._code = code or (lambda attempt: last_code(attempt.answer))
        self._python = tuple(python)
        self._pool: SandboxPool | None = None
        self._opening = asyncio.Lock()

    @property
    def concurrency(self) -> int:
        """As many attempts as sandboxes."""
        return self._max_open

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[Verifier]:
        """An empty sandbox."""
        async with self._opening:
            if self._pool is None:
                await self._backend.__aenter__()
                self._pool = SandboxPool(self._backend, max_open=self._max_open)
        async with self._pool.sandbox() as sandbox:
            yield partial(self._verify, sandbox)

    async def close(self) -> None:
        """End the sandboxes and their backend."""
        if self._pool is not None:
            await self._pool.close()
            self._pool = None
            await self._backend.close()

    async def _verify(self, sandbox: Sandbox, attempt: Attempt) -> float:
        code = self._code(attempt)
        if not code.strip():
            return 0.0
        await sandbox.write(_SOLUTION, code.encode())
        share = await self._run(sandbox, attempt, self._python)
        return float(share == 1.0) if self._all_or_nothing else share


async def _unit_tests(
    sandbox: Sandbox, attempt: Attempt, python: Sequence[str], *, field: str, timeout_s: float
) -> float:
    await sandbox.write("tests.py", str(attempt.field(field)).encode())
    told = secrets.token_hex(16)
    done = await sandbox.exec([*python, "-c", _HARNESS], stdin=f"{told}\n".encode(), timeout_s=timeout_s)
    lines = done.stdout.decode(errors="replace").splitlines()
    return float(done.ok and not done.truncated and bool(lines) and lines[-1] == told)


async def _cases(sandbox: Sandbox, attempt: Attempt, python: Sequence[str], *, field: str, timeout_s: float) -> float:
    cases: list[dict[str, Any]] = attempt.field(field)
    if not cases:
        raise VerifierError(f"the task's {field} holds no case")
    right = 0
    for case in cases:
        done = await sandbox.exec([*python, _SOLUTION], stdin=str(case["input"]).encode(), timeout_s=timeout_s)
        right += done.ok and _lines(done.stdout.decode(errors="replace")) == _lines(str(case["output"]))
    return right / len(cases)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def last_code(answer: str) -> str:
    """The last fenced block of an answer, or all of it where there is none."""
    blocks = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer
