"""The collector starts groups whenever there is room, also where room came up without a word."""

import asyncio
from typing import Any

from rlagent.buffer.status import BufferStatus
from rlagent.collect import Collector
from rlagent.config import TaskDrawConfig
from rlagent.task_draw import make_draw

TASKS = [{"id": "a"}, {"id": "b"}]


class Buffer:
    """The router's client and the pool of workers, of which only this is asked: how full it is, and for a session."""

    def __init__(self) -> None:
        self.backlog = 1
        self.looked = asyncio.Event()
        self.opened = asyncio.Event()

    async def status(self) -> BufferStatus:
        self.looked.set()
        return BufferStatus(
            backlog=self.backlog, leased=0, redelivery=0, running=0, running_trained=0, waiting=0, incomplete=(), ledger=(),
            cursor=0, version=1, depth=1, step=1, newest_version=1, newest_group=None,
        )  # fmt: skip

    async def new_session(self, **_session: Any) -> "Buffer":
        self.backlog += 1
        self.opened.set()
        return self

    def to_json(self) -> dict[str, Any]:
        return {}

    async def run(self, _task: Any, _handle: Any) -> Any:
        await asyncio.Event().wait()


def made(buffer: Any) -> Collector:
    return Collector(
        buffer, buffer, TASKS, group_size=1, groups_per_step=1, max_staleness=0,
        draw=make_draw(TaskDrawConfig(), TASKS, seed=0, groups_per_step=1), steps_left=1, deadline_s=60,
        failed=lambda _session_id, _outcome: None,
    )  # fmt: skip


async def test_a_group_that_becomes_stale_before_its_lease_is_replaced() -> None:
    buffer: Any = Buffer()
    running = asyncio.create_task(made(buffer).run())
    await buffer.looked.wait()
    assert not buffer.opened.is_set()
    buffer.backlog = 0  # as when a lease finds it stale
    await asyncio.wait_for(buffer.opened.wait(), timeout=60)
    running.cancel()
    await asyncio.wait({running})


async def test_an_end_that_comes_with_the_last_step_is_not_lost() -> None:
    buffer: Any = Buffer()
    collector = made(buffer)
    running = asyncio.create_task(collector.run())
    await buffer.looked.wait()
    await asyncio.sleep(0)  # it waits now for news
    collector.advance(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=20)
    assert done
    assert running.cancelled()
