"""Ending what a command started, by process group or by a mark in the environment; and waiting for descriptors."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_PASS_S: Final = 0.01


def kill_group(pid: int) -> None:
    """Kill a process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def readable(descriptor: int) -> None:
    """Wait until there is something to read, or, of a process's descriptor, until it has ended."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, set_ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def kill_marked(mark: str) -> None:
    """Kill the processes with this NAME=VALUE in their environment, pass by pass until two in a row find none: one that is about to
    become another program shows no environment for a moment.
    """
    clean = 0
    while clean < 2:
        found = [pid for pid in _processes() if _is_marked(pid, mark.encode())]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        clean = 0 if found else clean + 1
        if clean < 2:
            time.sleep(_PASS_S)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if Path("/proc").is_dir() else []


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or of another user
        return False
