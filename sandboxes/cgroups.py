"""Limits of all processes of a sandbox together, by control groups of version 1 or 2, where they can be written.

A sandbox has one group (in version 1: one in each hierarchy), below one of its owner, below the group this process is in. No
command begins before it has joined: see spawn.py. A group that is empty again serves another sandbox with the same limits.
"""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlagent.sandboxes.base import Limits

_PERIOD_US: Final = 100_000
_EMPTY_S: Final = 5.0  # a killed process leaves its group within milliseconds
_PASS_S: Final = 0.005
_CLEAN_BYTES: Final = 4 * 1024**2  # what the kernel has not given back yet, and can
_READ_BYTES: Final = 4096
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
            if self.version == 1 and name == "cpu" and limits.cpus is None:
                continue
            above = own / f"rlagent-{owner}"
            if not above.is_dir():
                above.mkdir(exist_ok=True)
                if self.version == 2:
                    _enable(above)
            directories[name] = above / sandbox
        for directory in set(directories.values()):
            directory.mkdir()
        group = Group(self.version, directories, self.own)
        try:
            group.limit(limits)
        except OSError:
            group.close()
            raise
        return group

    def homes(self, owner: str) -> set[Path]:
        """The directories below which the owner's groups are."""
        return {own / f"rlagent-{owner}" for own in self.own.values()}


def sweep(homes: Iterable[Path]) -> None:
    """Kill and remove all that is in them, and them."""
    for home in homes:
        if home.is_dir():
            for below in home.iterdir():
                if below.is_dir():
                    _remove(below)
            _remove(home)


class Group:
    """One sandbox's group: controller -> directory, and that of our own group."""

    def __init__(self, version: int, directories: dict[str, Path], own: dict[str, Path]) -> None:
        self.version, self.directories = version, directories
        self._paths = set(directories.values())
        # Version 2 knows no threads. In `cpu` a command could hold the thread, and with it the interpreter's lock, as long as it likes.
        late = self._paths if version == 2 else self._paths & {directories.get("cpu")}
        self._late = [path / "cgroup.procs" for path in late]
        early = {path: own[name] for name, path in directories.items() if path not in late}
        self._enter = [path / "tasks" for path in early]
        self._leave = [path / "tasks" for path in early.values()]
        self._members = [path / "cgroup.procs" for path in self._paths]

    @property
    def doors(self) -> list[Path]:
        """Files to which a process writes 0 to join. `tasks` moves one thread, without the lock that waits for the whole machine."""
        name = "tasks" if self.version == 1 else "cgroup.procs"
        return [path / name for path in sorted(self._paths)]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread starts meanwhile is in the group, but for what `take_in` says."""
        try:
            for path in self._enter:
                _write(path, b"0")
            yield
        finally:
            for path in self._leave:
                _write(path, b"0")

    @property
    def takes_in(self) -> bool:
        """Whether what was started in `entered` is not in all of it yet."""
        return bool(self._late)

    def take_in(self, pid: int) -> None:
        """Move a process that was started in `entered` to where no thread of ours goes. It may wait for the whole machine."""
        with suppress(ProcessLookupError):
            for path in self._late:
                _write(path, str(pid).encode())

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
        told = _read(self.directories["memory"] / ("memory.oom_control" if self.version == 1 else "memory.events"))
        _, _, count = told.partition(b"oom_kill ")
        return int(count.split(b"\n")[0] or 0)

    def is_clean(self) -> bool:
        """Whether another sandbox may have it: no process in it, and next to nothing that counts as its memory."""
        if any(map(_read, self._members)):
            return False
        if "memory" not in self.directories:
            return True
        used = _read(self.directories["memory"] / ("memory.usage_in_bytes" if self.version == 1 else "memory.current"))
        return int(used) <= _CLEAN_BYTES

    def close(self) -> None:
        """Kill what is in it and remove it."""
        for path in self._paths:
            _remove(path)

    def _settings(self, limits: Limits) -> Iterator[tuple[str, str, str]]:
        one = self.version == 1
        if limits.memory_bytes is not None:
            size = str(limits.memory_bytes)
            yield "memory", "memory.limit_in_bytes" if one else "memory.max", size
            yield "memory", "memory.memsw.limit_in_bytes" if one else "memory.swap.max", size if one else "0"
        if limits.pids is not None:
            yield "pids", "pids.max", str(limits.pids + 3)  # what starts bubblewrap, and its two processes
        if limits.cpus is not None:
            quota = str(max(1000, int(limits.cpus * _PERIOD_US)))
            yield "cpu", "cpu.cfs_quota_us" if one else "cpu.max", quota if one else f"{quota} {_PERIOD_US}"


def _read(path: Path) -> bytes:
    """A short file of the kernel's, at once."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _READ_BYTES)
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


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
            for pid in map(int, (directory / "cgroup.procs").read_text().split()):
                if pid != os.getpid():  # a thread that starts a command leaves by itself
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(_PASS_S)
        else:
            return
