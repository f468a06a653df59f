"""A sandbox of processes on this machine: bubblewrap's namespaces, control groups or rlimits, a timeout, capped output.

Every command runs in its own user, pid, mount, ipc, uts and (unless network=True) net namespace, with the system read-only and
only its own directories writable. Invariant: when `exec` returns or is cancelled, nothing the command started is alive. Without
bubblewrap far less holds: see README.md.
"""

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rlagent.errors import SandboxError
from rlagent.sandboxes import bubblewrap
from rlagent.sandboxes.base import DEFAULT_OUTPUT_LIMIT_BYTES, Door, ExecResult, Limits, Snapshot
from rlagent.sandboxes.capture import Capture
from rlagent.sandboxes.command import Command
from rlagent.sandboxes.ending import check_bytes, result, time_allowed
from rlagent.sandboxes.files import copy_tree, read_file, write_file
from rlagent.sandboxes.hold import Hold
from rlagent.sandboxes.process_backend import ProcessBackend, Room
from rlagent.sandboxes.reaping import kill_group

_DRAIN_S: Final = 5.0  # for output still in a pipe once all that is known of a command is dead


class ProcessSandbox:
    """Commands in namespaces of their own over one work directory. See rlagent.sandboxes.base.Sandbox.

    Of `backend`, open then with `ProcessBackend.open`; or alone, with a backend of its own made by the other arguments.
    """

    def __init__(
        self, *, limits: Limits | None = None, network: bool = False, allow_unisolated: bool = False,
        readable: Sequence[Path] = (), backend: ProcessBackend | None = None, snapshot: Snapshot | None = None,
    ) -> None:  # fmt: skip
        self._alone = backend is None
        self._backend = backend or ProcessBackend(
            limits=limits, network=network, allow_unisolated=allow_unisolated, readable=readable
        )
        self._snapshot = snapshot
        self._room: Room | None = None
        self._running: dict[int, asyncio.Event] = {}  # process -> set when nothing of it is left

    @property
    def isolated(self) -> bool:
        """Whether commands run in namespaces of their own. Known once the sandbox is open."""
        return self._backend.isolated

    @property
    def network(self) -> bool:
        """Whether commands have the host's network. Known once the sandbox is open."""
        return self._backend.network or not self.isolated

    @property
    def enforced(self) -> Mapping[str, str | None]:
        """Field of Limits -> by what it is enforced. Known once the sandbox is open."""
        return self._backend.enforced

    async def __aenter__(self) -> Self:
        if self._room is not None:  # of ProcessBackend.open
            return self
        if self._alone:
            await self._backend.__aenter__()
        try:
            self._room = await self._backend.make_room(self, self._snapshot)
        except BaseException:
            if self._alone:
                await self._backend.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End what still runs, delete the files."""
        room, self._room = self._room, None
        for pid, ended in list(self._running.items()):
            kill_group(pid)
            await ended.wait()
        if room is not None:
            await self._backend.clear_room(self, room)
            if self._alone:
                await self._backend.close()

    async def snapshot(self) -> Snapshot:
        """Keep its files as they are now."""
        if self._running:
            raise SandboxError("a snapshot cannot be taken while a command runs; wait for it")
        return await self._backend.keep(self._opened)

    async def fork(self) -> "ProcessSandbox":
        """A new open sandbox of the same backend with the same files. Close this one last if it has a backend of its own."""
        return await self._backend.open(await self.snapshot())

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes | None = None, env: Mapping[str, str] | None = None, cwd: str = ".",
        timeout_s: float | None = None, output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES, door: Door | None = None,
    ) -> ExecResult:  # fmt: skip
        """Run a command to its end."""
        room = self._opened
        if door is not None and self.network:
            raise SandboxError("a sandbox whose commands have the host's network takes no door; leave it out")
        allowed_s = time_allowed(argv, timeout_s, self._backend.limits)
        command = Command(
            backend=self._backend, room=room, argv=argv, stdin=stdin, env=env or {}, cwd=self._relative(cwd), door=door
        )
        began, killed_before = time.perf_counter(), room.oom_kills()
        out, err = Capture(output_limit_bytes), Capture(output_limit_bytes)
        with ExitStack() as ours:
            hold = Hold() if self.isolated else None
            if hold is not None:
                ours.callback(hold.close)
            try:
                ends = out.open(), err.open()
                starting = room.home.run(lambda: command.start(*ends, hold))
                timed_out = await command.until_end(starting, hold, allowed_s, self._running)
            finally:
                await out.close(_DRAIN_S)
                await err.close(_DRAIN_S)
            code = starting.result().returncode
            ending = (None, signal.SIGKILL) if timed_out else command.ending(code, hold, err.data)
        return result(
            ending, timed_out=timed_out, starved=room.oom_kills() > killed_before, stdout=out.data, stderr=err.data,
            truncated=out.truncated or err.truncated, began=began,
        )  # fmt: skip

    async def read(self, path: str) -> bytes:
        """A file's content."""
        home = self._opened.home
        return await home.run(lambda: read_file(home.files / "work", self._relative(path)))

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file."""
        check_bytes(path, data)
        home = self._opened.home
        await home.run(lambda: write_file(home.files / "work", self._relative(path), data))

    async def upload(self, directory: Path, path: str = ".") -> None:
        """Copy a directory's content in."""
        home = self._opened.home
        await home.run(lambda: copy_tree(home.files / "work", directory, self._relative(path)))

    @property
    def _opened(self) -> Room:
        if self._room is None:
            raise SandboxError("the sandbox is not open; use it as `async with ProcessSandbox() as sandbox:`")
        return self._room

    def _relative(self, path: str) -> str:
        """A path as commands see it, relative to the work directory."""
        seen = Path(path)
        work = Path(bubblewrap.WORK)
        return str(seen.relative_to(work)) if self.isolated and seen.is_relative_to(work) else path
