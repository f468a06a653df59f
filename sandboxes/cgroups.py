"""Limits of all processes of a sandbox together, by control groups of version 1 or 2, where they can be written.

A sandbox has one group (in version 1: one in each hierarchy), below one of its owner, below the group this process is in. A command
joins it before it becomes bubblewrap, so nothing of it ever runs outside.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlagent.sandboxes.base import Limits

_PERIOD_US: Final = 100_000
_EMPTY_S: Final = 5.0  # a killed process leaves its group within milliseconds
_PASS_S: Final = 0.005
_CONTROLLERS: Final = ("memory", "pids", "cpu")


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Controllers that can be written here: name -> our own group's directory."""

    version: int
    own: dict[str, Path]

    @classmethod
    def find(cls, mounts: str | None = None, memberships: str | None = None) -> "Cgroups":
        """Those of this process (given: the text of /proc/self/mounts and /proc/self/cgroup)."""
        mounts = Path("/proc/self/mounts").read_text() if mounts is None else mounts
        memberships = Path("/proc/self/cgroup").read_text() if memberships is None else memberships
        paths: dict[str, str] = {}
        for line in memberships.splitlines():
            _, names, path = line.split(":", 2)
            paths |= dict.fromkeys(names.split(","), path)
        own: dict[str, Path] = {}
        for fields in map(str.split, mounts.splitlines()):
            if fields[2] == "cgroup":
                for name in set(fields[3].split(",")) & set(_CONTROLLERS) & set(paths):
                    own[name] = _group(Path(fields[1]), paths[name])
        writable = {name: path for name, path in own.items() if os.access(path / "cgroup.procs", os.W_OK)}
        if writable:
            return cls(1, writable)
        for fields in map(str.split, mounts.splitlines()):
            if fields[2] == "cgroup2" and "" in paths:
                group = _group(Path(fields[1]), paths[""])
                return cls(2, dict.fromkeys(_enable(group), group))
        return cls(2, {})

    def make(self, owner: str, sandbox: str, limits: Limits) -> "Group":
        """A sandbox's group with its limits. OSError where one cannot be set."""
        directories: dict[str, Path] = {}
        for name, own in self.own.items():
            above = own / f"rlagent-{owner}"
            if not above.is_dir():
                above.mkdir(exist_ok=True)
                if self.version == 2:
                    _enable(above)
            directories[name] = above / sandbox
        for directory in set(directories.values()):
            directory.mkdir()
        group = Group(self.version, directories)
        try:
            group.limit(limits)
        except OSError:
            group.close()
            raise
        return group

    def sweep(self, owner: str) -> None:
        """Kill and remove all that bears the owner's name."""
        for own in set(self.own.values()):
            above = own / f"rlagent-{owner}"
            if above.is_dir():
                for below in above.iterdir():
                    if below.is_dir():
                        _remove(below)
                _remove(above)


@dataclass(frozen=True, slots=True)
class Group:
    """One sandbox's group: controller -> directory."""

    version: int
    directories: dict[str, Path]

    @property
    def doors(self) -> list[Path]:
        """Files to which a process writes 0 to join. `tasks` moves one thread, without the lock that waits for the whole machine."""
        name = "tasks" if self.version == 1 else "cgroup.procs"
        return [directory / name for directory in dict.fromkeys(self.directories.values())]

    def limit(self, limits: Limits) -> None:
        """Write the limits."""
        for controller, name, value in self._settings(limits):
            if controller in self.directories:
                path = self.directories[controller] / name
                if path.exists():  # swap is not accounted everywhere
                    path.write_text(value)

    def oom_kills(self) -> int:
        """How many processes the kernel has ended for want of memory in this group."""
        if "memory" not in self.directories:
            return 0
        told = self.directories["memory"] / ("memory.oom_control" if self.version == 1 else "memory.events")
        counts = dict(line.split() for line in told.read_text().splitlines())
        return int(counts.get("oom_kill", 0))

    def close(self) -> None:
        """Kill what is in it and remove it."""
        for directory in set(self.directories.values()):
            _remove(directory)

    def _settings(self, limits: Limits) -> Iterator[tuple[str, str, str]]:
        one = self.version == 1
        if limits.memory_bytes is not None:
            size = str(limits.memory_bytes)
            yield "memory", "memory.limit_in_bytes" if one else "memory.max", size
            yield "memory", "memory.memsw.limit_in_bytes" if one else "memory.swap.max", size if one else "0"
        if limits.pids is not None:
            yield "pids", "pids.max", str(limits.pids + 3)  # the shell that becomes bubblewrap, and its two processes
        if limits.cpus is not None:
            quota = str(max(1000, int(limits.cpus * _PERIOD_US)))
            yield "cpu", "cpu.cfs_quota_us" if one else "cpu.max", quota if one else f"{quota} {_PERIOD_US}"


def _group(mounted: Path, path: str) -> Path:
    """The directory of a group; in a container whose mount shows only its own part, the mount itself."""
    found = mounted / path.lstrip("/")
    return found if found.is_dir() else mounted


def _enable(group: Path) -> list[str]:
    """Version 2: let groups below have our controllers. Those for which the kernel agrees."""
    enabled = []
    for name in _CONTROLLERS:
        with suppress(OSError):  # a controller that is not here, or a group that holds processes itself
            (group / "cgroup.subtree_control").write_text(f"+{name}")
            enabled.append(name)
    return enabled


def _remove(directory: Path) -> None:
    deadline = time.monotonic() + _EMPTY_S
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            for pid in (directory / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(_PASS_S)
        else:
            return
