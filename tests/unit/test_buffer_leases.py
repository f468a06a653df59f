"""The learner's side: order, waiting, staleness, consumption, and what a restore delivers again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from buffer_calls import first_call
from stores import Place

from rlagent.buffer import Buffer
from rlagent.errors import ConflictError, NotFoundError, StoreError
from rlagent.types import OPENED_BY_DRIVER, Lease, Reward, Session


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def buffer(place: Place, clock: Clock) -> AsyncIterator[Buffer]:
    buffer = await opened(place, clock)
    yield buffer
    await buffer.close()


async def opened(place: Place, clock: Clock, **settings: object) -> Buffer:
    buffer = await place.open(clock=clock, **{"max_staleness": 1, "lease_s": 100.0, **settings})
    await buffer.ensure_initial(checksum="", snapshot="model")
    return buffer


async def add(buffer: Buffer, name: str, version: int = 0) -> None:
    """A complete group of one rollout, sampled by a version."""
    await buffer.open_session(Session(session_id=name, key_hash=name, group_id=name, group_size=1, created_at=10.0))
    await buffer.record_call(first_call(name, version=version))
    await buffer.finish_session(name, status="completed", reward=Reward(components={"r": 1.0}))


async def publish(buffer: Buffer) -> int:
    begun = await buffer.begin_publish(step=0, parent=buffer.policy().version)
    return (await buffer.commit_publish(begun.publish_id, checksum="", snapshot=None)).version


async def lease(buffer: Buffer, num_groups: int = 1, wait_s: float = 0.0) -> Lease | None:
    return await buffer.lease(num_groups=num_groups, step=1, wait_s=wait_s)


async def take(buffer: Buffer, num_groups: int = 1) -> tuple[Lease, list[str]]:
    found = await lease(buffer, num_groups)
    assert found is not None
    return found, [group.group_id for group in found.groups]


async def train(buffer: Buffer, num_groups: int = 1) -> tuple[list[str], int]:
    found, names = await take(buffer, num_groups)
    return names, await buffer.consume(found.lease_id, step=1)


async def test_groups_come_in_the_order_in_which_they_became_complete(buffer: Buffer) -> None:
    for name in ("c", "a", "b"):
        await add(buffer, name)
    first, names = await take(buffer, 2)
    assert (names, first.redelivered, first.expires_at) == (["c", "a"], False, 110.0)
    assert await lease(buffer, 2) is None
    assert (await take(buffer))[1] == ["b"]
    with pytest.raises(StoreError, match="at least 1 group"):
        await lease(buffer, 0)


async def test_a_lease_waits_for_the_group_it_needs(buffer: Buffer) -> None:
    waiting = [asyncio.create_task(lease(buffer, 1, 30.0)) for _ in range(3)]
    for name in ("a", "b", "c"):
        await add(buffer, name)
    found = await asyncio.wait_for(asyncio.gather(*waiting), 10.0)
    assert sorted(group.group_id for one in found if one is not None for group in one.groups) == ["a", "b", "c"]


async def test_a_waiting_lease_is_woken_by_a_release(buffer: Buffer) -> None:
    await add(buffer, "a")
    held, _ = await take(buffer)
    waiting = asyncio.create_task(lease(buffer, 1, 30.0))
    await buffer.release(held.lease_id)
    found = await asyncio.wait_for(waiting, 10.0)
    assert found is not None


async def test_a_waiting_lease_ends_when_the_buffer_closes(place: Place, clock: Clock) -> None:
    buffer = await opened(place, clock)
    waiting = asyncio.create_task(lease(buffer, 1, 30.0))
    await buffer.status()  # by now the lease has looked at the queue and waits
    await buffer.close()
    assert await asyncio.wait_for(waiting, 10.0) is None


async def test_consumption_counts_up_and_is_idempotent(buffer: Buffer) -> None:
    for name in ("a", "b"):
        await add(buffer, name)
    (first, _), (second, _) = await take(buffer), await take(buffer)
    assert await buffer.consume(first.lease_id, step=1) == 1
    assert await buffer.consume(second.lease_id, step=2) == 2
    assert await buffer.consume(first.lease_id, step=1) == 1
    with pytest.raises(ConflictError, match="consumed and cannot be released"):
        await buffer.release(first.lease_id)
    with pytest.raises(NotFoundError, match="no lease 'x'"):
        await buffer.consume("x", step=1)
    status = await buffer.status()
    assert (status.cursor, status.count("group_consumed", "first"), status.leased) == (2, 2, 0)


async def test_a_released_or_expired_lease_returns_to_the_front(buffer: Buffer, clock: Clock) -> None:
    for name in ("a", "b", "c"):
        await add(buffer, name)
    released, _ = await take(buffer)
    await buffer.release(released.lease_id)
    await buffer.release(released.lease_id)
    expired, names = await take(buffer)
    assert names == ["a"]
    clock.now = 110.0
    await buffer.expire_due(110.0)
    assert (await take(buffer, 3))[1] == ["a", "b", "c"]
    with pytest.raises(ConflictError, match="lease_expired: its groups went back"):
        await buffer.consume(expired.lease_id, step=1)
    status = await buffer.status()
    assert status.count("group_delayed", "released") == status.count("group_delayed", "lease_expired") == 1


async def test_a_batch_holds_nothing_older_than_max_staleness(buffer: Buffer) -> None:
    await add(buffer, "old", 0)
    await publish(buffer)
    await add(buffer, "lag1", 0)
    await publish(buffer)
    await add(buffer, "lag0", 2)
    await add(buffer, "fine", 1)
    assert (await take(buffer, 2))[1] == ["lag0", "fine"]
    status = await buffer.status()
    assert (status.count("group_dropped", "stale"), status.backlog) == (2, 0)


async def test_a_version_that_was_never_published_is_dropped(buffer: Buffer) -> None:
    await add(buffer, "odd", 77)
    assert await lease(buffer) is None
    assert (await buffer.status()).count("group_dropped", "unknown_version") == 1


async def test_a_restore_delivers_again_in_order_in_the_same_batches(buffer: Buffer) -> None:
    for name in "abcdef":
        await add(buffer, name)
    assert await train(buffer, 1) == (["a"], 1)
    assert await train(buffer, 2) == (["b", "c"], 2)
    assert await train(buffer, 1) == (["d"], 3)
    held, names = await take(buffer, 1)
    assert names == ["e"]
    report = await buffer.restore(cursor=1, version=0)
    assert (report.redelivered, report.interrupted) == (2, 0)
    with pytest.raises(ConflictError, match="restored"):
        await buffer.consume(held.lease_id, step=1)
    again, names = await take(buffer, 5)
    assert (names, again.redelivered) == (["b", "c"], True)
    assert await buffer.consume(again.lease_id, step=2) == 4  # numbers are never reused
    assert await train(buffer, 5) == (["d"], 5)
    assert await train(buffer, 2) == (["e", "f"], 6)
    assert (await buffer.restore(cursor=6, version=0)).redelivered == 0
    status = await buffer.status()
    assert (status.cursor, status.backlog, status.count("group_consumed", "again")) == (6, 0, 3)


async def test_an_undone_lease_cannot_be_consumed_again(buffer: Buffer) -> None:
    await add(buffer, "a")
    first, _ = await take(buffer)
    await buffer.consume(first.lease_id, step=1)
    await buffer.restore(cursor=0, version=0)
    with pytest.raises(ConflictError, match="undone"):
        await buffer.consume(first.lease_id, step=1)


async def test_a_restore_to_a_checkpoint_of_a_branch_that_was_left(buffer: Buffer) -> None:
    for name in "abc":
        await add(buffer, name)
    for _ in "abc":
        await train(buffer)
    await buffer.restore(cursor=1, version=0)
    assert (await train(buffer))[0] == ["b"]  # consumption 4, beside 2 and 3
    assert (await buffer.restore(cursor=3, version=0)).redelivered == 0
    assert (await buffer.restore(cursor=4, version=0)).redelivered == 1
    assert (await train(buffer))[0] == ["c"]


async def test_a_released_redelivery_stays_one_batch_and_first(buffer: Buffer) -> None:
    for name in "abcd":
        await add(buffer, name)
    await train(buffer, 2)
    await train(buffer, 1)
    await buffer.restore(cursor=0, version=0)
    again, _ = await take(buffer)
    await buffer.release(again.lease_id)
    assert [(await train(buffer, 1))[0] for _ in range(3)] == [["a", "b"], ["c"], ["d"]]


async def test_a_restore_seals_the_drivers_open_sessions_and_lets_agents_from_outside_go_on(buffer: Buffer) -> None:
    await buffer.open_session(
        Session(session_id="s", key_hash="s", group_id="g", group_size=1, metadata=OPENED_BY_DRIVER)
    )
    await buffer.open_session(Session(session_id="outside", key_hash="outside", metadata={"user": "x"}))
    begun = await buffer.begin_publish(step=1, parent=0)
    assert (await buffer.restore(cursor=0, version=0)).interrupted == 1
    session = await buffer.session("s")
    assert session is not None
    assert (session.state, session.status) == ("failed", "interrupted")
    outside = await buffer.session("outside")
    assert outside is not None
    assert outside.state == "open"
    (group,) = (await buffer.status()).incomplete
    assert (group.num_valid, group.num_invalid, group.num_running) == (0, 0, 0)
    with pytest.raises(ConflictError, match="restored"):
        await buffer.commit_publish(begun.publish_id, checksum="", snapshot=None)


async def test_abandoned_versions_lag_from_the_fork(buffer: Buffer) -> None:
    await publish(buffer)
    await publish(buffer)
    await add(buffer, "a", 2)
    await add(buffer, "b", 2)
    await buffer.restore(cursor=0, version=1)
    assert (await train(buffer))[0] == ["a"]
    await publish(buffer)  # version 3, child of 1: version 2 forked one publish ago
    await add(buffer, "c", 3)
    assert (await take(buffer))[1] == ["b"]
    await publish(buffer)
    await add(buffer, "d", 2)
    assert (await take(buffer))[1] == ["c"]
    assert await lease(buffer) is None
    assert (await buffer.status()).count("group_dropped", "stale") == 1


async def test_abandoned_versions_can_be_dropped(place: Place, clock: Clock) -> None:
    buffer = await opened(place, clock, abandoned="drop")
    await publish(buffer)
    await add(buffer, "a", 1)
    await add(buffer, "b", 0)
    assert (await take(buffer, 2))[1] == ["a", "b"]
    await buffer.restore(cursor=0, version=0)
    assert (await take(buffer))[1] == ["b"]
    assert (await buffer.status()).count("group_dropped", "abandoned") == 1
    await buffer.close()


async def test_a_redelivered_batch_that_became_too_old_is_passed_once(buffer: Buffer) -> None:
    for name in ("a", "b"):
        await add(buffer, name, 0)
        await train(buffer)
    for _ in range(2):
        await publish(buffer)
    await add(buffer, "c", 2)
    await train(buffer)
    report = await buffer.restore(cursor=1, version=2)
    assert report.redelivered == 2
    names, number = await train(buffer)
    assert names == ["c"]
    assert [one.batch for one in await buffer.lineage()] == [1, 3]  # what was passed has a number, and made no step
    assert (await buffer.status()).count("group_dropped", "stale") == 1
    assert (await buffer.restore(cursor=number, version=2)).redelivered == 0  # this lineage is past "b"
    assert (await buffer.restore(cursor=1, version=0)).redelivered == 2
    assert (await train(buffer))[0] == ["b"]  # at version 0 it is fresh


async def test_everything_survives_a_reopen(place: Place, clock: Clock) -> None:
    buffer = await opened(place, clock)
    for name in "abc":
        await add(buffer, name)
    await train(buffer)
    held, names = await take(buffer)
    before = await buffer.status()
    await buffer.close()
    buffer = await opened(place, clock)
    assert await buffer.status() == before
    assert names == ["b"]
    assert await buffer.consume(held.lease_id, step=1) == 2
    assert (await train(buffer))[0] == ["c"]
    await buffer.close()


async def test_what_was_consumed_can_be_read_again(buffer: Buffer) -> None:
    for name in ("a", "b", "c", "d"):
        await add(buffer, name)
    given = []
    for step in range(2):
        lease, _ = await take(buffer, 2)
        given.append(lease.groups)
        await buffer.consume(lease.lease_id, step=step)
    history = await buffer.lineage()
    assert [(one.number, one.batch, one.step) for one in history] == [(1, 1, 0), (2, 2, 1)]
    for one, groups in zip(history, given, strict=True):
        again = await buffer.consumed(one.batch)
        assert [group.group_id for group in again] == [group.group_id for group in groups]
        for found, wanted in zip(again, groups, strict=True):
            assert [row.token_ids.tolist() for r in found.rollouts for row in r.rows] == [
                row.token_ids.tolist() for r in wanted.rollouts for row in r.rows
            ]
    await buffer.restore(cursor=1, version=0)
    assert [one.number for one in await buffer.lineage()] == [1]
    with pytest.raises(NotFoundError, match="batch 2"):
        await buffer.consumed(2)
    lease, _ = await take(buffer)  # batch 2 again, in its old extent
    await buffer.consume(lease.lease_id, step=1)
    assert [(one.number, one.batch) for one in await buffer.lineage()] == [(1, 1), (3, 2)]


async def test_a_lease_says_how_far_its_versions_lag(place: Place, clock: Clock) -> None:
    """Numbers may be further apart than publishes: a publish of the same weights adds no lag."""
    buffer = await opened(place, clock, max_staleness=5)
    await add(buffer, "old", version=0)
    for same in (False, True, True):
        current = buffer.policy().version
        publish = await buffer.begin_publish(step=1, parent=current, same_weights=same)
        await buffer.commit_publish(publish.publish_id, checksum="", snapshot=None)
    await add(buffer, "new", version=3)
    lease, _ = await take(buffer, 2)
    assert lease.lags == {0: 1, 3: 0}
    await buffer.close()
