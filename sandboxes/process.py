"""A sandbox of processes on this machine: bubblewrap's namespaces, rlimits, a timeout, capped output.

Every command runs in its own pid, mount, ipc, uts and (unless network=True) net namespace, with the system read-only and
only the work directory writable; when its first process ends, the kernel ends the rest. Without bubblewrap nothing of that
holds: see README.md.
"""

import asyncio
import os
import resource
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import DEFAULT_OUTPUT_LIMIT_BYTES, DEFAULT_TIMEOUT_S, ExecResult, Limits

_WORK: Final = "/work"  # the work directory, as a command in a namespace sees it
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_READ_BYTES: Final = 65536
_MEMORY_WORDS: Final = (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc", b"out of memory")
# What of the host a command may read.
_SYSTEM: Final = (
    "usr",
    "bin",
    "sbin",
    "lib",
    "lib64",
    "lib32",
    "etc/alternatives",
    "etc/ld.so.cache",
    "etc/ssl",
    "etc/passwd",
    "opt",
)


class ProcessSandbox:
    """Commands in namespaces of their own over one work directory. See rlagent.sandboxes.base.Sandbox."""

    def __init__(self, *, limits: Limits | None = None, network: bool = False, allow_unisolated: bool = False) -> None:
        self._limits = limits or Limits()
        self._network = network
        self._bwrap = shutil.which("bwrap")
        if self._bwrap is None and not allow_unisolated:
            raise SandboxError(
                "bubblewrap (bwrap) is not installed, so commands could reach the network and the host's files; install the "
                "package 'bubblewrap', or give allow_unisolated=True"
            )
        self._root: Path | None = None

    @property
    def isolated(self) -> bool:
        """Whether commands run in namespaces of their own."""
        return self._bwrap is not None

    @property
    def root(self) -> Path:
        """The work directory on the host. SandboxError when the sandbox is not open."""
        if self._root is None:
            raise SandboxError("the sandbox is not open; use it as `async with ProcessSandbox() as sandbox:`")
        return self._root

    async def __aenter__(self) -> Self:
        self._root = _make_root()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Delete the work directory."""
        root, self._root = self._root, None
        if root is not None:
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes | None = None, env: Mapping[str, str] | None = None, cwd: str = ".",
        timeout_s: float = DEFAULT_TIMEOUT_S, output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES,
    ) -> ExecResult:  # fmt: skip
        """Run a command to its end."""
        start = time.perf_counter()
        process = await self._start(argv, stdin=stdin, env=env or {}, cwd=cwd)
        assert process.stdout is not None
        assert process.stderr is not None
        reading = asyncio.gather(
            _read(process.stdout, output_limit_bytes), _read(process.stderr, output_limit_bytes), _feed(process, stdin)
        )
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            _kill_group(process.pid)  # the rest of a command whose first process ended, or all of it
            await process.wait()
        (stdout, cut_out), (stderr, cut_err), _ = await reading
        code, killed = _ending(process.returncode, in_namespace=self.isolated)
        return ExecResult(
            exit_code=None if timed_out else code,
            signal=signal.SIGKILL if timed_out else killed,
            timed_out=timed_out,
            out_of_memory=not timed_out and code != 0 and any(words in stderr for words in _MEMORY_WORDS),
            truncated=cut_out or cut_err,
            stdout=stdout,
            stderr=stderr,
            wall_s=time.perf_counter() - start,
        )

    async def read(self, path: str) -> bytes:
        """A file's content."""
        try:
            return await asyncio.to_thread(self._inside(path).read_bytes)
        except OSError as error:
            raise SandboxError(f"{path!r} cannot be read: {error.strerror}") from error

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file."""
        target = self._inside(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(target.write_bytes, data)
        except OSError as error:
            raise SandboxError(f"{path!r} cannot be written: {error.strerror}") from error

    async def upload(self, directory: Path, path: str = ".") -> None:
        """Copy a directory's content in."""
        target = self._inside(path)

        def links(where: str, names: list[str]) -> list[str]:
            return [name for name in names if stat.S_ISLNK((Path(where) / name).lstat().st_mode)]

        try:
            await asyncio.to_thread(shutil.copytree, directory, target, ignore=links, dirs_exist_ok=True)
        except OSError as error:
            raise SandboxError(f"{str(directory)!r} cannot be uploaded: {error}") from error

    async def _start(
        self, argv: Sequence[str], *, stdin: bytes | None, env: Mapping[str, str], cwd: str
    ) -> asyncio.subprocess.Process:
        if not argv:
            raise SandboxError("argv is empty; give a command and its arguments")
        directory = self._inside(cwd)
        if not directory.is_dir():
            raise SandboxError(f"cwd {cwd!r} is not a directory of the sandbox")
        try:
            return await asyncio.create_subprocess_exec(
                *self._command(argv, directory, env),
                cwd=directory,
                env=None if self.isolated else {"PATH": _PATH, "HOME": str(self.root), **env},
                stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_limiter(self._limits),
            )
        except (OSError, ValueError) as error:
            raise SandboxError(f"{argv[0]!r} cannot be started in the sandbox: {error}") from error

    def _inside(self, path: str) -> Path:
        """The host's path of a sandbox path; symbolic links, which a command may have made, are followed before it is judged."""
        relative = path.removeprefix(_WORK).lstrip("/") if path.startswith(_WORK) and self.isolated else path
        resolved = (self.root / relative).resolve()
        if not resolved.is_relative_to(self.root):
            raise SandboxError(f"path {path!r} leads outside the sandbox")
        return resolved

    def _command(self, argv: Sequence[str], directory: Path, env: Mapping[str, str]) -> list[str]:
        if self._bwrap is None:
            return list(argv)
        command = [
            self._bwrap,
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--clearenv",
        ]
        command += ["--share-net"] if self._network else []
        # Set inside: an LD_PRELOAD of the caller's must not act on bubblewrap itself.
        for name, value in {"PATH": _PATH, "HOME": _WORK, **env}.items():
            command += ["--setenv", name, value]
        for name in (*_SYSTEM, *(("etc/resolv.conf",) if self._network else ())):
            host = Path("/", name)
            if host.is_symlink():
                command += ["--symlink", os.readlink(host), str(host)]
            elif host.exists():
                command += ["--ro-bind", str(host), str(host)]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(self.root), _WORK]
        return [*command, "--chdir", f"{_WORK}/{directory.relative_to(self.root)}", "--", *argv]


def _make_root() -> Path:
    """A new directory, by its real path: the paths of its files are compared with it."""
    return Path(tempfile.mkdtemp(prefix="rlagent-sandbox-")).resolve()


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


async def _read(stream: asyncio.StreamReader, limit: int) -> tuple[bytes, bool]:
    """The first `limit` bytes, and whether there were more; the rest is read and thrown away, so that no writer blocks."""
    kept = bytearray()
    truncated = False
    while piece := await stream.read(_READ_BYTES):
        room = limit - len(kept)
        kept += piece[:room]
        truncated |= len(piece) > room
    return bytes(kept), truncated


async def _feed(process: asyncio.subprocess.Process, data: bytes | None) -> None:
    if process.stdin is None or data is None:
        return
    try:
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        return  # a command need not read its input


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _ending(returncode: int | None, *, in_namespace: bool) -> tuple[int | None, int | None]:
    """(exit code, signal). bubblewrap reports a signal of the command as 128 + its number."""
    assert returncode is not None
    if returncode < 0:
        return None, -returncode
    if in_namespace and returncode > 128 and returncode - 128 in signal.valid_signals():
        return None, returncode - 128
    return returncode, None
