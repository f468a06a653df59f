"""What a run has recorded, opened to read beside whoever still writes it: replay and inspect start here.

Invariant: the run is not disturbed. A SQLite buffer belongs to one process, so it is a copy of it that is opened.
"""

import sqlite3
import tempfile
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from rlagent.buffer import Buffer
from rlagent.buffer.config import BufferConfig
from rlagent.config import BUFFER_NAME, Config, build_config
from rlagent.errors import LoadError
from rlagent.run_directory import RunDirectory


def recorded_config(run_dir: Path) -> Config:
    """The config of a run. LoadError if the directory holds none."""
    run = RunDirectory(run_dir)
    if not run_dir.exists():
        raise LoadError(f"{str(run_dir)!r} does not exist; name the directory of a run")
    if not run.config.is_file():
        served = (run_dir / BUFFER_NAME).is_file()
        raise LoadError(
            f"{str(run_dir)!r} is of `rlagent serve`, which does not train: `rlagent inspect {run_dir}` lists its sessions; what was "
            "trained on them is in the run directory of `rlagent train --router`"
            if served else f"{str(run_dir)!r} is no run directory: it has no config.toml"
        )  # fmt: skip
    return build_config(tomllib.loads(run.config.read_text(encoding="utf-8")))


def _config_of(place: Path) -> Config:
    """Settings that name the buffer of a SQLite file, of the directory `rlagent serve` keeps one in, or of a run."""
    if not place.exists():
        raise LoadError(
            f"{str(place)!r} does not exist; name a run's directory, a buffer's file, or a router's URL (http://...)"
        )
    if place.is_dir() and not RunDirectory(place).config.is_file() and (place / BUFFER_NAME).is_file():
        place = place / BUFFER_NAME
    return Config(buffer=BufferConfig(path=place)) if place.is_file() else recorded_config(place)


@asynccontextmanager
async def recorded_buffer(place: Path) -> AsyncIterator[Buffer]:
    """The data buffer of a run directory (its SQLite file, or its database's URL), or of a SQLite file."""
    config = _config_of(place)
    with tempfile.TemporaryDirectory(prefix="rlagent-recorded-") as directory:
        path = Path(directory) / "buffer.db"
        if config.buffer.url is None:
            _copy(config.buffer_path, path)
        buffer = await Buffer.open(path, config.buffer)
        try:
            yield buffer
        finally:
            await buffer.close()


def _copy(source: Path, target: Path) -> None:
    if not source.is_file():
        raise LoadError(f"the run's data buffer {str(source)!r} is gone")
    uri = f"{source.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as read, closing(sqlite3.connect(target)) as written:
            read.backup(written)
    except sqlite3.DatabaseError as error:
        raise LoadError(f"{str(source)!r} cannot be read as a data buffer: {error}") from error
