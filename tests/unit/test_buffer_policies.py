"""Publishes: numbers are given out once, only committed versions are current, snapshots follow the lineage."""

from __future__ import annotations

import pytest
from stores import Place

from rlagent.buffer import Buffer
from rlagent.errors import ConflictError, NotFoundError, StoreError


async def opened(place: Place) -> Buffer:
    buffer = await place.open(clock=lambda: 7.0)
    await buffer.ensure_initial(checksum="c0", snapshot="model")
    return buffer


async def publish(buffer: Buffer, parent: int, snapshot: str | None = None) -> int:
    begun = await buffer.begin_publish(step=1, parent=parent)
    return (await buffer.commit_publish(begun.publish_id, checksum="c", snapshot=snapshot)).version


async def test_the_model_directory_is_version_0_once(place: Place) -> None:
    buffer = await place.open()
    with pytest.raises(StoreError, match="no policy version yet"):
        buffer.policy()
    initial = await buffer.ensure_initial(checksum="c0", snapshot="model")
    assert (initial.version, initial.parent, initial.depth, initial.snapshot) == (0, None, 0, "model")
    assert await publish(buffer, 0) == 1
    assert (await buffer.ensure_initial(checksum="other", snapshot="other")).version == 1
    await buffer.close()


async def test_a_number_is_never_reused(place: Place) -> None:
    buffer = await opened(place)
    begun = await buffer.begin_publish(step=1, parent=0)
    assert begun.version == 1
    assert buffer.policy().version == 0
    await buffer.fail_publish(begun.publish_id, "an engine died")
    await buffer.fail_publish(begun.publish_id, "again")
    with pytest.raises(ConflictError, match="an engine died"):
        await buffer.commit_publish(begun.publish_id, checksum="", snapshot=None)
    assert (await buffer.begin_publish(step=1, parent=0)).version == 2
    await buffer.close()  # with publish 2 under way
    buffer = await opened(place)
    assert buffer.policy().version == 0
    assert await publish(buffer, 0) == 3
    assert (await buffer.status()).newest_version == 3
    await buffer.close()


async def test_one_publish_at_a_time_from_a_published_parent(place: Place) -> None:
    buffer = await opened(place)
    with pytest.raises(NotFoundError, match="version 5 was never published"):
        await buffer.begin_publish(step=1, parent=5)
    begun = await buffer.begin_publish(step=1, parent=0)
    with pytest.raises(ConflictError, match="under way"):
        await buffer.begin_publish(step=1, parent=0)
    first = await buffer.commit_publish(begun.publish_id, checksum="c1", snapshot=None)
    assert first == await buffer.commit_publish(begun.publish_id, checksum="c1", snapshot=None) == buffer.policy()
    with pytest.raises(ConflictError, match="cannot fail any more"):
        await buffer.fail_publish(begun.publish_id, "late")
    with pytest.raises(NotFoundError, match="no publish 'x'"):
        await buffer.fail_publish("x", "?")
    await buffer.close()


async def test_depth_and_the_newest_snapshot_follow_the_lineage(place: Place) -> None:
    buffer = await opened(place)
    await publish(buffer, 0, "one")
    await publish(buffer, 1)
    assert (buffer.policy().version, buffer.policy().depth) == (2, 2)
    snapshot = buffer.newest_snapshot()
    assert snapshot is not None
    assert snapshot.snapshot == "one"
    await buffer.restore(cursor=0, version=0)
    assert buffer.policy().version == 0
    snapshot = buffer.newest_snapshot()
    assert snapshot is not None
    assert snapshot.snapshot == "model"  # "one" belongs to the branch that was left
    assert await publish(buffer, 0) == 3
    assert buffer.policy().depth == 1
    await buffer.close()
    buffer = await opened(place)
    assert (buffer.policy().version, buffer.policy().depth) == (3, 1)
    with pytest.raises(NotFoundError, match="version 9 was never published"):
        await buffer.restore(cursor=0, version=9)
    with pytest.raises(NotFoundError, match="cursor 4 was never given out"):
        await buffer.restore(cursor=4, version=0)
    await buffer.close()
