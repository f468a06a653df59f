"""kill -9 at random moments: nothing acknowledged is lost, and every group is consumed exactly once along the lineage.

A child process works on the buffer (agents and a learner at once) and writes a line for each thing that returned. The
parent kills it after a random number of lines, reopens the buffer, compares, and lets the next child go on from a
random checkpoint. In PostgreSQL a second child, with agents alone, works on the same database and is killed with it;
or the server is killed instead, and the children end with the error they get.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "support"))  # also as a child

from postgres_server import PostgresServer, server_or_skip
from stores import Place

from rlagent.buffer import Buffer
from rlagent.types import Call, Choice, ParentRef, Reward, Sampling, Session, VersionSpan

SETTINGS = {"max_staleness": 10_000}
NUM_AGENTS = 4
NUM_TURNS = 2
ROUNDS = 5


def make_call(session_id: str, index: int, version: int) -> Call:
    """Turn `index` of a session: 3 prompt ids and 2 sampled ones, all derived from the names."""
    ids = np.arange(2, dtype=np.int32) + 10 * index
    return Call(
        call_id=f"{session_id}.{index}",
        session_id=session_id,
        index=index,
        dialect="chat",
        model="policy",
        parent=ParentRef(call_id=f"{session_id}.{index - 1}", choice=0) if index else None,
        origin="extended" if index else "fresh",
        reason="",
        prompt_suffix=np.full(3, index, np.int32),
        prompt_len=5 * index + 3,
        choices=(
            Choice(
                output_ids=ids,
                logprobs=-np.ones(2, np.float32),
                versions=(VersionSpan(version=version, start=0, end=2),),
                finish_reason="stop",
            ),
        ),
        sampling=Sampling(),
        messages=b"",
        served=b"",
        started_at=0.0,
        finished_at=0.0,
    )


async def agent(buffer: Buffer, name: str) -> None:
    """Episodes without end, two to a group."""
    for number in range(10_000):
        group = f"{name}-{number}"
        for member in ("a", "b"):
            session_id = f"{group}-{member}"
            session = Session(session_id=session_id, key_hash=session_id, group_id=group, group_size=2)
            await buffer.open_session(session)
            for turn in range(NUM_TURNS):
                await buffer.record_call(make_call(session_id, turn, buffer.policy().version))
                print("call", session_id, turn, flush=True)
                buffer.mark_delivered(f"{session_id}.{turn}")
            await buffer.finish_session(session_id, status="completed", reward=Reward(components={"r": 1.0}))
            print("finish", session_id, flush=True)
        print("group", group, flush=True)


async def learner(buffer: Buffer) -> None:
    """Lease, consume, publish, without end."""
    for step in range(10_000):
        lease = await buffer.lease(num_groups=2, step=step, wait_s=60.0)
        assert lease is not None
        print("lease", lease.lease_id, *(group.group_id for group in lease.groups), flush=True)
        print("consume", lease.lease_id, await buffer.consume(lease.lease_id, step=step), flush=True)
        begun = await buffer.begin_publish(step=step, parent=buffer.policy().version)
        print("begin", begun.version, flush=True)
        policy = await buffer.commit_publish(begun.publish_id, checksum="", snapshot=None)
        print("commit", policy.version, flush=True)


async def work(place: Place, name: str, cursor: int, version: int) -> None:
    """A replica; one with a cursor below 0 has no learner."""
    buffer = await place.open(**SETTINGS)
    await buffer.ensure_initial(checksum="", snapshot="model")
    if cursor >= 0:
        await buffer.restore(cursor=cursor, version=version)
    print("restored", flush=True)
    async with asyncio.TaskGroup() as group:
        if cursor >= 0:
            group.create_task(learner(buffer))
        for number in range(NUM_AGENTS):
            group.create_task(agent(buffer, f"{name}-{number}"))


@dataclass
class Ledger:
    """What the children said was done."""

    calls: set[tuple[str, int]] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    leases: dict[str, list[str]] = field(default_factory=dict)
    consumed: dict[int, tuple[int, list[str]]] = field(default_factory=dict)  # number -> (the one before, groups)
    versions: list[int] = field(default_factory=list)
    checkpoints: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    head: int = 0
    version: int = 0

    def restored(self, cursor: int, version: int) -> None:
        self.head, self.version = cursor, version
        self.leases.clear()

    def consume(self, lease_id: str, number: int) -> None:
        self.consumed[number] = (self.head, self.leases.pop(lease_id))
        self.head = number
        self.checkpoints.append((number, self.version))

    def read(self, lines: Iterable[str]) -> None:
        for line in lines:
            match line.split():
                case ["call", session_id, turn]:
                    self.calls.add((session_id, int(turn)))
                case ["finish", session_id]:
                    self.finished.add(session_id)
                case ["group", group]:
                    self.groups.add(group)
                case ["lease", lease_id, *groups]:
                    self.leases[lease_id] = groups
                case ["consume", lease_id, number]:
                    self.consume(lease_id, int(number))
                case ["begin", version]:
                    self.versions.append(int(version))
                case ["commit", version]:
                    self.version = int(version)

    def trained_along_the_lineage(self) -> list[str]:
        found: list[str] = []
        number = self.head
        while number != 0:
            number, groups = self.consumed[number]
            found += groups
        return found


def start(place: Place, name: str, cursor: int, version: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(place.path), place.url or "", name, str(cursor), str(version)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(child: subprocess.Popen[str], *, kill: bool) -> list[str]:
    """What a child still wrote until it was killed, or ended because the server is gone."""
    if kill:
        child.send_signal(signal.SIGKILL)
    assert child.stdout is not None
    rest = child.stdout.read()
    code = child.wait()
    if kill:
        assert code == -signal.SIGKILL, rest
    else:
        assert "StoreError" in rest or "StoreUncertainError" in rest, rest
    return [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]


def run_and_kill(
    place: Place, name: str, checkpoint: tuple[int, int], num_lines: int, server: PostgresServer | None
) -> list[str]:
    """The complete lines of children that were killed, or whose server was, after one wrote `num_lines` of them."""
    with ExitStack() as stack:
        child = stack.enter_context(start(place, name, *checkpoint))
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        children = [child]
        if place.url is not None:
            beside = stack.enter_context(start(place, f"{name}-beside", -1, 0))
            assert beside.stdout is not None
            assert beside.stdout.readline() == "restored\n"  # from here on both work
            children.append(beside)
        lines += [child.stdout.readline() for _ in range(num_lines - 1)]
        if server is not None:
            server.kill()
        for each in children:
            lines += end(each, kill=server is None)
    if server is not None:
        server.start()
    return lines


async def check(buffer: Buffer, said: Ledger) -> None:
    """Everything that was acknowledged is there, and what was in flight is whole or absent."""
    for session_id in {session_id for session_id, _ in said.calls}:
        calls = await buffer.calls(session_id)
        assert {(session_id, call.index) for call in calls} >= {c for c in said.calls if c[0] == session_id}
        for call in calls:
            wanted = make_call(session_id, call.index, 0)
            assert call.choices[0].output_ids.tolist() == wanted.choices[0].output_ids.tolist()
            assert call.prompt_suffix.tolist() == wanted.prompt_suffix.tolist()
    for session_id in said.finished:
        session = await buffer.session(session_id)
        assert session is not None
        assert session.state == "sealed"
    for lease_id in list(said.leases):  # a consumption in flight: ask again, once is once
        said.consume(lease_id, await buffer.consume(lease_id, step=0))
    status = await buffer.status()
    assert status.cursor == said.head
    assert status.newest_version >= max(said.versions, default=0)
    assert len(said.versions) == len(set(said.versions)), "a version number was given out twice"
    said.version = status.version


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kill_9_loses_nothing_and_consumes_exactly_once(tmp_path: Path, seed: int) -> None:
    rounds_of_kills(Place(tmp_path / "b.db"), seed)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    server = server_or_skip(fsync=True)
    yield server
    server.stop()


@pytest.mark.slow
def test_kill_9_of_replicas_loses_nothing_and_consumes_exactly_once(tmp_path: Path, server: PostgresServer) -> None:
    rounds_of_kills(Place(tmp_path, server.new_schema()), seed=3)


@pytest.mark.slow
def test_kill_9_of_the_server_loses_nothing_and_consumes_exactly_once(tmp_path: Path, server: PostgresServer) -> None:
    rounds_of_kills(Place(tmp_path, server.new_schema()), seed=4, server=server)


def rounds_of_kills(place: Place, seed: int, *, server: PostgresServer | None = None) -> None:
    """Kill ROUNDS times, the server if one is given, and compare each time."""
    chance = random.Random(seed)
    said = Ledger()

    async def inspect(last: bool) -> None:
        buffer = await place.open(**SETTINGS)
        await check(buffer, said)
        if last:
            await buffer.expire_due(float("1e18"))  # every group's deadline: what is incomplete is handed out short
            while (lease := await buffer.lease(num_groups=1, step=0, wait_s=0.0)) is not None:
                said.leases[lease.lease_id] = [group.group_id for group in lease.groups]
                said.consume(lease.lease_id, await buffer.consume(lease.lease_id, step=0))
        await buffer.close()

    for number in range(ROUNDS):
        checkpoint = chance.choice(said.checkpoints[-6:])
        lines = run_and_kill(place, f"r{number}", checkpoint, chance.randrange(1, 250), server)
        if "restored\n" in lines:
            said.restored(*checkpoint)
        said.read(lines)
        asyncio.run(inspect(last=number == ROUNDS - 1))
    trained = said.trained_along_the_lineage()
    assert len(trained) == len(set(trained)), "a group was consumed twice"
    assert set(trained) >= said.groups, "a complete group was lost"


if __name__ == "__main__":
    place = Place(Path(sys.argv[1]), sys.argv[2] or None)
    asyncio.run(work(place, sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
