"""The buffer beside a model of it, over random leases, consumptions, releases, expiries, publishes and restores.

The model is plain lists; the promise it checks is that along every lineage each group is consumed once, in one order.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from postgres_server import PostgresServer
from stores import Place

from rlagent.buffer import Buffer
from rlagent.errors import ConflictError
from rlagent.types import Call, Choice, Reward, Sampling, Session, VersionSpan

SETTINGS = {"max_staleness": 1, "lease_s": 100.0}


@dataclass
class Consumption:
    parent: int
    batch: int
    groups: list[str]


@dataclass
class Model:
    """What the buffer should hold."""

    queue: list[str] = field(default_factory=list)  # never consumed, in order of completion
    batches: dict[int, list[str]] = field(default_factory=dict)
    consumptions: dict[int, Consumption] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)  # batches to be delivered again, not leased
    left: dict[int, list[str]] = field(
        default_factory=dict
    )  # of each of them, the groups not dropped since the restore
    leases: dict[str, tuple[list[str], int | None]] = field(default_factory=dict)
    made_by: dict[str, int] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=lambda: {0: None})
    version: int = 0
    head: int = 0

    def path(self, number: int) -> list[int]:
        found = []
        while number != 0:
            found.append(number)
            number = self.consumptions[number].parent
        return found[::-1]

    def ancestors(self, version: int | None) -> list[int]:
        found = []
        while version is not None:
            found.append(version)
            version = self.parents[version]
        return found

    def fresh(self, group: str) -> bool:
        mine = self.ancestors(self.version)
        common = next(v for v in self.ancestors(self.made_by[group]) if v in mine)
        return mine.index(common) <= 1

    def take(self, num_groups: int) -> tuple[list[str], int | None] | None:
        while self.pending:
            batch = min(self.pending)
            self.left[batch] = [group for group in self.left[batch] if self.fresh(group)]
            self.pending.remove(batch)
            if self.left[batch]:
                return self.left[batch], batch
            self.append(batch, [])
        fresh: list[str] = []
        for group in self.queue[:]:
            if len(fresh) == num_groups:
                break
            if self.fresh(group):
                fresh.append(group)
            else:
                self.queue.remove(group)
        if len(fresh) < num_groups:
            return None
        for group in fresh:
            self.queue.remove(group)
        return fresh, None

    def append(self, batch: int | None, groups: list[str]) -> int:
        number = len(self.consumptions) + 1
        batch = number if batch is None else batch
        self.batches.setdefault(batch, groups)
        self.consumptions[number] = Consumption(self.head, batch, groups)
        self.head = number
        return number

    def give_back(self, lease_id: str, order: list[str]) -> None:
        groups, batch = self.leases.pop(lease_id)
        if batch is None:
            self.queue = sorted([*self.queue, *groups], key=order.index)
        else:
            self.pending.append(batch)


class BufferMachine(RuleBasedStateMachine):
    """Every rule does the same to the buffer and to the model, and compares the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="buffer-model-")
        self.place = self.somewhere(Path(self.folder.name) / "b.db")
        self.runner = asyncio.Runner()
        self.now = 0.0
        self.model = Model()
        self.order: list[str] = []
        self.checkpoints = [(0, 0)]
        self.ended: list[str] = []

    def somewhere(self, path: Path) -> Place:
        """Where the buffer has its data."""
        return Place(path)

    @initialize()
    def start(self) -> None:
        self.buffer = self.runner.run(self.opened())

    async def opened(self) -> Buffer:
        buffer = await self.place.open(clock=lambda: self.now, **SETTINGS)
        await buffer.ensure_initial(checksum="", snapshot="model")
        return buffer

    def teardown(self) -> None:
        self.runner.run(self.buffer.close())
        self.runner.close()
        self.folder.cleanup()

    @rule(number=st.integers(1, 3))
    def complete_groups(self, number: int) -> None:
        for _ in range(number):
            name = f"g{len(self.order):03d}"
            self.runner.run(self.complete(name))
            self.order.append(name)
            self.model.queue.append(name)
            self.model.made_by[name] = self.model.version

    async def complete(self, name: str) -> None:
        choice = Choice(
            output_ids=np.array([7], np.int32),
            logprobs=np.array([-1.0], np.float32),
            versions=(VersionSpan(version=self.model.version, start=0, end=1),),
            finish_reason="stop",
        )
        call = Call(
            call_id=name, session_id=name, index=0, dialect="chat", model="m", parent=None, origin="fresh", reason="",
            prompt_suffix=np.array([1], np.int32), prompt_len=1, choices=(choice,), sampling=Sampling(),
            messages=b"", served=b"", started_at=0.0, finished_at=0.0,
        )  # fmt: skip
        session = Session(session_id=name, key_hash=name, group_id=name, group_size=1, created_at=self.now)
        await self.buffer.open_session(session)
        await self.buffer.record_call(call)
        await self.buffer.finish_session(name, status="completed", reward=Reward(components={"r": 1.0}))

    @rule(num_steps=st.integers(1, 3), num_groups=st.integers(1, 2), publish=st.booleans())
    def train(self, num_steps: int, num_groups: int, publish: bool) -> None:
        """Whole steps of a learner, each with a checkpoint."""
        for _ in range(num_steps):
            self.complete_groups(num_groups)
            before = set(self.model.leases)
            self.lease(num_groups)
            for lease_id in set(self.model.leases) - before:
                self.consumed(lease_id)
            if publish:
                self.publish(commit=True)
            self.checkpoint()

    @rule(num_groups=st.integers(1, 3))
    def lease(self, num_groups: int) -> None:
        found = self.runner.run(self.buffer.lease(num_groups=num_groups, step=0, wait_s=0.0))
        wanted = self.model.take(num_groups)
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert [group.group_id for group in found.groups] == wanted[0]
            assert found.redelivered == (wanted[1] is not None)
            self.model.leases[found.lease_id] = wanted

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model.leases, key=list(self.model.leases).index)))
        self.consumed(lease_id)

    def consumed(self, lease_id: str) -> None:
        groups, batch = self.model.leases.pop(lease_id)
        number = self.model.append(batch, groups)
        for _ in range(2):
            assert self.runner.run(self.buffer.consume(lease_id, step=0)) == number

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model.leases, key=list(self.model.leases).index)))
        self.model.give_back(lease_id, self.order)
        self.runner.run(self.buffer.release(lease_id))
        self.ended.append(lease_id)

    @rule()
    def expire(self) -> None:
        self.now += 101.0
        self.runner.run(self.buffer.expire_due(self.now))
        for lease_id in list(self.model.leases):
            self.model.give_back(lease_id, self.order)
            self.ended.append(lease_id)

    @rule(commit=st.booleans())
    def publish(self, commit: bool) -> None:
        begun = self.runner.run(self.buffer.begin_publish(step=0, parent=self.model.version))
        assert begun.version == len(self.model.parents)
        self.model.parents[begun.version] = self.model.version
        if commit:
            self.runner.run(self.buffer.commit_publish(begun.publish_id, checksum="", snapshot=None))
            self.model.version = begun.version
        else:
            self.runner.run(self.buffer.fail_publish(begun.publish_id, "test"))

    @rule()
    def checkpoint(self) -> None:
        self.checkpoints.append((self.model.head, self.model.version))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        cursor, version = data.draw(st.sampled_from(self.checkpoints))
        report = self.runner.run(self.buffer.restore(cursor=cursor, version=version))
        for lease_id in list(self.model.leases):
            self.model.give_back(lease_id, self.order)
            self.ended.append(lease_id)
        self.model.head, self.model.version = cursor, version
        past = {self.model.consumptions[number].batch for number in self.model.path(cursor)}
        self.model.pending = [batch for batch in self.model.batches if batch not in past]
        self.model.left = {batch: self.model.batches[batch] for batch in self.model.pending}
        assert report.redelivered == len(self.model.pending)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def consume_an_ended_lease(self, data: st.DataObject) -> None:
        with pytest.raises(ConflictError):
            self.runner.run(self.buffer.consume(data.draw(st.sampled_from(self.ended)), step=0))

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.buffer.close())
        self.buffer = self.runner.run(self.opened())

    @invariant()
    def each_group_is_consumed_once_along_the_lineage(self) -> None:
        numbers = self.model.path(self.model.head)
        path = [group for number in numbers for group in self.model.consumptions[number].groups]
        assert len(path) == len(set(path))

    @invariant()
    def the_buffer_stands_where_the_model_stands(self) -> None:
        if not hasattr(self, "buffer"):
            return
        status = self.runner.run(self.buffer.status())
        assert (status.cursor, status.version) == (self.model.head, self.model.version)
        assert status.backlog == len(self.model.queue) + sum(len(self.model.left[b]) for b in self.model.pending)
        assert status.leased == sum(len(groups) for groups, _ in self.model.leases.values())
        assert status.redelivery == len(self.model.pending)


TestBufferModel = BufferMachine.TestCase
TestBufferModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_the_model_holds_in_postgresql(postgres: PostgresServer) -> None:
    class PostgresMachine(BufferMachine):
        def somewhere(self, path: Path) -> Place:
            return Place(path, postgres.new_schema())

    run_state_machine_as_test(PostgresMachine, settings=settings(max_examples=8, stateful_step_count=25, deadline=None))
