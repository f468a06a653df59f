"""How a command is bounded in time, and how its end is told: alike for every backend."""

import signal
import time
from collections.abc import Sequence

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import MEMORY_WORDS, ExecResult, Limits


def time_allowed(argv: Sequence[str], timeout_s: float | None, limits: Limits) -> float | None:
    """Seconds: the shorter of the two. SandboxError where there is no command, or one that is not cut into words."""
    if isinstance(argv, str):
        raise SandboxError(f"argv is the text {argv!r}; give a list, such as ['sh', '-c', {argv!r}]")
    if not argv:
        raise SandboxError("argv is empty; give a command and its arguments")
    return min((bound for bound in (timeout_s, limits.wall_s) if bound is not None), default=None)


def check_bytes(path: str, data: object) -> None:
    """SandboxError for content of a file that is not bytes."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise SandboxError(f"content of {path!r} is {type(data).__name__}, not bytes; give text as text.encode()")


def code_or_signal(code: int) -> tuple[int | None, int | None]:
    """(exit code, signal) of what was told as a shell tells it: 128 + the number for a signal, so that the two cannot be told apart."""
    if code > 128 and code - 128 in signal.valid_signals():
        return None, code - 128
    return code, None


def result(
    ending: tuple[int | None, int | None], *, timed_out: bool, starved: bool, stdout: bytes, stderr: bytes, truncated: bool,
    began: float,
) -> ExecResult:  # fmt: skip
    """`ending`: (exit code, signal). starved: the kernel ended something for want of memory. began: as time.perf_counter tells."""
    code, killed = ending
    starved = starved or any(words in stderr for words in MEMORY_WORDS)
    return ExecResult(
        exit_code=code, signal=killed, timed_out=timed_out, out_of_memory=not timed_out and code != 0 and starved,
        truncated=truncated, stdout=stdout, stderr=stderr, wall_s=time.perf_counter() - began,
    )  # fmt: skip
