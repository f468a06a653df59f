"""Directories that appear whole or not at all: the learner's checkpoints and its Hugging Face exports. Does not
import torch.

A save is written into a hidden sibling, synced to disk, and renamed. A manifest names every file with its size and
checksum, so that what was torn by something else (a full disk, a cut copy) is refused instead of loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rlagent.errors import CheckpointError

MANIFEST: Final = "manifest.json"
FORMAT: Final = 3
CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint."""

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. `model` must equal that of the learner that loads it; `layout` says how it is cut; `extra` is
    the loop's own.
    """

    step: int
    layout: Mapping[str, int]
    model: Mapping[str, Any]
    config_digest: str
    files: tuple[FileRecord, ...]
    extra: Mapping[str, Any]
    format: int = FORMAT


def record(path: Path) -> FileRecord:
    """Sync a file to disk and describe it."""
    crc = 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return FileRecord(path.name, path.stat().st_size, crc)


def partial_directory(final: Path) -> Path:
    """Where a directory is written before it gets its name; the same on every rank."""
    return final.with_name(f".{final.name}.partial")


def begin(final: Path) -> Path:
    """An empty partial directory for `final`; what an earlier, torn save left there is removed."""
    partial = partial_directory(final)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(final: Path) -> None:
    """Sync the partial directory and give it its name, in place of an older one of that name."""
    partial = partial_directory(final)
    for path in partial.iterdir():
        record(path)
    _sync_directory(partial)
    if final.exists():
        replaced = final.with_name(f".{final.name}.replaced")
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced)
    else:
        partial.rename(final)
    _sync_directory(final.parent)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """The last file of a save."""
    try:
        text = json.dumps(asdict(manifest), indent=2)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's extra content is not JSON: {error}") from error
    (directory / MANIFEST).write_text(text + "\n")


def read_manifest(directory: Path) -> Manifest:
    """Raises CheckpointError where there is none, or it is of another format."""
    path = directory / MANIFEST
    try:
        fields = json.loads(path.read_text())
        files = tuple(FileRecord(**file) for file in fields.pop("files"))
        manifest = Manifest(**fields, files=files)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} is of format {manifest.format}; this version reads {FORMAT}")
    return manifest


def checked_file(directory: Path, manifest: Manifest, name: str) -> Path:
    """The path of a file that is exactly what was saved. Raises CheckpointError otherwise."""
    expected = next((file for file in manifest.files if file.name == name), None)
    path = directory / name
    if expected is None or not path.is_file():
        raise CheckpointError(f"{directory} holds no {name}")
    if record(path) != expected:
        raise CheckpointError(f"{path} is damaged: its size or checksum is not the manifest's; use an older checkpoint")
    return path


def checkpoints(root: Path) -> list[Path]:
    """The whole checkpoints in a directory, oldest step first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if not path.name.startswith(".") and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: (read_manifest(path).step, path.name))


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of a directory."""
    for path in checkpoints(root)[:-keep]:
        hidden = path.with_name(f".{path.name}.removed")
        path.rename(hidden)
        shutil.rmtree(hidden)
