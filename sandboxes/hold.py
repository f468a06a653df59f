"""A command held back in its new namespaces: what it needs is done to its first process before anything of it runs.

In the flow: bubblewrap makes the namespaces and tells the host's id of their first process; the limits are set on that, and its door
(door.py) is opened; then it is let go. Invariant: nothing of the command runs before `let_go`.
"""

import asyncio
import os
from contextlib import suppress
from typing import Final

from rlagent.sandboxes import bubblewrap
from rlagent.sandboxes.reaping import readable

_STATUS_BYTES: Final = 4096


class Hold:
    """`told_to` is for bubblewrap's --json-status-fd, `held_by` for its --block-fd; who starts it closes both."""

    def __init__(self) -> None:
        self._status, self.told_to = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.held_by, self._release = os.pipe2(os.O_CLOEXEC)
        self._told = b""
        self._pid: int | None = None
        self._first = -1  # a descriptor of the first process
        self._is_gone = False

    @property
    def ends(self) -> tuple[int, int]:
        """What bubblewrap gets."""
        return self.told_to, self.held_by

    async def first_pid(self) -> int | None:
        """The first process of the namespaces. None where it never comes so far, or is gone."""
        loop = asyncio.get_running_loop()
        told = loop.create_future()

        def take() -> None:
            more = self._read()
            if not told.done() and (not more or bubblewrap.first_pid(self._told) is not None):
                told.set_result(None)

        loop.add_reader(self._status, take)
        try:
            await told
        finally:
            loop.remove_reader(self._status)
        return self._pid if self._watch() else None

    def let_go(self) -> None:
        """Let the command begin."""
        with suppress(BrokenPipeError):
            os.write(self._release, b"x")

    async def gone(self, within_s: float | None = None) -> None:
        """Wait until the first process is gone; the kernel lets it go only after all others of its namespace."""
        if not self._is_gone and self._watch():
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await readable(self._first)
        self._is_gone = True

    def exit_code(self) -> int | None:
        """How the command ended, as a shell tells it; None when it never began. Once bubblewrap is gone."""
        while self._read():
            pass
        return bubblewrap.exit_code(self._told)

    def close(self) -> None:
        """Close our ends; a command still held is let go, and must have been killed before."""
        for descriptor in (self._status, self._release, self._first):
            if descriptor >= 0:
                os.close(descriptor)

    def _read(self) -> bool:
        """Whether there was something."""
        with suppress(BlockingIOError):
            piece = os.read(self._status, _STATUS_BYTES)
            self._told += piece
            return bool(piece)
        return False

    def _watch(self) -> bool:
        """Whether there is a first process to wait for."""
        if self._first < 0:
            self._read()
            self._pid = bubblewrap.first_pid(self._told)
            with suppress(ProcessLookupError):
                self._first = -1 if self._pid is None else os.pidfd_open(self._pid)
        return self._first >= 0
