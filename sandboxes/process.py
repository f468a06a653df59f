"""A sandbox of processes on this machine: bubblewrap's namespaces, control groups or rlimits, a timeout, capped output.

Every command runs in its own user, pid, mount, ipc, uts and (unless network=True) net namespace, with the system read-only and
only its own directories writable. Invariant: when `exec` returns or is cancelled, nothing the command started is alive. Without
bubblewrap far less holds: see README.md.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rlagent.errors import SandboxError
from rlagent.sandboxes import bubblewrap
from rlagent.sandboxes.base import DEFAULT_OUTPUT_LIMIT_BYTES, MEMORY_WORDS, Door, ExecResult, Limits, Snapshot
from rlagent.sandboxes.capture import Capture
from rlagent.sandboxes.door import Held
from rlagent.sandboxes.files import copy_tree, inside, read_file, write_file
from rlagent.sandboxes.process_backend import ProcessBackend, Room
from rlagent.sandboxes.reaping import kill_group, kill_marked, namespace_gone
from rlagent.sandboxes.spawn import exited, start

_STATUS_BYTES: Final = 4096
_DRAIN_S: Final = 5.0  # for output still in a pipe once all that is known of a command is dead
_MARK: Final = "RLAGENT_SANDBOX"  # in the environment of bare commands: what they leave behind is found by it


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
        if not argv:
            raise SandboxError("argv is empty; give a command and its arguments")
        bounds = [bound for bound in (timeout_s, self._backend.limits.wall_s) if bound is not None]
        began, killed_before = time.perf_counter(), room.oom_kills()
        with ExitStack() as ours:
            out, err = Capture(output_limit_bytes), Capture(output_limit_bytes)
            status, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            ours.callback(os.close, status)
            held = Held(status)
            ours.callback(held.close)
            try:
                ends = (await out.open(), await err.open(), written, held.read_end)
                task = asyncio.ensure_future(
                    room.home.run(lambda: self._start(room, argv, stdin, env or {}, cwd, ends, held=door is not None))
                )
                timed_out, told = await self._until_end(room, task, min(bounds, default=None), status, held, door)
            finally:
                await out.close(_DRAIN_S)
                await err.close(_DRAIN_S)
        code, killed = self._ending(argv, task.result(), told, err.data, forced=timed_out)
        starved = room.oom_kills() > killed_before or any(words in err.data for words in MEMORY_WORDS)
        return ExecResult(
            exit_code=code, signal=killed, timed_out=timed_out, out_of_memory=not timed_out and code != 0 and starved,
            truncated=out.truncated or err.truncated, stdout=out.data, stderr=err.data, wall_s=time.perf_counter() - began,
        )  # fmt: skip

    async def read(self, path: str) -> bytes:
        """A file's content."""
        home = self._opened.home
        return await home.run(lambda: read_file(home.files / "work", self._relative(path)))

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file."""
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

    def _start(
        self, room: Room, argv: Sequence[str], stdin: bytes | None, env: Mapping[str, str], cwd: str,
        ends: tuple[int, int, int, int], *, held: bool,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """In a thread of the launcher, in the sandbox's mount namespace. Takes the pipes' ends."""
        files, work = room.home.files, room.home.files / "work"
        with ExitStack() as ours:
            for end in ends:
                ours.callback(os.close, end)
            directory = inside(work, self._relative(cwd))
            if not directory.is_dir():
                raise SandboxError(f"cwd {cwd!r} is not a directory of the sandbox")
            content = os.open(os.devnull, os.O_RDONLY) if stdin is None else os.memfd_create("stdin")
            ours.callback(os.close, content)
            if stdin is not None:
                with os.fdopen(os.dup(content), "wb") as file:
                    file.write(stdin)
                os.lseek(content, 0, os.SEEK_SET)
            line, environ, where = (
                list(argv),
                {"PATH": bubblewrap.PATH, "HOME": str(work), "TMPDIR": str(files / "tmp")},
                directory,
            )
            environ |= {**env, _MARK: str(files)}
            if self._backend.bwrap is not None:
                line = bubblewrap.command(
                    self._backend.bwrap, argv, home=files, cwd=directory.relative_to(work), env=env,
                    network=self._backend.network, readable=self._backend.readable, status_fd=ends[2],
                    held_by=ends[3] if held else None,
                )  # fmt: skip
                environ, where = {}, Path("/")
            elif shutil.which(argv[0] if "/" not in argv[0] else directory / argv[0], path=environ["PATH"]) is None:
                raise SandboxError(f"{argv[0]!r} cannot be started in the sandbox: No such file, or not a program")
            try:
                return start(
                    room.prelude.before(line), env=environ, cwd=where, files=(content, ends[0], ends[1]),
                    keep=ends[2 : 4 if held else 3] if self.isolated else (), user=room.home.user,
                )  # fmt: skip
            except (OSError, ValueError) as error:
                raise SandboxError(f"{argv[0]!r} cannot be started in the sandbox: {error}") from error

    async def _until_end(
        self, room: Room, starting: "asyncio.Future[subprocess.Popen[bytes]]", timeout_s: float | None, status: int,
        held: Held, door: Door | None,
    ) -> tuple[bool, bubblewrap.Status]:  # fmt: skip
        """Wait for the command's end, and see all of it gone, also when cancelled. Whether its time was up, and bubblewrap's word."""
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([starting])  # which leaves it be when cancelled
                self._running[starting.result().pid] = asyncio.Event()
                async with nullcontext() if door is None else held.serving(door):
                    await exited(starting.result())
        except TimeoutError:
            timed_out = True
        finally:
            process = await starting
            ended = self._running.setdefault(process.pid, asyncio.Event())
            kill_group(process.pid)  # bubblewrap, with which its namespace dies
            await exited(process)
            process.wait()
            told = bubblewrap.Status.parse(held.told + _read(status))
            if not self.isolated:
                await asyncio.to_thread(kill_marked, f"{_MARK}={room.home.files}")
            elif told.first_pid is not None:
                await namespace_gone(told.first_pid)
            del self._running[process.pid]
            ended.set()
        return timed_out, told

    def _ending(
        self, argv: Sequence[str], process: "subprocess.Popen[bytes]", told: bubblewrap.Status, stderr: bytes, *, forced: bool
    ) -> tuple[int | None, int | None]:  # fmt: skip
        """(exit code, signal). SandboxError when the command never began."""
        assert process.returncode is not None
        if forced:
            return None, signal.SIGKILL
        if process.returncode < 0:
            return None, -process.returncode
        if not self.isolated:
            return process.returncode, None
        if told.exit_code is None:
            raise SandboxError(
                f"{argv[0]!r} cannot be started in the sandbox: {stderr.decode(errors='replace').strip()}"
            )
        return told.ending


def _read(status: int) -> bytes:
    with suppress(BlockingIOError):
        return os.read(status, _STATUS_BYTES)
    return b""
