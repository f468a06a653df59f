"""The sandbox protocol: what every backend promises, and what a command's end looks like."""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

DEFAULT_OUTPUT_LIMIT_BYTES: Final = 1024 * 1024  # of stdout and of stderr each
MEMORY_WORDS: Final = (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc", b"out of memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a sandbox, or of each command where that is said. None leaves one unbounded.

    Which of them hold on this machine, and by what means, is in `Sandbox.enforced`, by these names.
    """

    wall_s: float | None = 60.0  # of each command
    cpu_s: int | None = 60  # processor time of each process
    cpus: float | None = None  # cores' worth of processor time a second, of all processes together
    memory_bytes: int | None = (
        2 * 1024**3
    )  # of all processes together (and of files kept in memory); else of each process
    pids: int | None = 256
    disk_bytes: int | None = 1024**3  # of all files it writes
    file_size_bytes: int | None = 1024**3
    open_files: int | None = 1024  # of each process


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of a sandbox at one moment; what forks start from. It belongs to the backend that made it, and ends with it."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The one thing that a command without network reaches: 127.0.0.1:`port`, answered on our side by `serve`.

    serve(socket) takes a listening socket, and answers what comes until it is left; see rlagent.agent_door for one.
    """

    port: int
    serve: Callable[[socket.socket], AbstractAsyncContextManager[None]]


class Sandbox(Protocol):
    """A place to run commands in. An async context manager; `close` ends whatever still runs and deletes its files.

    Paths are relative to the sandbox's working directory; SandboxError for one that leads outside.
    """

    @property
    def enforced(self) -> Mapping[str, str | None]:
        """Field of Limits -> by what it is enforced on this machine; None where it is not."""
        ...

    @property
    def network(self) -> bool:
        """Whether its commands have a network."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes | None = None, env: Mapping[str, str] | None = None, cwd: str = ".",
        timeout_s: float | None = None, output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES, door: Door | None = None,
    ) -> ExecResult:  # fmt: skip
        """Run a command to its end, and end what it left behind. SandboxError only if it could not be started; how it ended is data.

        timeout_s can shorten the limits' wall_s, not exceed it. Without stdin the command reads an empty one. SandboxError for a door
        where there is a network, or where the backend has none.
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

    async def snapshot(self) -> Snapshot:
        """Keep its files as they are now. SandboxError while a command runs."""
        ...

    async def fork(self) -> "Sandbox":
        """A new open sandbox with the same files; neither sees what the other changes."""
        ...

    async def close(self) -> None:
        """End it. Safe to repeat."""
        ...


class Backend(Protocol):
    """Where sandboxes come from. An async context manager; `close` ends every sandbox and snapshot of it.

    Entering it takes away what backends of the same kind left behind when their process was killed.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def open(self, snapshot: Snapshot | None = None) -> Sandbox:
        """A new open sandbox, empty or with a snapshot's files."""
        ...

    async def delete(self, snapshot: Snapshot) -> None:
        """Give a snapshot's room back. Sandboxes forked from it must be closed."""
        ...

    async def close(self) -> None:
        """End all of it. Safe to repeat."""
        ...
