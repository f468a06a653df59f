"""Who owns what is on this machine: a directory with a locked file for each living backend.

The kernel drops the lock with its process, however that ends; so a directory whose lock is free is of a dead owner, and what bears
its name (files, cgroups, containers) may be taken away by whoever finds it.
"""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlagent.errors import SandboxError
from rlagent.sandboxes.files import delete_tree


def default_state_directory() -> Path:
    """One for each user of the machine."""
    return Path(tempfile.gettempdir(), f"rlagent-sandboxes-{os.geteuid()}")


class Owner:
    """A living backend: `name` marks what belongs to it, `directory` holds its files."""

    def __init__(self, state: Path, kind: str) -> None:
        try:
            state.mkdir(mode=0o711, parents=True, exist_ok=True)
            found = state.lstat()
        except OSError as error:
            raise SandboxError(f"the state directory {str(state)!r} cannot be made: {error.strerror}") from error
        if found.st_uid != os.geteuid() or state.is_symlink():
            raise SandboxError(
                f"the state directory {str(state)!r} is not your own directory; give another state_directory"
            )
        self._state = state.resolve()
        self.name = f"{kind}-{secrets.token_hex(6)}"
        self.directory = self._state / self.name
        # The lock exists before the directory, so that no sweep finds a directory of a living owner without one.
        self._lock = _locked(self._lock_path(self.name))
        self.directory.mkdir(mode=0o711)

    def dead(self, kind: str) -> Iterator[str]:
        """Names of owners of this kind whose process is gone; their directory is deleted after each was dealt with."""
        for path in self._state.glob(f"{kind}-*.lock"):
            name = path.stem
            with suppress(BlockingIOError, FileNotFoundError):
                lock = _locked(path)
                try:
                    yield name
                    if (self._state / name).exists():
                        delete_tree(self._state / name)
                    path.unlink(missing_ok=True)
                finally:
                    os.close(lock)

    def close(self) -> None:
        """Delete its directory, give the lock back."""
        if self._lock < 0:
            return
        delete_tree(self.directory)
        self._lock_path(self.name).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1

    def _lock_path(self, name: str) -> Path:
        return self._state / f"{name}.lock"


def _locked(path: Path) -> int:
    """A locked descriptor of the file. BlockingIOError while another process holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
