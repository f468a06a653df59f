"""The sandbox protocol: what every backend promises, and what a command's end looks like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

DEFAULT_OUTPUT_LIMIT_BYTES: Final = 1024 * 1024  # of stdout and of stderr each


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of each command. None leaves one unbounded."""

    wall_s: float | None = 60.0
    cpu_s: int | None = 60  # of each process
    memory_bytes: int | None = 2 * 1024**3  # address space of each process
    pids: int | None = 256  # processes of the sandbox's user; needs a user of its own (not root)
    file_size_bytes: int | None = 1024**3
    open_files: int | None = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. Exactly one of exit_code and signal is set.

    timed_out: it was ended because its time was up (signal is 9 then). out_of_memory: it failed for want of memory, as far as can be told.
    truncated: stdout or stderr was longer than the cap.
    """

    exit_code: int | None
    signal: int | None
    timed_out: bool
    out_of_memory: bool
    truncated: bool
    stdout: bytes
    stderr: bytes
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0


class Sandbox(Protocol):
    """A place to run commands in. An async context manager; `close` ends whatever still runs and deletes its files.

    Paths are relative to the sandbox's working directory; SandboxError for one that leads outside.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes | None = None, env: Mapping[str, str] | None = None, cwd: str = ".",
        timeout_s: float | None = None, output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
    ) -> ExecResult:  # fmt: skip
        """Run a command to its end, and end what it left behind. SandboxError only if it could not be started; how it ended is data.

        timeout_s can shorten the limits' wall_s, not exceed it. Without stdin the command reads an empty one.
        """
        ...

    async def read(self, path: str) -> bytes:
        """A file's content."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, its directories too."""
        ...

    async def upload(self, directory: Path, path: str = ".") -> None:
        """Copy a directory's content in; symbolic links are left out."""
        ...

    async def close(self) -> None:
        """End it. Safe to repeat."""
        ...
