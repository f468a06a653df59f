"""The files of one process sandbox: where they lie, how they are bounded, kept and forked.

Commands see three directories, `work`, `tmp` and `shm`, that lie together in `files`. Where we may mount, they are in a mount
namespace of the sandbox: on a tmpfs of the size that the disk limit says, and, of a fork, as an OverlayFS of the snapshot's layers
with a writable one on top. Elsewhere they are plain directories and a fork is a copy.
"""

import asyncio
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from rlagent.errors import SandboxError
from rlagent.sandboxes.base import Limits
from rlagent.sandboxes.files import delete_tree
from rlagent.sandboxes.namespaces import MS_NODEV, MS_NOSUID, Launcher, mount

T = TypeVar("T")
_MAX_LAYERS: Final = 12  # mount options fit into one page of 4096 bytes; a longer chain becomes one layer
_BYTES_A_FILE: Final = 4096  # files a tmpfs may hold for its size: empty ones take room too
_DIRECTORIES: Final = ("work", "tmp", "shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """One sandbox's files. `layers`: what it was forked from, the newest first."""

    launcher: Launcher
    place: Path
    layers: tuple[Path, ...]
    user: int
    bounded: bool
    namespace: int | None = None

    @property
    def files(self) -> Path:
        """The directory that holds work, tmp and shm, as seen in the namespace."""
        return self.place / "files"

    @classmethod
    def make(
        cls, launcher: Launcher, place: Path, *, limits: Limits, mounts: bool, layers: tuple[Path, ...], user: int
    ) -> "Home":
        """New files at `place`: empty, or those of the layers. `mounts`: whether we may mount. `user` owns them, if not 0.

        In a thread of the launcher. `place` may be common to all sandboxes, and must be there, where `on_tmpfs`.
        """
        layered = layers if mounts and not user else ()
        home = cls(launcher=launcher, place=place, layers=layered, user=user, bounded=cls.on_tmpfs(limits, mounts))
        try:
            if home.bounded or home.layers:
                home = replace(home, namespace=launcher.new_namespace(lambda: home._fill(limits.disk_bytes)))
            else:
                home._make_place()
                launcher.call(home._directories, user=user)
            if layers and not home.layers:
                launcher.call(home._copy_in(layers[0]), namespace=home.namespace)
        except (OSError, SandboxError) as error:
            home.delete()
            raise SandboxError(f"the sandbox's files cannot be made: {error}") from error
        return home

    @staticmethod
    def on_tmpfs(limits: Limits, mounts: bool) -> bool:
        """Whether a sandbox's files lie on a tmpfs of its own."""
        return mounts and limits.disk_bytes is not None

    def run(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Run it where the files are seen, with the sandbox user's rights on files."""
        return self.launcher.run(function, namespace=self.namespace, user=self.user)

    async def run_as_owner(self, function: Callable[[], T]) -> T:
        """Run it where the files are seen, with our own rights."""
        return await self.launcher.run(function, namespace=self.namespace)

    async def keep(self, layer: Path) -> tuple[Path, ...]:
        """Copy what is new since the layers it started from to `layer`; the layers of a fork."""
        if self.layers and len(self.layers) < _MAX_LAYERS:
            await self.run_as_owner(lambda: _copy(self.place / "upper", layer))
            return (layer, *self.layers)
        await self.run_as_owner(lambda: _copy(self.files, layer))
        return (layer,)

    def delete(self) -> None:
        """Unmount by letting go, and delete what lies on disk. In a thread of the launcher."""
        if self.namespace is not None:
            os.close(self.namespace)
        if not self.bounded and self.place.exists():
            delete_tree(self.place)

    def _copy_in(self, layer: Path) -> Callable[[], None]:
        def copy() -> None:
            _copy(layer, self.files)
            if self.user:
                _run("chown", "-hR", f"{self.user}:{self.user}", str(self.files))

        return copy

    def _make_place(self) -> None:
        self.place.mkdir(mode=0o700)
        if self.user:
            os.chown(self.place, self.user, self.user)

    def _fill(self, size: int | None) -> None:
        """In a new namespace: mount."""
        if size is None:
            self._make_place()
        else:
            options = (
                f"size={size},nr_inodes={max(1024, size // _BYTES_A_FILE)},mode=0700,uid={self.user},gid={self.user}"
            )
            mount("tmpfs", self.place, "tmpfs", MS_NOSUID | MS_NODEV, options)
        if not self.layers:
            self._directories()
            return
        for name in ("upper", "above", "files"):
            (self.place / name).mkdir()
        lower = ":".join(map(str, self.layers))
        options = f"lowerdir={lower},upperdir={self.place / 'upper'},workdir={self.place / 'above'}"
        mount("overlay", self.files, "overlay", MS_NOSUID | MS_NODEV, options)

    def _directories(self) -> None:
        for path in (self.files, *(self.files / name for name in _DIRECTORIES)):
            path.mkdir()
            if self.user and os.stat(path).st_uid != self.user:
                os.chown(path, self.user, self.user)


def _copy(source: Path, target: Path) -> None:
    """With modes, links, whiteouts and extended attributes, following no link."""
    _run("cp", "-a", "--reflink=auto", f"{source}/.", str(target))


def _run(*argv: str) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        raise SandboxError(f"{argv[0]} failed: {done.stderr.decode(errors='replace').strip()}")
