"""What process sandboxes share: bubblewrap, control groups, a launcher, a directory, and the sweep of what dead owners left.

Entering the backend finds out once what this machine allows; `enforced` tells it.
"""

import asyncio
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlagent.errors import SandboxError
from rlagent.sandboxes import bubblewrap
from rlagent.sandboxes.base import Limits, Snapshot
from rlagent.sandboxes.cgroup_reuse import Groups
from rlagent.sandboxes.cgroups import Cgroups, Group, sweep
from rlagent.sandboxes.files import delete_tree
from rlagent.sandboxes.home import Home
from rlagent.sandboxes.namespaces import Launcher
from rlagent.sandboxes.owned_backend import OwnedBackend
from rlagent.sandboxes.spawn import Prelude, rlimits

if TYPE_CHECKING:
    from rlagent.sandboxes.process import ProcessSandbox

_HOMES: Final = "groups"  # where an owner's control groups are
_MOUNTED: Final = "mounted"  # where each sandbox's files are mounted, in a mount namespace of its own
# Users that belong to nobody: above what distributions give to users and their subordinate ranges, below 2**31.
_FIRST_USER: Final = 1_600_000_000
_USERS_AN_OWNER: Final = 65536
_NUM_OWNERS: Final = 8000  # ranges of so many users below 2**31: the kernel counts a user's processes over all owners


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one open sandbox holds."""

    home: Home
    group: Group | None
    rlimits: Mapping[int, int]
    prelude: Prelude | None  # None where commands are held back, and limited meanwhile

    def oom_kills(self) -> int:
        """How many of its processes were ended for want of memory."""
        return 0 if self.group is None else self.group.oom_kills()


class ProcessBackend(OwnedBackend):
    """Process sandboxes with the same limits. See rlagent.sandboxes.base.Backend.

    network: commands have the host's network. readable: absolute paths of the host that commands may read and run besides the system's
    (an agent's own files); whoever the command runs as must be able to reach them. allow_unisolated: go on without bubblewrap (see
    README.md). control_groups=False: use rlimits, and, when we are root, a user of its own for each sandbox, even where control groups
    could be written.
    """

    kind = "process"

    def __init__(
        self, *, limits: Limits | None = None, network: bool = False, allow_unisolated: bool = False,
        control_groups: bool = True, state_directory: Path | None = None, readable: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        super().__init__(limits=limits, network=network, state_directory=state_directory)
        self.readable = tuple(readable)
        self.bwrap: str | None = None
        self._allow_unisolated = allow_unisolated
        self._control_groups = control_groups
        self._cgroups = Cgroups(1, {})
        self._groups = Groups(self._cgroups, "", self.limits)
        self._rlimits: Mapping[int, int] = {}
        self._mounts = False
        self._launcher = Launcher()
        self._numbers = count()
        self._first_user = _FIRST_USER + secrets.randbelow(_NUM_OWNERS) * _USERS_AN_OWNER
        self._layers: dict[str, tuple[Path, ...]] = {}

    @property
    def isolated(self) -> bool:
        """Whether commands run in namespaces of their own."""
        return self.bwrap is not None

    @property
    def enforced(self) -> Mapping[str, str | None]:
        """Field of Limits -> by what it is enforced; None where it is not."""
        groups = dict.fromkeys(self._cgroups.own, f"cgroup v{self._cgroups.version}")
        users = (
            "rlimit of a user of its own" if self._separate_users else "rlimit of your user, all its processes counted"
        )
        return {
            "wall_s": "timeout",
            "cpu_s": "rlimit",
            "cpus": groups.get("cpu"),
            "memory_bytes": groups.get("memory", "rlimit of each process"),
            "pids": groups.get("pids", users),
            "disk_bytes": "tmpfs" if self._mounts else None,
            "file_size_bytes": "rlimit",
            "open_files": "rlimit",
        }

    async def open(self, snapshot: Snapshot | None = None) -> "ProcessSandbox":
        """A new open sandbox."""
        from rlagent.sandboxes.process import ProcessSandbox

        return await ProcessSandbox(backend=self, snapshot=snapshot).__aenter__()

    async def delete(self, snapshot: Snapshot) -> None:
        """Delete a snapshot's files; those of what it was forked from stay."""
        layers = self._layers.pop(snapshot.name, None)
        if layers is not None:
            await self._launcher.run(lambda: delete_tree(layers[0]))

    async def make_room(self, sandbox: "ProcessSandbox", snapshot: Snapshot | None) -> Room:
        """Files and limits of a new sandbox. For ProcessSandbox."""
        owner = self._opened
        if snapshot is not None and snapshot.name not in self._layers:
            raise SandboxError(f"snapshot {snapshot.name!r} is not of this backend, or was deleted")
        number = next(self._numbers)
        layers = self._layers[snapshot.name] if snapshot else ()
        user = self._first_user + number % _USERS_AN_OWNER if self._separate_users else 0
        shared = Home.on_tmpfs(self.limits, self._mounts)
        place = owner.directory / (_MOUNTED if shared else f"s{number}")
        room = await self._launcher.run(lambda: self._make_room(place, layers, user))
        self._open.add(sandbox)
        return room

    async def clear_room(self, sandbox: "ProcessSandbox", room: Room) -> None:
        """Take it all back. For ProcessSandbox."""
        self._open.discard(sandbox)
        await self._launcher.run(lambda: self._clear_room(room))

    def _make_room(self, place: Path, layers: tuple[Path, ...], user: int) -> Room:
        """In a thread of the launcher."""
        home = Home.make(self._launcher, place, limits=self.limits, mounts=self._mounts, layers=layers, user=user)
        try:
            group = self._groups.take()
        except OSError as error:
            home.delete()
            raise SandboxError(f"the limits cannot be set: {error}; give control_groups=False to do without") from error
        held = self.isolated and "pids" in self._cgroups.own
        prelude = None if held else Prelude.make(self._rlimits, group.doors if group else ())
        return Room(home=home, group=group, rlimits=self._rlimits, prelude=prelude)

    def _clear_room(self, room: Room) -> None:
        """In a thread of the launcher."""
        room.home.delete()
        if room.group is not None:
            self._groups.give_back(room.group)

    async def keep(self, room: Room) -> Snapshot:
        """The files of a sandbox as a snapshot. For ProcessSandbox."""
        snapshot = Snapshot(name=f"layer{next(self._numbers)}")
        self._layers[snapshot.name] = await room.home.keep(self._opened.directory / snapshot.name)
        return snapshot

    @property
    def _separate_users(self) -> bool:
        return os.geteuid() == 0 and "pids" not in self._cgroups.own

    async def _enter(self) -> None:
        owner = self._opened
        if self._control_groups:
            self._cgroups = await asyncio.to_thread(Cgroups.find)
        self._groups, own = Groups(self._cgroups, owner.name, self.limits), self._cgroups.own
        self._rlimits = rlimits(self.limits, address_space="memory" not in own, processes="pids" not in own)
        (owner.directory / _HOMES).write_text("\n".join(map(str, self._cgroups.homes(owner.name))))
        (owner.directory / _MOUNTED).mkdir(mode=0o711)
        self.bwrap = await self._bubblewrap()
        self._mounts = self.isolated and await self._launcher.can_mount()

    async def _sweep(self, name: str) -> None:
        # In its own words: its process may have been in other groups than ours. Nothing but an owner writes to that file.
        told = self._opened.directory.parent / name / _HOMES
        homes = [Path(line) for line in told.read_text().splitlines()] if told.exists() else []
        await asyncio.to_thread(sweep, homes)

    async def _leave(self, name: str) -> None:
        for sandbox in list(self._open):
            await sandbox.close()
        await asyncio.to_thread(sweep, self._cgroups.homes(name))
        await asyncio.to_thread(self._launcher.close)

    async def _bubblewrap(self) -> str | None:
        found = shutil.which("bwrap")
        reason = "is not installed"
        if found is not None:
            said = await bubblewrap.refusal(found, self._first_user if self._separate_users else 0)
            if said is None:
                return found
            reason = said
        if not self._allow_unisolated:
            raise SandboxError(
                f"bubblewrap (bwrap) {reason}; commands could reach the network and the host's files. Install the package "
                "'bubblewrap' on a host that allows user namespaces, or give allow_unisolated=True"
            )
        return None
