"""A sandbox of processes on this machine: bubblewrap's namespaces, rlimits, a timeout, capped output.

Every command runs in its own user, pid, mount, ipc, uts and (unless network=True) net namespace, with the system read-only and
only its own directories writable. Invariant: when `exec` returns or is cancelled, nothing the command started is alive. Without
bubblewrap far less holds: see README.md.
"""

import asyncio
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rlagent.errors import SandboxError
from rlagent.sandboxes import bubblewrap
from rlagent.sandboxes.base import DEFAULT_OUTPUT_LIMIT_BYTES, ExecResult, Limits
from rlagent.sandboxes.capture import Capture
from rlagent.sandboxes.files import copy_tree, delete_tree, inside, read_file, write_file
from rlagent.sandboxes.reaping import kill_group, kill_marked, namespace_gone

_STATUS_BYTES: Final = 4096
_DRAIN_S: Final = 5.0  # for output still in a pipe once all that is known of a command is dead
_MARK: Final = "RLAGENT_SANDBOX"  # in the environment of bare commands: what they leave behind is found by it
_MEMORY_WORDS: Final = (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc", b"out of memory")


class ProcessSandbox:
    """Commands in namespaces of their own over one work directory. See rlagent.sandboxes.base.Sandbox."""

    def __init__(self, *, limits: Limits | None = None, network: bool = False, allow_unisolated: bool = False) -> None:
        self._limits = limits or Limits()
        self._network = network
        self._allow_unisolated = allow_unisolated
        self._bwrap: str | None = None
        self._home: Path | None = None
        self._running: dict[asyncio.subprocess.Process, asyncio.Event] = {}  # set when nothing of it is left

    @property
    def isolated(self) -> bool:
        """Whether commands run in namespaces of their own. Known once the sandbox is open."""
        return self._bwrap is not None

    @property
    def root(self) -> Path:
        """The work directory on the host. SandboxError when the sandbox is not open."""
        return self._opened / "work"

    async def __aenter__(self) -> Self:
        self._bwrap = shutil.which("bwrap")
        reason = "is not installed" if self._bwrap is None else await bubblewrap.refusal(self._bwrap)
        if reason is not None:
            self._bwrap = None
            if not self._allow_unisolated:
                raise SandboxError(
                    f"bubblewrap (bwrap) {reason}; commands could reach the network and the host's files. Install the package "
                    "'bubblewrap' on a host that allows user namespaces, or give allow_unisolated=True"
                )
        self._home = await asyncio.to_thread(_make_home)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End what still runs, delete the directories."""
        home, self._home = self._home, None
        for process, ended in list(self._running.items()):
            kill_group(process.pid)
            await ended.wait()
        if home is not None:
            await asyncio.to_thread(delete_tree, home)

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes | None = None, env: Mapping[str, str] | None = None, cwd: str = ".",
        timeout_s: float | None = None, output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
    ) -> ExecResult:  # fmt: skip
        """Run a command to its end."""
        home = self._opened
        bounds = [bound for bound in (timeout_s, self._limits.wall_s) if bound is not None]
        out, err, status = Capture(output_limit_bytes), Capture(output_limit_bytes), Capture(_STATUS_BYTES)
        began = time.perf_counter()
        timed_out = False
        try:
            process = await self._start(home, argv, stdin, env or {}, cwd, (out, err, status))
            ended = self._running[process] = asyncio.Event()
            try:
                async with asyncio.timeout(min(bounds, default=None)):
                    await process.wait()
            except TimeoutError:
                timed_out = True
            finally:
                await self._end(home, process, status)
                del self._running[process]
                ended.set()
        finally:
            for capture in (out, err, status):
                await capture.close(_DRAIN_S)
        code, killed = self._ending(argv, process, bubblewrap.Status.parse(status.data), err.data, forced=timed_out)
        return ExecResult(
            exit_code=code,
            signal=killed,
            timed_out=timed_out,
            out_of_memory=not timed_out and code != 0 and any(words in err.data for words in _MEMORY_WORDS),
            truncated=out.truncated or err.truncated,
            stdout=out.data,
            stderr=err.data,
            wall_s=time.perf_counter() - began,
        )

    async def read(self, path: str) -> bytes:
        """A file's content."""
        return await asyncio.to_thread(read_file, self.root, self._relative(path))

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file."""
        await asyncio.to_thread(write_file, self.root, self._relative(path), data)

    async def upload(self, directory: Path, path: str = ".") -> None:
        """Copy a directory's content in."""
        await asyncio.to_thread(copy_tree, self.root, directory, self._relative(path))

    @property
    def _opened(self) -> Path:
        if self._home is None:
            raise SandboxError("the sandbox is not open; use it as `async with ProcessSandbox() as sandbox:`")
        return self._home

    def _relative(self, path: str) -> str:
        """A path as commands see it, relative to the work directory."""
        seen = Path(path)
        work = Path(bubblewrap.WORK)
        return str(seen.relative_to(work)) if self.isolated and seen.is_relative_to(work) else path

    async def _start(
        self, home: Path, argv: Sequence[str], stdin: bytes | None, env: Mapping[str, str], cwd: str,
        captures: tuple[Capture, Capture, Capture],
    ) -> asyncio.subprocess.Process:  # fmt: skip
        if not argv:
            raise SandboxError("argv is empty; give a command and its arguments")
        work = home / "work"
        directory = inside(work, self._relative(cwd))
        if not directory.is_dir():
            raise SandboxError(f"cwd {cwd!r} is not a directory of the sandbox")
        with ExitStack() as ours:
            content = ours.enter_context(tempfile.TemporaryFile())
            content.write(stdin or b"")
            content.seek(0)
            ends = []
            for capture in captures:
                ends.append(await capture.open())
                ours.callback(os.close, ends[-1])
            line, environ = list(argv), {"PATH": bubblewrap.PATH, "HOME": str(work), "TMPDIR": str(home / "tmp")}
            environ |= {**env, _MARK: str(home)}
            if self._bwrap is not None:
                line = bubblewrap.command(
                    self._bwrap, argv, home=home, cwd=directory.relative_to(work), env=env,
                    network=self._network, status_fd=ends[2],
                )  # fmt: skip
                environ = {}
            try:
                return await asyncio.create_subprocess_exec(
                    *line, cwd=directory, env=environ, stdin=content, stdout=ends[0], stderr=ends[1],
                    pass_fds=(ends[2],) if self.isolated else (), start_new_session=True, preexec_fn=_limiter(self._limits),
                )  # fmt: skip
            except (OSError, ValueError) as error:
                raise SandboxError(f"{argv[0]!r} cannot be started in the sandbox: {error}") from error

    async def _end(self, home: Path, process: asyncio.subprocess.Process, status: Capture) -> None:
        """Kill what is left of a command, and see it gone."""
        kill_group(process.pid)  # bubblewrap, with which its namespace dies
        await process.wait()
        if not self.isolated:
            await asyncio.to_thread(kill_marked, f"{_MARK}={home}")
            return
        await status.close(_DRAIN_S)
        first_pid = bubblewrap.Status.parse(status.data).first_pid
        if first_pid is not None:
            await namespace_gone(first_pid)

    def _ending(
        self, argv: Sequence[str], process: asyncio.subprocess.Process, status: bubblewrap.Status, stderr: bytes, *, forced: bool
    ) -> tuple[int | None, int | None]:  # fmt: skip
        """(exit code, signal). SandboxError when the command never began."""
        assert process.returncode is not None
        if forced:
            return None, signal.SIGKILL
        if process.returncode < 0:
            return None, -process.returncode
        if not self.isolated:
            return process.returncode, None
        if status.exit_code is None:
            raise SandboxError(
                f"{argv[0]!r} cannot be started in the sandbox: {stderr.decode(errors='replace').strip()}"
            )
        return status.ending


def _make_home() -> Path:
    """New directories for a sandbox, by their real path: paths of files are compared with it."""
    home = Path(tempfile.mkdtemp(prefix="rlagent-sandbox-")).resolve()
    for name in ("work", "tmp", "shm"):
        (home / name).mkdir()
    return home


def _limiter(limits: Limits) -> Callable[[], None]:
    """Sets the rlimits in the child, before the command (and bubblewrap) starts."""
    chosen = [
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_size_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, limits.pids if os.geteuid() != 0 else None),  # it does not bind root
        (resource.RLIMIT_CORE, 0),
    ]

    def apply() -> None:
        for which, value in chosen:
            if value is not None:
                resource.setrlimit(which, (value, value))

    return apply
