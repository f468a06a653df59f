"""One command of a process sandbox: its start, its end, and the end of all it started.

In the flow: `start` in a thread of the launcher, in the sandbox's mount namespace; then `until_end` on the event loop, which limits a
command that is held back and lets it go. Invariant: when `until_end` returns or is cancelled, nothing the command started is alive.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlagent.errors import SandboxError
from rlagent.sandboxes import bubblewrap
from rlagent.sandboxes.base import Door
from rlagent.sandboxes.door import serving
from rlagent.sandboxes.ending import code_or_signal
from rlagent.sandboxes.files import inside
from rlagent.sandboxes.hold import Hold
from rlagent.sandboxes.process_backend import ProcessBackend, Room
from rlagent.sandboxes.reaping import kill_group, kill_marked
from rlagent.sandboxes.spawn import exited, limit, standard_input, start

_NAMESPACE_S: Final = 5.0  # a killed namespace is gone within milliseconds
_MARK: Final = "RLAGENT_SANDBOX"  # in the environment of bare commands: what they leave behind is found by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What `exec` was given, and where it is to run."""

    backend: ProcessBackend
    room: Room
    argv: Sequence[str]
    stdin: bytes | None
    env: Mapping[str, str]
    cwd: str
    door: Door | None

    def start(self, out: int, err: int, hold: Hold | None) -> subprocess.Popen[bytes]:
        """Start it, or bubblewrap with it held back. Takes the pipes' ends. SandboxError."""
        files, work = self.room.home.files, self.room.home.files / "work"
        with ExitStack() as ours:
            for end in (out, err, *(() if hold is None else hold.ends)):
                ours.callback(os.close, end)
            directory = inside(work, self.cwd)
            if not directory.is_dir():
                raise SandboxError(f"cwd {self.cwd!r} is not a directory of the sandbox")
            content = standard_input(self.stdin)
            ours.callback(os.close, content)
            if hold is None:
                line, environ = (
                    list(self.argv),
                    {"PATH": bubblewrap.PATH, "HOME": str(work), "TMPDIR": str(files / "tmp")},
                )
                environ |= {**self.env, _MARK: str(files)}
                if shutil.which(line[0] if "/" not in line[0] else directory / line[0], path=environ["PATH"]) is None:
                    raise SandboxError(f"{line[0]!r} cannot be started in the sandbox: No such file, or not a program")
            else:
                line, environ = self._isolated(hold, directory.relative_to(work)), {}
            try:
                with nullcontext() if self.room.prelude or self.room.group is None else self.room.group.entered():
                    return start(
                        line if self.room.prelude is None else self.room.prelude.before(line), env=environ,
                        cwd=directory if hold is None else Path("/"), files=(content, out, err),
                        keep=() if hold is None else hold.ends, user=self.room.home.user,
                    )  # fmt: skip
            except (OSError, ValueError) as error:
                raise SandboxError(f"{self.argv[0]!r} cannot be started in the sandbox: {error}") from error

    async def until_end(
        self, starting: "asyncio.Future[subprocess.Popen[bytes]]", hold: Hold | None, timeout_s: float | None,
        running: dict[int, asyncio.Event],
    ) -> bool:  # fmt: skip
        """Wait for its end, and see all of it gone, also when cancelled. Whether its time was up."""
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([starting])  # which leaves it be when cancelled
                running[starting.result().pid] = asyncio.Event()
                if hold is not None:
                    await self._let_run(hold)
                await exited(starting.result())
        except TimeoutError:
            timed_out = True
        finally:
            process = await starting
            ended = running.setdefault(process.pid, asyncio.Event())
            kill_group(process.pid)  # bubblewrap, with which its namespace dies
            await exited(process)
            if hold is None:
                await asyncio.to_thread(kill_marked, f"{_MARK}={self.room.home.files}")
            else:
                await hold.gone(_NAMESPACE_S)
            process.wait()
            del running[process.pid]
            ended.set()
        return timed_out

    def ending(self, returncode: int, hold: Hold | None, stderr: bytes) -> tuple[int | None, int | None]:
        """(exit code, signal). SandboxError when it never began."""
        if returncode < 0:
            return None, -returncode
        if hold is None:
            return returncode, None
        code = hold.exit_code()
        if code is None:
            why = stderr.decode(errors="replace").strip()
            raise SandboxError(f"{self.argv[0]!r} cannot be started in the sandbox: {why}")
        return code_or_signal(code)

    def _isolated(self, hold: Hold, cwd: Path) -> list[str]:
        assert self.backend.bwrap is not None
        return bubblewrap.command(
            self.backend.bwrap, self.argv, home=self.room.home.files, cwd=cwd, env=self.env, network=self.backend.network,
            readable=self.backend.readable, status_fd=hold.told_to, held_by=hold.held_by,
        )  # fmt: skip

    async def _let_run(self, hold: Hold) -> None:
        """Until all of it is gone, or never began."""
        pid, room = await hold.first_pid(), self.room
        if pid is None:
            return
        if room.prelude is None:
            try:
                limit(pid, room.rlimits)
                if room.group is not None and room.group.takes_in:
                    await asyncio.to_thread(room.group.take_in, pid)
            except OSError as error:
                raise SandboxError(f"{self.argv[0]!r} cannot be put under its limits: {error}") from error
        async with nullcontext() if self.door is None else serving(pid, self.door):
            hold.let_go()
            await hold.gone()
