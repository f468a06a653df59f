"""The data buffer on PostgreSQL against SQLite: calls recorded and committed, one after the other and many at once.

python benchmarks/buffer.py [--calls 2000] [--sessions 64] [--rounds 3]
Calls are those of agents with 2,000-token prompts and 64 sampled tokens; every call is on the disk before the next of its
session. PostgreSQL is a server of its own on a unix socket with fsync on, as the tests start it (Debian's postgresql).
Rounds alternate between the stores, and the best of each counts, so the ratios are of one run on one machine. A round
trip is what one empty statement takes; a bare commit is one inserted row, by the same connection.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from machine import machine

from rlagent.buffer import Buffer
from rlagent.buffer.config import BufferConfig
from rlagent.buffer.database import Database
from rlagent.buffer.postgres import PostgresDatabase
from rlagent.buffer.sqlite import SqliteDatabase
from rlagent.types import Call, Choice, ParentRef, Sampling, Session, VersionSpan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from postgres_server import server_or_skip

FIRST_TOKENS, TURN_TOKENS, SAMPLED, TURNS = 2000, 200, 64, 8
RANDOM = np.random.default_rng(0)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one round on one store."""

    one_ms: float  # a call of one agent
    many_rate: float  # calls/s of all sessions
    read_ms: float  # a session's calls, as who takes it over reads them
    trip_ms: float
    bare_ms: float


def made(session_id: str, turn: int) -> Call:
    """Call number `turn` of a session: a new conversation every TURNS."""
    at = turn % TURNS
    count = TURN_TOKENS if at else FIRST_TOKENS
    before = FIRST_TOKENS + (at - 1) * TURN_TOKENS + at * SAMPLED if at else 0
    text = RANDOM.integers(97, 122, count * 6, dtype=np.uint8).tobytes().replace(b"y", b" ")
    return Call(
        call_id=f"{session_id}.{turn}", session_id=session_id, index=turn, dialect="chat", model="policy",
        parent=ParentRef(call_id=f"{session_id}.{turn - 1}", choice=0) if at else None,
        origin="extended" if at else "fresh", reason="", prompt_suffix=RANDOM.integers(0, 150_000, count, dtype=np.int32),
        prompt_len=before + count,
        choices=(
            Choice(
                output_ids=RANDOM.integers(0, 150_000, SAMPLED, dtype=np.int32),
                logprobs=-RANDOM.random(SAMPLED, dtype=np.float32),
                versions=(VersionSpan(version=0, start=0, end=SAMPLED),), finish_reason="stop",
            ),
        ),
        sampling=Sampling(), messages=b'[{"role":"user","content":"' + text + b'"}]',
        served=b'[{"role":"assistant","content":"done"}]', started_at=1.0, finished_at=2.0,
        client=b'{"asked":{},"ignored":{},"root":{"model":"m","tools":"","template":""},"segment":""}',
    )  # fmt: skip


async def record(buffer: Buffer, session_id: str, count: int) -> None:
    """An agent's calls, one after the other."""
    for turn in range(count):
        await buffer.record_call(made(session_id, turn))


async def opened(buffer: Buffer, names: list[str]) -> None:
    """New sessions."""
    for name in names:
        await buffer.open_session(Session(session_id=name, key_hash=name, created_at=1.0))


async def measure(buffer: Buffer, database: Database, calls: int, sessions: int) -> Measured:
    """One round."""
    names = [f"s{number}" for number in range(sessions)]
    await opened(buffer, ["alone", *names])
    alone = max(TURNS, calls // 8)
    one_s = await timed(lambda: record(buffer, "alone", alone))
    each = max(1, calls // sessions)

    async def all_at_once() -> None:
        await asyncio.gather(*(record(buffer, name, each) for name in names))

    many_s = await timed(all_at_once)
    read_s = await timed(lambda: buffer.calls("alone"))
    connection = database.connect()
    try:
        connection.execute("CREATE TABLE bare (number INTEGER)")
        trips = [clocked(lambda: connection.execute("SELECT 1").fetchone()) for _ in range(200)]
        bare = [clocked(lambda: connection.execute("INSERT INTO bare VALUES (1)")) for _ in range(200)]
    finally:
        connection.close()
    return Measured(
        one_s / alone * 1e3, each * sessions / many_s, read_s * 1e3, sorted(trips)[100] * 1e3, sorted(bare)[100] * 1e3
    )


async def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    await work()  # type: ignore[misc]
    return time.perf_counter() - start


def clocked(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@asynccontextmanager
async def buffer_at(path: Path, url: str | None) -> AsyncIterator[tuple[Buffer, Database]]:
    """An empty buffer, and a database of the same kind to ask without one."""
    buffer = await Buffer.open(path, BufferConfig(url=url))
    database = SqliteDatabase(path.with_suffix(".bare")) if url is None else PostgresDatabase(url)
    await buffer.ensure_initial(checksum="", snapshot="model")
    try:
        yield buffer, database
    finally:
        await buffer.close()
        database.close()


async def run(calls: int, sessions: int, rounds: int) -> dict[str, list[Measured]]:
    """Rounds of both stores by turns."""
    found: dict[str, list[Measured]] = {"SQLite": [], "PostgreSQL": []}
    server = server_or_skip(fsync=True)
    try:
        with tempfile.TemporaryDirectory() as directory:
            for number in range(rounds):
                for store, results in found.items():
                    url = server.new_schema() if store == "PostgreSQL" else None
                    async with buffer_at(Path(directory) / f"{number}.db", url) as (buffer, database):
                        results.append(await measure(buffer, database, calls, sessions))
    finally:
        server.stop()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(machine())
    found = asyncio.run(run(given.calls, given.sessions, given.rounds))
    best = {
        store: {
            field.name: (max if field.name == "many_rate" else min)(getattr(one, field.name) for one in rounds)
            for field in fields(Measured)
        }
        for store, rounds in found.items()
    }
    titles = {
        "one_ms": "a call of one agent, ms", "many_rate": f"calls/s of {given.sessions} sessions",
        "read_ms": f"reading a session of {max(TURNS, given.calls // 8)} calls, ms", "trip_ms": "a round trip, ms",
        "bare_ms": "a bare commit, ms",
    }  # fmt: skip
    print("| | SQLite | PostgreSQL | PostgreSQL / SQLite |\n|---|---|---|---|")
    for name, title in titles.items():
        lite, server = best["SQLite"][name], best["PostgreSQL"][name]
        print(f"| {title} | {lite:.3g} | {server:.3g} | {server / lite:.2f} |")


if __name__ == "__main__":
    main()
