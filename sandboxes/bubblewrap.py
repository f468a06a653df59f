"""The command line that puts a command into namespaces of its own, and what bubblewrap then says about it."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

WORK: Final = "/work"  # the work directory, as a command in a namespace sees it
PATH: Final = "/usr/local/bin:/usr/bin:/bin"
# What of the host a command may read. Of /etc/ssl only the certificates: its private keys lie beside them.
_SYSTEM: Final = (
    "usr", "bin", "sbin", "lib", "lib64", "lib32", "opt", "etc/alternatives", "etc/ld.so.cache", "etc/ssl/certs", "etc/passwd",
)  # fmt: skip
_FIRST_PID: Final = re.compile(rb'"child-pid": *(\d+)[^\d]')
_ISOLATION: Final = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv")


async def refusal(bwrap: str, user: int = 0) -> str | None:
    """What bubblewrap says where it cannot make namespaces (a container without user namespaces, an old kernel); None where it can.

    user: as whom it is started, if not as ourselves.
    """
    line = [bwrap, *_ISOLATION, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "true"]
    done = await asyncio.to_thread(  # not asyncio's own: uvloop, which rollout workers run on, cannot change the user
        subprocess.run, line, stdin=subprocess.DEVNULL, capture_output=True, check=False,
        user=user or None, group=user or None, extra_groups=[] if user else None,
    )  # fmt: skip
    return None if done.returncode == 0 else done.stderr.decode(errors="replace").strip()


def command(
    bwrap: str, argv: Sequence[str], *, home: Path, cwd: Path, env: Mapping[str, str], network: bool,
    readable: Sequence[Path], status_fd: int, held_by: int,
) -> list[str]:  # fmt: skip
    """`home` has the directories work, tmp and shm, all that a command can write to; `cwd` is relative to work.

    readable: places of the host that it sees besides the system's. status_fd: see `first_pid` and `exit_code`. held_by: a descriptor that
    must be written to before the command begins.
    """
    line = [bwrap, *_ISOLATION, *(["--share-net"] if network else [])]
    # Set inside: an LD_PRELOAD of the caller's must not act on bubblewrap itself.
    for name, value in {"PATH": PATH, "HOME": WORK, **env}.items():
        line += ["--setenv", name, value]
    line += [*_system(network), "--proc", "/proc", "--dev", "/dev"]
    line += ["--bind", str(home / "work"), WORK, "--bind", str(home / "tmp"), "/tmp"]
    line += ["--bind", str(home / "shm"), "/dev/shm"]  # in memory it would be bounded by the machine's only
    for place in readable:
        line += ["--ro-bind", str(place), str(place)]
    # To a sandbox that root opened, /proc/sys is the host's own: the kernel asks for root's id there, and for no capability.
    for sealed in ("/proc", "/dev", "/"):
        line += ["--remount-ro", sealed]
    line += ["--block-fd", str(held_by), "--json-status-fd", str(status_fd)]
    return [*line, "--chdir", f"{WORK}/{cwd}", "--", *argv]


@cache
def _system(network: bool) -> tuple[str, ...]:
    """The mounts of what a command may read of the host, as it is when the first command starts."""
    line: list[str] = []
    for name in (*_SYSTEM, *(("etc/resolv.conf", "etc/hosts") if network else ())):
        host = Path("/", name)
        if host.is_symlink():
            line += ["--symlink", os.readlink(host), str(host)]
        elif host.exists():
            line += ["--ro-bind", str(host), str(host)]
    return tuple(line)


def first_pid(told: bytes) -> int | None:
    """The host's id of the namespaces' first process, as soon as bubblewrap has told it: lines come in pieces."""
    found = _FIRST_PID.search(told)
    return None if found is None else int(found[1])


def exit_code(told: bytes) -> int | None:
    """How the command ended, as a shell tells it. None when it never began. One JSON document a line; the last may be cut."""
    found: dict[str, int] = {}
    for line in told[: told.rfind(b"\n") + 1].splitlines():
        found |= json.loads(line)
    return found.get("exit-code")
