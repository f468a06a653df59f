"""The process sandbox: commands on this machine, in namespaces of their own where bubblewrap (`bwrap`) works.

Each exec is a namespace of its own over one directory, so processes end with their exec and files stay. Invariant: a sandbox that cannot isolate is
not made, unless its maker said allow_unisolated.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import OUTPUT_LIMIT_BYTES, READ_LIMIT_BYTES, ExecResult, Limits
from rlagent.sandboxes.bubblewrap import OWN_DIRECTORIES, WORKSPACE, bubblewrap_argv
from rlagent.sandboxes.files import ContainedFiles, remove_tree, split_path
from rlagent.sandboxes.namespace import Namespace
from rlagent.sandboxes.running import Running
from rlagent.sandboxes.shell import limited_argv

_NOBODY: Final = 65534  # by convention the uid and gid that own nothing
_SIGNALS: Final = frozenset(int(number) for number in signal.valid_signals())
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ProcessSandbox:
    """A `Sandbox` of this machine's processes. `isolated` says, once entered, whether it has namespaces; if not, `reason` says why.

    In namespaces a program that exits with 128 + n by itself reads like one ended by signal n.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        network: bool = False,
        allow_unisolated: bool = False,
        environ: Mapping[str, str] | None = None,
        readable: Sequence[Path] = (),
        bwrap: str = "bwrap",
    ) -> None:
        """`environ` is in every command's environment. `readable`: host directories to see read-only, besides the system's."""
        self._limits = limits or Limits()
        self._network = network
        self._allow_unisolated = allow_unisolated
        self._environ = dict(environ or {})
        self._readable = tuple(path.absolute() for path in readable)
        self._bwrap = bwrap
        self._user = _NOBODY if os.geteuid() == 0 else None  # root is not limited by rlimits, and owns the host's files
        self._root: Path | None = None
        self._running: set[Running] = set()
        self.isolated = False
        self.reason = "it was not entered"

    async def __aenter__(self) -> Self:
        if self._root is not None:
            raise SandboxError("this sandbox was entered before; make a new one")
        if sys.platform != "linux":
            raise SandboxError(f"the process sandbox needs Linux; this is {sys.platform}")
        for path in self._readable:
            if not path.exists():
                raise SandboxError(f"readable path {path} does not exist")
        self._root = Path(tempfile.mkdtemp(prefix="rlagent-sandbox-"))
        try:
            for directory in (self._root, *(self._root / name for name in OWN_DIRECTORIES)):
                directory.mkdir(mode=0o700, exist_ok=True)
                if self._user is not None:
                    os.chown(directory, self._user, self._user)
            await self._choose_isolation()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> ExecResult:
        """Run a command to its end or the timeout; see Sandbox.exec."""
        if not argv:
            raise SandboxError("exec needs at least a program's name")
        started, timed_out = time.monotonic(), False
        running = self._start(argv, stdin, env or {}, cwd, output_limit_bytes)
        self._running.add(running)
        code: int | None = None
        try:
            async with asyncio.timeout(self._limits.wall_s if timeout_s is None else timeout_s):
                await running.wait()
        except TimeoutError:
            timed_out = True
        finally:
            code = await running.finish()
            self._running.discard(running)
        if self._root is None:
            raise SandboxError(f"the sandbox was closed while {argv[0]!r} ran")
        if code is None and not timed_out:
            raise SandboxError(
                f"bubblewrap could not start {argv[0]!r}: {running.stderr.data.decode(errors='replace')}"
            )
        exit_code, ended_by = (None, int(signal.SIGKILL)) if timed_out or code is None else self._ending(code)
        return ExecResult(
            exit_code=exit_code,
            signal=ended_by,
            timed_out=timed_out,
            truncated=running.stdout.truncated or running.stderr.truncated,
            stdout=bytes(running.stdout.data),
            stderr=bytes(running.stderr.data),
            wall_s=time.monotonic() - started,
        )

    async def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        """A regular file's bytes; see Sandbox.read."""
        return await asyncio.to_thread(self._files().read, path, limit_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file; see Sandbox.write."""
        await asyncio.to_thread(self._files().write, path, data)

    async def upload(self, directory: Path) -> None:
        """Copy a host directory's content; see Sandbox.upload."""
        await asyncio.to_thread(self._files().upload, directory)

    async def close(self) -> None:
        """End what runs and delete the directory."""
        root, self._root = self._root, None
        for running in tuple(self._running):
            running.kill()
            await running.ended.wait()
        if root is not None:
            await asyncio.to_thread(remove_tree, root)

    async def _choose_isolation(self) -> None:
        """Prove that bubblewrap works here, by a command; containers and kernels often forbid what it needs."""
        if shutil.which(self._bwrap) is None:
            self.reason = f"there is no program {self._bwrap!r}"
        else:
            self.isolated, self.reason = True, ""
            try:
                result = await self.exec(["true"])
                failure = "" if result.ok else result.stderr.decode(errors="replace") or f"`true` ended as {result}"
            except SandboxError as error:
                failure = str(error)
            self.isolated, self.reason = not failure, failure
        if not self.isolated and not self._allow_unisolated:
            raise SandboxError(
                f"no isolation: {self.reason.strip()}. Install bubblewrap (Debian: apt install bubblewrap) on a kernel with user namespaces, "
                "or pass allow_unisolated=True to run commands with this machine's network and files open to them"
            )

    def _start(
        self, argv: Sequence[str], stdin: bytes | None, env: Mapping[str, str], cwd: str, output_limit_bytes: int
    ) -> Running:
        root = self._entered()
        inside = "/".join(split_path(cwd))
        limited = limited_argv(argv, self._limits, limit_pids=self.isolated)
        environ = self._variables(root, env)
        namespace = Namespace() if self.isolated else None
        try:
            if namespace is not None:
                limited = bubblewrap_argv(
                    self._bwrap,
                    limited,
                    root=root,
                    cwd=f"{WORKSPACE}/{inside}",
                    environ=environ,
                    network=self._network,
                    readable=self._readable,
                    status_fd=namespace.status_fd,
                    gate_fd=namespace.gate_fd,
                )
            return Running(
                limited,
                stdin=stdin,
                environ=environ if namespace is None else {"PATH": os.environ.get("PATH", os.defpath)},
                cwd=root / "workspace" / inside if namespace is None else root,
                user=self._user,
                namespace=namespace,
                output_limit_bytes=output_limit_bytes,
            )
        except (OSError, ValueError) as error:
            if namespace is not None:
                namespace.close()
            raise SandboxError(f"cannot start {argv[0]!r} in {cwd!r}: {error}") from error

    def _variables(self, root: Path, env: Mapping[str, str]) -> dict[str, str]:
        own = {name: inside if self.isolated else str(root / name) for name, inside in OWN_DIRECTORIES.items()}
        base = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": own["workspace"],
            "TMPDIR": own["tmp"],
        }
        environ = {**base, **self._environ, **env}
        for name in environ:
            if not _VARIABLE.fullmatch(name):
                raise SandboxError(f"environment variable {name!r} is not a name a shell takes: letters, digits and _")
        return environ

    def _ending(self, code: int) -> tuple[int | None, int | None]:
        """(exit code, signal) of a return code: -n for signal n of a child, 128 + n from inside namespaces."""
        if self.isolated and code - 128 in _SIGNALS:
            return None, code - 128
        return (code, None) if code >= 0 else (None, -code)

    def _files(self) -> ContainedFiles:
        return ContainedFiles(self._entered() / "workspace", owner=self._user)

    def _entered(self) -> Path:
        if self._root is None:
            raise SandboxError("the sandbox is closed, or was not entered: use `async with`")
        return self._root
