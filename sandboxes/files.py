"""Files under a directory that hostile commands write too: no path, link or exchange of a directory for a link leads out of it.

A path is resolved first, so links within the root work; then every directory on the way is opened beneath the one before, without
following a link, so what a command changes in between makes the call fail and never reach outside.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from rlagent.errors import SandboxError

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: a fifo must not hold the caller


def inside(root: Path, path: str) -> Path:
    """The real path below `root` (itself a real path). SandboxError when it leads outside."""
    if path == ".":
        return root
    try:
        resolved = (root / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links is a RuntimeError, a null byte a ValueError
        raise SandboxError(f"path {path!r} cannot be followed: {error}") from error
    if not resolved.is_relative_to(root):
        raise SandboxError(f"path {path!r} leads outside the sandbox")
    return resolved


def read_file(root: Path, path: str) -> bytes:
    """A regular file's content."""
    with _saying(path, "read"), _opened(root, path, os.O_RDONLY) as file:
        return file.read()


def write_file(root: Path, path: str, data: bytes) -> None:
    """Make or replace a regular file, and its directories."""
    with _saying(path, "written"), _opened(root, path, os.O_WRONLY | os.O_CREAT) as file:
        file.truncate()
        file.write(data)


def copy_tree(root: Path, source: Path, path: str) -> None:
    """Copy what lies in the directory `source` below `path`: directories and regular files with their modes, no links."""
    if not source.is_dir():
        raise SandboxError(f"{str(source)!r} cannot be uploaded: it is not a directory")
    with _saying(path, "written"):
        os.close(_directory(root, inside(root, path)))
    for where, _, names in os.walk(source):
        below = Path(path, Path(where).relative_to(source))
        with _saying(str(below), "written"):
            os.close(_directory(root, inside(root, str(below))))
        for name in names:
            if stat.S_ISREG(Path(where, name).lstat().st_mode):
                _copy(root, Path(where, name), str(below / name))


def delete_tree(root: Path) -> None:
    """Delete a directory, whatever modes a command gave to what lies in it."""
    for where, names, _ in os.walk(root):
        for name in names:
            found = Path(where, name)
            if not found.is_symlink():
                found.chmod(0o700)
    shutil.rmtree(root)


def _copy(root: Path, source: Path, path: str) -> None:
    with _saying(path, "written"), source.open("rb") as content, _opened(root, path, os.O_WRONLY | os.O_CREAT) as file:
        file.truncate()
        shutil.copyfileobj(content, file)
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(content.fileno()).st_mode) & 0o777)


@contextmanager
def _saying(path: str, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SandboxError(f"{path!r} cannot be {done}: {error.strerror or error}") from error


@contextmanager
def _opened(root: Path, path: str, flags: int) -> Iterator[BinaryIO]:
    target = inside(root, path)
    if target == root:
        raise SandboxError(f"{path!r} is a directory of the sandbox")
    parent = _directory(root, target.parent, make=bool(flags & os.O_CREAT))
    try:
        opened = os.open(target.name, flags | _FILE, 0o666, dir_fd=parent)
    finally:
        os.close(parent)
    with os.fdopen(opened, "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "wb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise SandboxError(f"{path!r} is not a regular file")
        yield file


def _directory(root: Path, target: Path, *, make: bool = True) -> int:
    """A descriptor of a directory below root, reached link by link without following any."""
    found = os.open(root, _DIRECTORY)
    for part in target.relative_to(root).parts:
        try:
            if make:
                _mkdir(part, found)
            below = os.open(part, _DIRECTORY, dir_fd=found)
        finally:
            os.close(found)
        found = below
    return found


def _mkdir(name: str, parent: int) -> None:
    try:
        os.mkdir(name, 0o777, dir_fd=parent)
    except FileExistsError:
        return
