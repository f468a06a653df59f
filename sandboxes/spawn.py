"""Starting a command's process under its limits, and waiting for its end without a thread of its own.

A shell joins the sandbox's control groups, sets the rlimits and becomes the command: the child is started by vfork, which a function
of ours between fork and exec would forbid, and forking a large process is what costs.
"""

import asyncio
import os
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from rlagent.sandboxes.base import Limits

# Of each shell: the option and unit of processes and file sizes. dash's are those of every small shell.
_BASH: Final = ("u", 1024)
_DASH: Final = ("p", 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prelude:
    """The command line that stands before a command's own."""

    shell: str
    script: str

    @classmethod
    def make(cls, limits: Limits, *, doors: Sequence[Path], address_space: bool, processes: bool) -> "Prelude":
        """Join the groups behind `doors`; rlimits of address space and number of processes only where they stand in for groups."""
        shell, (option, block) = _shell()
        hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = limits.open_files if limits.open_files is None else min(limits.open_files, hard_files)
        bounds = [
            ("c", 0),
            ("t", limits.cpu_s),
            ("f", None if limits.file_size_bytes is None else limits.file_size_bytes // block),
            ("n", files),
            ("v", limits.memory_bytes // 1024 if address_space and limits.memory_bytes is not None else None),
            (option, limits.pids if processes else None),
        ]
        lines = ["set -e", *(f'echo 0 > "{door}"' for door in doors)]
        lines += [f"ulimit -{name} {value}" for name, value in bounds if value is not None]
        return cls(shell=shell, script="\n".join([*lines, 'exec "$@"']))

    def before(self, argv: Sequence[str]) -> list[str]:
        """The whole command line."""
        return [self.shell, "-c", self.script, "sandbox", *argv]


@cache
def _shell() -> tuple[str, tuple[str, int]]:
    """The smallest shell there is, and the option and unit of its ulimit."""
    dash, bash = shutil.which("dash"), shutil.which("bash")
    return (bash, _BASH) if bash is not None and dash is None else (dash or "/bin/sh", _DASH)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    files: tuple[int, int, int],
    keep: Sequence[int],
    user: int,
) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, as `user` if that is not 0. OSError, ValueError."""
    # None, unlike our own user's number, leaves vfork in use.
    return subprocess.Popen(
        argv, cwd=cwd, env=env, stdin=files[0], stdout=files[1], stderr=files[2], pass_fds=keep, start_new_session=True,
        user=user or None, group=user or None, extra_groups=[] if user else None,
    )  # fmt: skip


async def exited(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end. Its status is not taken, so its id stays its own until `process.wait()`."""
    descriptor = os.pidfd_open(process.pid)
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
