"""Ending what a command started: by process group, by pid namespace, by a mark in the environment."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_NAMESPACE_S: Final = (
    5.0  # a killed namespace is gone within milliseconds; bounded in case its id names something else by now
)
_PASS_S: Final = 0.01


def kill_group(pid: int) -> None:
    """Kill a process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def namespace_gone(first_pid: int) -> None:
    """Wait until the first process of a killed pid namespace is gone; the kernel lets it go only after all others."""
    try:
        process = os.pidfd_open(first_pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(process, gone.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(_NAMESPACE_S):
                await gone.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)


def kill_marked(mark: str) -> None:
    """Kill the processes with this NAME=VALUE in their environment, pass by pass until there are none."""
    while found := [pid for pid in _processes() if _is_marked(pid, mark.encode())]:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PASS_S)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if Path("/proc").is_dir() else []


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or of another user
        return False
