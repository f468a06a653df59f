"""Where a test's buffer has its data: one test, both stores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlagent.buffer import Buffer
from rlagent.buffer.config import BufferConfig
from rlagent.buffer.database import Database
from rlagent.buffer.postgres import PostgresDatabase
from rlagent.buffer.sqlite import SqliteDatabase
from rlagent.types import Call, Choice, ParentRef, Sampling, VersionSpan


@dataclass(frozen=True)
class Place:
    """A file, or a schema of a PostgreSQL database."""

    path: Path
    url: str | None = None

    def config(self, **settings: object) -> BufferConfig:
        """Settings that name this place."""
        return BufferConfig.model_validate({"url": self.url, **settings})

    def database(self) -> Database:
        """What the store stands on."""
        return SqliteDatabase(self.path) if self.url is None else PostgresDatabase(self.url)

    async def open(self, *, clock: Callable[[], float] = time.time, **settings: object) -> Buffer:
        """Open or create the buffer here."""
        return await Buffer.open(self.path, self.config(**settings), clock=clock)


def make_call(index: int, *, parent: str | None = None, prompt_len: int = 2, session_id: str = "s") -> Call:
    """Call `index` of a session: 2 prompt ids of its own and 3 sampled ones."""
    return Call(
        call_id=f"{session_id}.{index}",
        session_id=session_id,
        index=index,
        dialect="chat",
        model="policy",
        parent=None if parent is None else ParentRef(call_id=parent, choice=0),
        origin="fresh" if parent is None else "extended",
        reason="",
        prompt_suffix=np.array([1, 2], np.int32),
        prompt_len=prompt_len,
        choices=(
            Choice(
                output_ids=np.array([3, 4, 5], np.int32),
                logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
                versions=(VersionSpan(version=0, start=0, end=3),),
                finish_reason="stop",
            ),
        ),
        sampling=Sampling(),
        messages=b"[1]",
        served=b"[2]",
        started_at=1.0,
        finished_at=2.0,
    )
