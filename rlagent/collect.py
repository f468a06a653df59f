"""Collecting rollouts: which task next, how many groups at once, and what becomes of each rollout.

In the flow: tasks -> sessions (opened at the router) -> workers -> finish. Bounded staleness comes from admission alone:
with B groups a step and max_staleness s, at most (s + 1) * B groups exist that are running, ready or being trained on
(AReaL, arXiv 2505.24298). s = 0 is the synchronous loop; nothing else changes between placements.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from rlagent.buffer.status import BufferStatus
from rlagent.client import RouterClient
from rlagent.launch.rollout_pool import RolloutPool
from rlagent.rollout import Outcome, Task, task_id
from rlagent.task_draw import TaskDraw
from rlagent.types import GREEDY, OPENED_BY_DRIVER, Reward

_MAX_ATTEMPTS: Final = 3  # a rollout whose worker died under it this often counts as failed
_GROUP_PREFIX: Final = "group-"
_LOOK_AGAIN_S: Final = 1.0  # the buffer drops a group that became stale when it is to be leased, and tells nobody


class Collector:
    """Keeps the right number of groups running. Started as a task by `run`, told of progress by `advance`."""

    def __init__(
        self, client: RouterClient, pool: RolloutPool, tasks: Sequence[Task], *, group_size: int, groups_per_step: int,
        max_staleness: int, draw: TaskDraw, steps_left: int, deadline_s: float, failed: Callable[[str, Outcome], None],
        greedy: bool = False,
    ) -> None:  # fmt: skip
        self._client = client
        self._pool = pool
        self._tasks = tasks
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._draw = draw
        self._steps_left = steps_left
        self._deadline_s = deadline_s
        self._failed = failed  # told of each rollout that failed, with its session
        self._greedy = greedy  # one rollout more of each task at temperature 0, whose reward its group's rollouts carry
        self._replaced = 0  # groups of this step's leases that are not trained on
        self._training = 0  # groups leased whose weights are not published yet
        self._wake = asyncio.Event()
        self.next_index = 0  # of the group that is started next
        self.failures: dict[str, int] = {}  # failed rollouts by status, and verifiers by how, since the start

    def training(self, num_groups: int) -> None:
        """A lease of so many groups is being trained on: they count as outstanding until `advance`."""
        self._training = num_groups

    def replace(self, num_groups: int) -> None:
        """So many groups are wanted in place of leased ones that teach nothing."""
        self._replaced += num_groups
        self._wake.set()

    def advance(self, steps_left: int) -> None:
        """New weights are published: what they were trained on is no longer outstanding."""
        self._training = self._replaced = 0
        self._steps_left = steps_left
        self._wake.set()

    async def run(self) -> None:
        """Launch groups whenever there is room, until cancelled. First finishes the groups a dead driver left incomplete."""
        async with asyncio.TaskGroup() as running:
            status = await self._client.status()
            self.next_index = _next_index(status)
            for group in status.incomplete:
                if group.group_id.startswith(_GROUP_PREFIX):
                    missing = group.size - group.num_valid - group.num_invalid - group.num_running
                    index = _index(group.group_id)
                    running.create_task(self._group(index, self._draw.place(index, group.task_id), missing))
            while True:
                self._wake.clear()
                status = await self._client.status()
                for _ in range(self._room(status)):
                    opened = asyncio.Event()
                    place = self._draw.place(self.next_index)
                    running.create_task(self._group(self.next_index, place, self._group_size, opened))
                    self.next_index += 1
                    await opened.wait()
                # Not asyncio.wait_for: a cancellation that comes with the event would be lost there.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await self._wake.wait()

    def _room(self, status: BufferStatus) -> int:
        outstanding = status.backlog + len(status.incomplete) + max(status.leased, self._training)
        allowed = min(self._max_staleness + 1, self._steps_left) * self._groups_per_step
        return max(0, allowed + self._replaced - outstanding)

    async def _group(self, index: int, place: int, num_rollouts: int, opened: asyncio.Event | None = None) -> None:
        """Run the (missing) rollouts of one group, of the task at `place`. `opened` is set once the buffer knows the group."""
        session: dict[str, Any] = {
            "task_id": task_id(self._tasks[place], place),
            "group_id": f"{_GROUP_PREFIX}{index:08d}",
            "group_size": self._group_size,
            "deadline_s": self._deadline_s,
            "metadata": OPENED_BY_DRIVER,
        }
        first = await self._client.new_session(**session)
        if opened is not None:
            opened.set()
        async with asyncio.TaskGroup() as members:
            baseline = members.create_task(self._baseline(self._tasks[place], place)) if self._greedy else None
            for member in range(num_rollouts):
                members.create_task(self._member(self._tasks[place], session, first if member == 0 else None, baseline))
        self._wake.set()

    async def _baseline(self, task: Task, place: int) -> float | None:
        """The reward of the task's greedy rollout, never trained on; None when it failed every time."""
        for _ in range(_MAX_ATTEMPTS):
            handle = await self._client.new_session(
                task_id=task_id(task, place), train=False, sampling={"temperature": 0.0}, metadata=OPENED_BY_DRIVER
            )
            outcome = await self._pool.run(task, handle.to_json())
            await self._client.finish(handle.session_id, reward=outcome.reward, status=outcome.status)
            if outcome.reward is not None:
                return outcome.reward.total
        return None

    async def _member(
        self, task: Task, session: Mapping[str, Any], handle: Any, baseline: asyncio.Task[float | None] | None
    ) -> None:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            if handle is None:
                handle = await self._client.new_session(**session)
            outcome = await self._pool.run(task, handle.to_json())
            if baseline is not None and outcome.reward is not None:
                outcome = _over_greedy(outcome.reward, await baseline)
            if outcome.status == "interrupted" and attempt == _MAX_ATTEMPTS:
                outcome = Outcome(status="error", error=outcome.error)
            if outcome.status != "completed":
                self.failures[outcome.status] = self.failures.get(outcome.status, 0) + 1
                self._failed(handle.session_id, outcome)
            for how in () if outcome.reward is None else outcome.reward.failed.values():
                name = f"verifier_{how}"
                self.failures[name] = self.failures.get(name, 0) + 1
            await self._client.finish(handle.session_id, reward=outcome.reward, status=outcome.status)
            if outcome.status != "interrupted":
                return
            handle = None


def _over_greedy(reward: Reward, baseline: float | None) -> Outcome:
    if baseline is None:
        return Outcome(status="error", error="the task's greedy rollout, the baseline of remax, failed")
    return Outcome(status="completed", reward=replace(reward, calls={**reward.calls, GREEDY: baseline}))


def _index(group_id: str) -> int:
    return int(group_id.removeprefix(_GROUP_PREFIX))


def _next_index(status: BufferStatus) -> int:
    newest = status.newest_group
    return _index(newest) + 1 if newest is not None and newest.startswith(_GROUP_PREFIX) else 0
