"""When a group is complete, who counts, and what is dropped with which reason."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from buffer_calls import first_call
from stores import Place

from rlagent.buffer import Buffer
from rlagent.errors import ConflictError, StoreError
from rlagent.types import Lease, Reward, Session

Opened = Callable[..., AbstractAsyncContextManager[Buffer]]


@pytest.fixture
def opened(place: Place) -> Opened:
    @asynccontextmanager
    async def context(**settings: object) -> AsyncIterator[Buffer]:
        buffer = await place.open(clock=lambda: 10.0, **settings)
        await buffer.ensure_initial(checksum="", snapshot="model")
        yield buffer
        await buffer.close()

    return context


async def start(
    buffer: Buffer, name: str, group: str | None = "g", size: int | None = 2, *, train: bool = True
) -> None:
    session = Session(
        session_id=name, key_hash=name, task_id="task", group_id=group, group_size=size, train=train, created_at=10.0
    )
    await buffer.open_session(session)


async def end(
    buffer: Buffer, name: str, *, status: str = "completed", reward: float | None = 1.0, trainable: bool = True
) -> None:
    await buffer.record_call(first_call(name, trainable=trainable))
    await buffer.finish_session(
        name, status=status, reward=None if reward is None else Reward(components={"r": reward})
    )


async def take(buffer: Buffer, num_groups: int = 1) -> Lease:
    lease = await buffer.lease(num_groups=num_groups, step=0, wait_s=0.0)
    assert lease is not None
    return lease


async def test_a_group_is_complete_when_its_size_is_reached(opened: Opened) -> None:
    async with opened() as buffer:
        for name in ("a", "b"):
            await start(buffer, name)
        await end(buffer, "a", reward=0.25)
        (group,) = (await buffer.status()).incomplete
        assert (group.group_id, group.task_id, group.size, group.deadline_at) == ("g", "task", 2, 610.0)
        assert (group.num_valid, group.num_invalid, group.num_running) == (1, 0, 1)
        assert await buffer.lease(num_groups=1, step=0, wait_s=0.0) is None
        await end(buffer, "b")
        (ready,) = (await take(buffer)).groups
        assert [(r.rollout_id, r.task_id, r.reward.total) for r in ready.rollouts] == [
            ("a", "task", 0.25),
            ("b", "task", 1.0),
        ]
        assert (ready.group_id, ready.num_missing, ready.ungrouped) == ("g", 0, False)
        assert [row.token_ids.tolist() for r in ready.rollouts for row in r.rows] == [[1, 5], [1, 5]]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ({"status": "error"}, "error"),
        ({"status": "timeout"}, "timeout"),
        ({"reward": None}, "no_reward"),
        ({"trainable": False}, "no_trainable_call"),
    ],
)
async def test_a_failed_member_uses_its_slot_up_and_counts_as_missing(
    opened: Opened, ending: dict[str, object], reason: str
) -> None:
    async with opened() as buffer:
        for name in ("a", "b"):
            await start(buffer, name)
        await end(buffer, "a", **ending)  # type: ignore[arg-type]
        await end(buffer, "b")
        (group,) = (await take(buffer)).groups
        assert [r.rollout_id for r in group.rollouts] == ["b"]
        assert group.num_missing == 1
        assert (await buffer.status()).count("rollout_dropped", reason) == 1


async def test_an_expired_member_uses_its_slot_up(opened: Opened) -> None:
    async with opened() as buffer:
        expiring = Session(session_id="a", key_hash="a", group_id="g", group_size=2, created_at=10.0, expires_at=20.0)
        await buffer.open_session(expiring)
        await start(buffer, "b")
        await end(buffer, "b")
        await buffer.expire_due(20.0)
        (group,) = (await take(buffer)).groups
        assert group.num_missing == 1


async def test_an_interrupted_member_leaves_its_slot_open(opened: Opened) -> None:
    async with opened() as buffer:
        for name in ("a", "b"):
            await start(buffer, name)
        await end(buffer, "a", status="interrupted")
        await end(buffer, "b")
        (group,) = (await buffer.status()).incomplete
        assert (group.num_valid, group.num_invalid, group.num_running) == (1, 0, 0)
        await start(buffer, "c", size=None)
        await end(buffer, "c")
        (ready,) = (await take(buffer)).groups
        assert [r.rollout_id for r in ready.rollouts] == ["b", "c"]
        assert ready.num_missing == 0


async def test_a_deadline_hands_the_group_out_short_and_late_members_are_dropped(opened: Opened) -> None:
    async with opened() as buffer:
        for name in ("a", "b", "c"):
            await start(buffer, name, size=3)
        await end(buffer, "a")
        await buffer.expire_due(609.0)
        assert (await buffer.status()).backlog == 0
        await buffer.expire_due(610.0)
        (group,) = (await take(buffer)).groups
        assert (len(group.rollouts), group.num_missing) == (1, 2)
        await end(buffer, "b")
        status = await buffer.status()
        assert status.count("rollout_dropped", "late") == 1
        assert status.count("group_completed", "deadline") == 1
        with pytest.raises(ConflictError, match="is complete"):
            await start(buffer, "d", size=3)


@pytest.mark.parametrize(("valid", "minimum", "dropped"), [(0, 1, 1), (1, 2, 1), (2, 2, 0)])
async def test_a_complete_group_with_too_few_rollouts_is_dropped(
    opened: Opened, valid: int, minimum: int, dropped: int
) -> None:
    async with opened(min_group_rollouts=minimum) as buffer:
        for number in range(3):
            await start(buffer, f"s{number}", size=3)
        for number in range(3):
            await end(buffer, f"s{number}", status="completed" if number < valid else "error")
        status = await buffer.status()
        assert status.count("group_dropped", "too_few_rollouts") == dropped
        assert status.backlog == 1 - dropped
        assert status.incomplete == ()


async def test_a_group_must_name_one_size(opened: Opened) -> None:
    async with opened() as buffer:
        with pytest.raises(StoreError, match="must give group_size"):
            await start(buffer, "a", size=None)
        await start(buffer, "b", size=2)
        with pytest.raises(ConflictError, match="has size 2, not 3"):
            await start(buffer, "c", size=3)
        with pytest.raises(StoreError, match="the buffer's own"):
            await start(buffer, "d", "ungrouped-1")


async def test_ungrouped_sessions_are_bundled_in_order_of_completion(opened: Opened) -> None:
    async with opened(ungrouped_size=2) as buffer:
        for name in ("a", "b", "c", "d"):
            await start(buffer, name, None)
        await end(buffer, "d")
        await end(buffer, "c", status="error")
        assert (await buffer.status()).waiting == 1
        await end(buffer, "a")
        (group,) = (await take(buffer)).groups
        assert group.ungrouped
        assert {r.rollout_id for r in group.rollouts} == {"a", "d"}
        assert all(row.group_id is None for r in group.rollouts for row in r.rows)
        await end(buffer, "b")
        assert (await buffer.status()).waiting == 1


async def test_untrained_sessions_enter_no_group(opened: Opened) -> None:
    async with opened(ungrouped_size=1) as buffer:
        await start(buffer, "a", "g", 1, train=False)
        await start(buffer, "b", None, train=False)
        assert (await buffer.status()).incomplete == ()
        for name in ("a", "b"):
            await end(buffer, name)
        status = await buffer.status()
        assert (status.backlog, status.waiting, status.newest_group, status.ledger) == (0, 0, None, ())


async def test_a_status_survives_json(opened: Opened) -> None:
    async with opened() as buffer:
        await start(buffer, "a")
        await start(buffer, "b", "h")
        await end(buffer, "b", status="error")
        status = await buffer.status()
        assert type(status).from_json(status.to_json()) == status
        assert status.newest_group == "h"
        assert (status.running, status.running_trained, status.version) == (1, 1, 0)
