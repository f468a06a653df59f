"""Sessions and calls in the buffer: what is refused, what a seal does, what comes back after a reopen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from stores import Place, make_call

from rlagent.buffer import Buffer
from rlagent.errors import ConflictError, NotFoundError, StoreError
from rlagent.types import PromptImage, Reward, Session

SESSION = Session(session_id="s", key_hash="k", created_at=1.0, expires_at=50.0, metadata={"a": [1]})
ONE = Reward(components={"correct": 1.0})


@pytest.fixture
async def buffer(place: Place) -> AsyncIterator[Buffer]:
    buffer = await place.open(clock=lambda: 10.0)
    await buffer.ensure_initial(checksum="", snapshot="model")
    yield buffer
    await buffer.close()


async def test_a_session_and_its_calls_survive_a_reopen(place: Place) -> None:
    buffer = await place.open()
    await buffer.open_session(SESSION)
    await buffer.record_call(make_call(0))
    await buffer.record_call(make_call(1, parent="s.0", prompt_len=7))
    buffer.mark_delivered("s.0")
    await buffer.close()
    buffer = await place.open()
    assert await buffer.session("s") == SESSION == await buffer.session_by_key("k")
    assert await buffer.session("t") is None is await buffer.session_by_key("t")
    first, second = await buffer.calls("s")
    assert (first.delivery, second.delivery) == ("delivered", "committed")
    (row,) = await buffer.trajectories("s")
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    assert await buffer.trajectories("t") == []
    await buffer.close()


async def test_an_image_is_kept_once_and_its_call_needs_its_bytes(place: Place) -> None:
    image = PromptImage(digest="d1", position=1, num_tokens=7)
    seeing = replace(make_call(0), images=(image, replace(image, position=0)), num_fed=14)
    buffer = await place.open()
    await buffer.open_session(SESSION)
    with pytest.raises(StoreError, match="its image d1 is not given"):
        await buffer.record_call(seeing)
    await buffer.record_call(seeing, images={"d1": b"\0bytes\xff"})
    await buffer.record_call(replace(make_call(1), images=(image,), num_fed=8))  # known by now
    await buffer.close()
    buffer = await place.open()
    assert await buffer.image("d1") == b"\0bytes\xff"
    assert await buffer.image("d2") is None
    first, second = await buffer.calls("s")
    assert (first.images, first.num_fed, first.num_prompt_tokens) == (seeing.images, 14, 14)
    assert (second.images, second.num_prompt_tokens) == ((image,), 8)
    assert not any(row.loss_mask.any() for row in await buffer.trajectories("s"))
    await buffer.close()


async def test_calls_that_differ_in_an_image_alone_are_no_retries_of_one_another(buffer: Buffer) -> None:
    await buffer.open_session(SESSION)
    for index, digest in enumerate(("d1", "d2", "d2")):
        image = PromptImage(digest=digest, position=1, num_tokens=7)
        await buffer.record_call(replace(make_call(index), images=(image,), num_fed=8), images={digest: b"x"})
    buffer.mark_delivered("s.0")
    assert [row.call_ids for row in await buffer.trajectories("s")] == [("s.0",), ("s.2",)]


async def test_a_chain_is_a_call_and_what_it_goes_on_from(buffer: Buffer) -> None:
    await buffer.open_session(SESSION)
    await buffer.record_call(make_call(0))
    await buffer.record_call(make_call(1))
    await buffer.record_call(make_call(2, parent="s.0", prompt_len=7))
    await buffer.record_call(make_call(3, parent="s.2", prompt_len=12))
    await buffer.record_call(make_call(4, parent="s.0", prompt_len=7))
    assert [call.call_id for call in await buffer.chain("s", "s.3")] == ["s.0", "s.2", "s.3"]
    assert [call.call_id for call in await buffer.chain("s", "s.1")] == ["s.1"]
    assert await buffer.chain("other", "s.3") == await buffer.chain("s", "s.9") == []
    found = await buffer.call("s", "s.4")
    assert found is not None
    assert found.index == 4
    assert await buffer.call("other", "s.4") is None


async def test_ids_and_keys_are_used_once(buffer: Buffer) -> None:
    await buffer.open_session(SESSION)
    with pytest.raises(ConflictError, match="'s' exists"):
        await buffer.open_session(replace(SESSION, key_hash="other"))
    with pytest.raises(ConflictError, match="use a new key"):
        await buffer.open_session(replace(SESSION, session_id="other"))
    await buffer.finish_session("s", status="completed", reward=ONE)
    with pytest.raises(ConflictError, match="use a new key"):
        await buffer.open_session(replace(SESSION, session_id="other"))
    with pytest.raises(StoreError, match="must start open"):
        await buffer.open_session(Session(session_id="x", key_hash="x", state="sealed"))


async def test_a_sealed_session_takes_nothing_more(buffer: Buffer) -> None:
    await buffer.open_session(SESSION)
    await buffer.record_call(make_call(0))
    await buffer.finish_session("s", status="completed", reward=ONE)
    with pytest.raises(ConflictError, match="takes nothing more"):
        await buffer.record_call(make_call(1))
    with pytest.raises(ConflictError, match="takes nothing more"):
        await buffer.add_reward("s", ONE)
    buffer.mark_orphan("s.0")  # too late: rows of a sealed session do not change
    await buffer.status()
    await buffer.open_session(replace(SESSION, session_id="t", key_hash="t"))
    assert [call.delivery for call in await buffer.calls("s")] == ["committed"]


async def test_unknown_sessions_parents_and_lengths_are_refused(buffer: Buffer) -> None:
    with pytest.raises(NotFoundError, match="no session 's'"):
        await buffer.record_call(make_call(0))
    with pytest.raises(NotFoundError):
        await buffer.finish_session("s", status="completed", reward=None)
    await buffer.open_session(SESSION)
    await buffer.open_session(Session(session_id="t", key_hash="t"))
    await buffer.record_call(make_call(0))
    with pytest.raises(StoreError, match="recorded already"):
        await buffer.record_call(make_call(0))
    with pytest.raises(StoreError, match=r"parent s\.5 is not an earlier call"):
        await buffer.record_call(make_call(1, parent="s.5", prompt_len=7))
    with pytest.raises(StoreError, match=r"parent s\.0 is not an earlier call"):
        await buffer.record_call(make_call(1, parent="s.0", prompt_len=7, session_id="t"))
    with pytest.raises(StoreError, match="prompt_len is 6, its pieces add up to 7"):
        await buffer.record_call(make_call(1, parent="s.0", prompt_len=6))
    assert len(await buffer.calls("s")) == 1


async def test_rewards_add_up_and_a_given_one_replaces_the_total(buffer: Buffer) -> None:
    await buffer.open_session(SESSION)
    await buffer.record_call(make_call(0))
    await buffer.add_reward("s", Reward(components={"a": 1.0}))
    await buffer.add_reward("s", Reward(components={"a": 0.5, "b": 2.0}, calls={"s.0": 4.0}))
    session = await buffer.session("s")
    assert session is not None
    assert session.reward == Reward(components={"a": 1.5, "b": 2.0}, calls={"s.0": 4.0})
    with pytest.raises(NotFoundError, match=r"no call 's\.9'"):
        await buffer.add_reward("s", Reward(calls={"s.9": 1.0}))
    with pytest.raises(StoreError, match="finite"):
        await buffer.add_reward("s", Reward(components={"a": float("nan")}))
    with pytest.raises(StoreError, match="finite"):
        await buffer.finish_session("s", status="completed", reward=Reward(components={"a": float("inf")}))
    done = await buffer.finish_session("s", status="completed", reward=ONE)
    assert done.reward == Reward(components={"correct": 1.0}, calls={"s.0": 4.0})


async def test_finish_twice(buffer: Buffer) -> None:
    await buffer.open_session(SESSION)
    first = await buffer.finish_session("s", status="completed", reward=ONE)
    assert (first.state, first.status, first.sealed_at) == ("sealed", "completed", 10.0)
    assert await buffer.finish_session("s", status="completed", reward=ONE) == first
    turned = Reward(components=dict(reversed(ONE.components.items())))
    assert await buffer.finish_session("s", status="completed", reward=turned) == first
    for status, reward in (("completed", None), ("error", ONE), ("completed", Reward(components={"correct": 2.0}))):
        with pytest.raises(ConflictError, match="already finished as 'completed'"):
            await buffer.finish_session("s", status=status, reward=reward)
    assert await buffer.session("s") == first


async def test_time_runs_out(buffer: Buffer) -> None:
    await buffer.open_session(SESSION)
    await buffer.expire_due(49.0)
    assert (await buffer.status()).running == 1
    await buffer.expire_due(50.0)
    session = await buffer.session("s")
    assert session is not None
    assert (session.state, session.status) == ("expired", "expired")
    with pytest.raises(ConflictError, match="already finished as 'expired'"):
        await buffer.finish_session("s", status="completed", reward=ONE)


async def test_listing_is_newest_first_by_state(buffer: Buffer) -> None:
    for number in range(4):
        await buffer.open_session(Session(session_id=f"s{number}", key_hash=f"k{number}", created_at=float(number)))
    await buffer.finish_session("s2", status="error", reward=None)
    assert [s.session_id for s in await buffer.sessions(limit=3)] == ["s3", "s2", "s1"]
    assert [s.session_id for s in await buffer.sessions(state="open")] == ["s3", "s1", "s0"]
    assert [s.session_id for s in await buffer.sessions(state="failed")] == ["s2"]
