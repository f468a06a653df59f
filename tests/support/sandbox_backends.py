"""Sandbox backends for tests that run on each of them."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from rlagent.sandboxes import bubblewrap
from rlagent.sandboxes.base import Backend, Limits
from rlagent.sandboxes.docker import DockerBackend
from rlagent.sandboxes.process_backend import ProcessBackend

BWRAP = shutil.which("bwrap")
HAS_BWRAP = BWRAP is not None and asyncio.run(bubblewrap.refusal(BWRAP)) is None
needs_bwrap = pytest.mark.skipif(not HAS_BWRAP, reason="bubblewrap is not installed, or may not make namespaces here")
MIB = 1024**2
TIGHT = Limits(
    wall_s=20,
    cpu_s=10,
    cpus=1.0,
    memory_bytes=96 * MIB,
    pids=24,
    disk_bytes=16 * MIB,
    file_size_bytes=64 * MIB,
    open_files=64,
)


def process_backend(kind: str, state: Path) -> Backend:
    """`groups`: limits by control groups where they can be written; `users`: by rlimits, with a user for each sandbox."""
    return ProcessBackend(limits=TIGHT, control_groups=kind == "groups", state_directory=state)


def docker_backend(runtime: str, state: Path, engine: Path) -> DockerBackend:
    """Of the tests' engine."""
    return DockerBackend(engine=engine, runtime=runtime, limits=TIGHT, state_directory=state)


def alive(mark: str) -> list[int]:
    """Processes of this machine with `mark` among their arguments. A pid namespace hides none from its parent."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [int(pid)] if mark.encode() in arguments else []
    return found


class Signal:
    """A named pipe in a directory: what a program has come to is an event here, not a guess. It writes `echo > NAME`."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    async def wait(self, timeout_s: float = 60.0) -> None:
        """Until something was written. TimeoutError if nothing is."""
        loop, written = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pipe, written.set)
        try:
            async with asyncio.timeout(timeout_s):
                await written.wait()
        finally:
            loop.remove_reader(self._pipe)
            os.close(self._pipe)
