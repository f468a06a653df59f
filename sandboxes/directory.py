"""Commands in a directory of the host, for programs that are trusted: bounded time and output, and nothing left behind.

Beside the sandboxes: no limit, no namespace, the host's network. Invariant: when `exec_in` returns or is cancelled, nothing the
command started is alive, unless it cleared its environment and left its session.
"""

import asyncio
import os
import secrets
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from rlagent.errors import SandboxError
from rlagent.sandboxes import spawn
from rlagent.sandboxes.base import DEFAULT_OUTPUT_LIMIT_BYTES, ExecResult
from rlagent.sandboxes.capture import Capture
from rlagent.sandboxes.reaping import kill_group, kill_marked

_MARK: Final = "RLAGENT_PROGRAM"  # in the environment: what it leaves behind is found by it
_DRAIN_S: Final = 5.0


async def exec_in(
    directory: Path, argv: Sequence[str], *, env: Mapping[str, str], stdin: bytes | None = None,
    timeout_s: float | None = None, output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
) -> ExecResult:  # fmt: skip
    """Run a command to its end, with `env` as its whole environment. SandboxError if it could not be started."""
    program = _program(directory, argv, env)
    mark, timed_out, began = secrets.token_hex(8), False, time.perf_counter()
    guard = shutil.which("setpriv")  # a program must not outlive a worker that was killed
    line = [*([guard, "--pdeathsig", "KILL", "--"] if guard else []), program, *argv[1:]]
    async with AsyncExitStack() as ours:
        content = spawn.standard_input(stdin)
        ours.callback(os.close, content)
        out, err = Capture(output_limit_bytes), Capture(output_limit_bytes)
        ends = (content, out.open(), err.open())
        for capture in (out, err):
            ours.push_async_callback(capture.close, _DRAIN_S)
        try:
            process = spawn.start(line, env={**env, _MARK: mark}, cwd=directory, files=ends, keep=(), user=0)
        finally:
            for end in ends[1:]:
                os.close(end)
        try:
            async with asyncio.timeout(timeout_s):
                await spawn.exited(process)
        except TimeoutError:
            timed_out = True
        finally:
            kill_group(process.pid)
            await asyncio.to_thread(kill_marked, f"{_MARK}={mark}")
            code = process.wait()
    return ExecResult(
        exit_code=code if code >= 0 and not timed_out else None, signal=signal.SIGKILL if timed_out else -code if code < 0 else None,
        timed_out=timed_out, out_of_memory=False, truncated=out.truncated or err.truncated, stdout=out.data, stderr=err.data,
        wall_s=time.perf_counter() - began,
    )  # fmt: skip


def _program(directory: Path, argv: Sequence[str], env: Mapping[str, str]) -> str:
    found = shutil.which(argv[0], path=env.get("PATH")) if argv else None
    if found is None:
        raise SandboxError(f"{argv[0] if argv else ''!r} cannot be started: it is not a program on its PATH")
    if not directory.is_dir():
        raise SandboxError(f"{argv[0]!r} cannot be started: {str(directory)!r} is not a directory")
    return found
