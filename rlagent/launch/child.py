"""A child process that is called over a pipe and dies with its parent.

The child is `python -m MODULE FD PARENT_PID`: no re-import of the parent's main module, no inherited state. Both ends talk
through a `multiprocessing.connection.Connection`, between our own processes on one machine only.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1
_TERMINATE_GRACE_S = 5.0  # a child that holds torch needs about a second to leave


class Child:
    """A running child: its process and our end of the pipe."""

    def __init__(self, name: str, module: str, *, log: Path, environ: Mapping[str, str] | None = None) -> None:
        """Start `python -m module`; its output is appended to `log`, `environ` is added to ours."""
        self.name = name
        self.log = log
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environ or {})},
                start_new_session=True,  # Ctrl-C goes to the driver, which ends its children in order
            )
        self.connection = Connection(ours.detach())

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def fate(self) -> str:
        """In words, how the child ended, with the end of its log."""
        code = self.process.wait()
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        tail = self.log.read_text(errors="replace")[-2000:].strip()
        return f"{self.name} {how}; the end of {self.log}:\n{tail}"

    def close(self) -> None:
        """End the child: closing the pipe asks it to leave, then SIGTERM, then SIGKILL."""
        self.connection.close()
        for harder in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(timeout=_TERMINATE_GRACE_S)
                return
            except subprocess.TimeoutExpired:
                harder()
        self.process.wait()

    def kill(self) -> None:
        """End the child at once."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is gone, however that happened (Linux; elsewhere a no-op)."""
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value)
    if os.getppid() != parent_pid:  # it went before the request was in place
        os._exit(1)


def adopt_connection(argv: list[str]) -> Connection:
    """In a child's `__main__`: tie its life to the parent's and return its end of the pipe."""
    descriptor, parent_pid = int(argv[1]), int(argv[2])
    die_with_parent(parent_pid)
    return Connection(descriptor)
