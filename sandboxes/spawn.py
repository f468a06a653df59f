"""Starting a command's process under its limits, and waiting for its end without a thread of its own.

The child is started by vfork, which a function of ours between fork and exec would forbid, and forking a large process is what
costs. So a command that bubblewrap holds back is limited while it waits (`limit`, cgroups.py), and before any other a shell joins the
groups, sets the rlimits and becomes the command (`Prelude`). A number of processes that an rlimit bounds must be set by the shell: the
kernel counts them over a user's namespaces only as far as the bound is older than these.
"""

import os
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from rlagent.sandboxes.base import Limits
from rlagent.sandboxes.reaping import readable

# Of each shell: the option and unit of processes and file sizes. dash's are those of every small shell.
_BASH: Final = ("u", 1024)
_DASH: Final = ("p", 512)


def rlimits(limits: Limits, *, address_space: bool, processes: bool) -> dict[int, int]:
    """Resource -> value. Those of address space and number of processes only where they stand in for control groups."""
    wanted = {
        resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: limits.cpu_s, resource.RLIMIT_FSIZE: limits.file_size_bytes,
        resource.RLIMIT_NOFILE: limits.open_files, resource.RLIMIT_AS: limits.memory_bytes if address_space else None,
        resource.RLIMIT_NPROC: limits.pids if processes else None,
    }  # fmt: skip
    ours = {which: resource.getrlimit(which)[1] for which in wanted}
    return {
        which: value if ours[which] == resource.RLIM_INFINITY else min(value, ours[which])
        for which, value in wanted.items()
        if value is not None
    }


def limit(pid: int, bounds: Mapping[int, int]) -> None:
    """Set the rlimits of a process that does nothing yet."""
    with suppress(ProcessLookupError):
        for which, value in bounds.items():
            resource.prlimit(pid, which, (value, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prelude:
    """The command line that stands before a command's own."""

    shell: str
    script: str

    @classmethod
    def make(cls, rlimits: Mapping[int, int], doors: Sequence[Path]) -> "Prelude":
        """Join the groups behind `doors`, then set the rlimits."""
        shell, (processes, block) = _shell()
        options = {
            resource.RLIMIT_CORE: ("c", 1), resource.RLIMIT_CPU: ("t", 1), resource.RLIMIT_FSIZE: ("f", block),
            resource.RLIMIT_NOFILE: ("n", 1), resource.RLIMIT_AS: ("v", 1024), resource.RLIMIT_NPROC: (processes, 1),
        }  # fmt: skip
        lines = ["set -e", *(f'echo 0 > "{door}"' for door in doors)]
        for which, value in rlimits.items():
            option, unit = options[which]
            lines.append(f"ulimit -{option} {value // unit}")
        return cls(shell=shell, script="\n".join([*lines, 'exec "$@"']))

    def before(self, argv: Sequence[str]) -> list[str]:
        """The whole command line."""
        return [self.shell, "-c", self.script, "sandbox", *argv]


@cache
def _shell() -> tuple[str, tuple[str, int]]:
    """The smallest shell there is, and the option and unit of its ulimit."""
    dash, bash = shutil.which("dash"), shutil.which("bash")
    return (bash, _BASH) if bash is not None and dash is None else (dash or "/bin/sh", _DASH)


def standard_input(content: bytes | None) -> int:
    """A descriptor that a command reads `content` from."""
    if content is None:
        return os.open(os.devnull, os.O_RDONLY)
    descriptor = os.memfd_create("stdin")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


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
    if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:  # noqa: ASYNC222 (does not wait)
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        await readable(descriptor)
    finally:
        os.close(descriptor)
