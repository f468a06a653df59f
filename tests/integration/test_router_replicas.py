"""Two `rlagent serve` processes on one PostgreSQL database and one engine: sticky sessions, takeover, publishes, crashes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, fake_engine
from postgres_server import PostgresServer, server_or_skip
from replicas import Replica, answer, replica
from router_harness import USER, said

from rlagent.errors import RouterError
from rlagent.types import OPENED_BY_DRIVER


@dataclass(kw_only=True)
class Pair:
    engine: FakeEngine
    a: Replica
    b: Replica


@pytest.fixture
async def pair(postgres: PostgresServer, tmp_path: Path) -> AsyncIterator[Pair]:
    database = postgres.new_schema()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(fake_engine(answer))
        a = await stack.enter_async_context(replica(engine, database, tmp_path / "a"))
        b = await stack.enter_async_context(replica(engine, database, tmp_path / "b"))
        yield Pair(engine=engine, a=a, b=b)


async def test_a_session_of_a_killed_replica_goes_on_at_another_token_for_token(pair: Pair) -> None:
    session = await pair.a.admin.new_session(group_id="g", group_size=1)
    assert session.base_url.startswith(pair.a.url)
    history = list(USER)
    for _ in range(2):
        await pair.a.turn(session, history)
    last = await pair.a.chat(session, history)
    hold = asyncio.Event()
    pair.engine.script = lambda body: said("never seen", hold=hold)
    pair.engine.started.clear()
    lost = asyncio.create_task(pair.a.chat(session, [*USER, {"role": "user", "content": "in flight"}]))
    await pair.engine.started.wait()
    await pair.a.kill()
    with pytest.raises(httpx.TransportError):
        await lost
    pair.engine.script = answer
    hold.set()
    num_requests = len(pair.engine.requests)
    again = await pair.b.chat(session, history, retry=1)  # the SDK's retry: answered from the record
    assert again.content == last.content
    assert len(pair.engine.requests) == num_requests
    history += [again.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    await pair.b.turn(session, history)
    calls = await pair.b.admin.calls(session.session_id)
    assert [call["origin"] for call in calls] == ["fresh", "extended", "extended", "extended"]
    assert calls[-1]["prompt_ids"] == pair.engine.requests[-1]["input_ids"]
    for before, after in pairwise(calls):
        prefix = before["prompt_ids"] + before["choices"][0]["output_ids"]
        assert after["prompt_ids"][: len(prefix)] == prefix
    await pair.b.admin.finish(session.session_id, reward=1.0)
    (row,) = await pair.b.admin.trajectories(session.session_id)
    assert row["token_ids"] == calls[-1]["prompt_ids"] + calls[-1]["choices"][0]["output_ids"]
    assert sum(row["loss_mask"]) == sum(len(call["choices"][0]["output_ids"]) for call in calls)


async def test_a_session_that_wanders_between_replicas_stays_one_chain(pair: Pair) -> None:
    session = await pair.a.admin.new_session()
    history = list(USER)
    for number in range(8):
        await (pair.a, pair.b)[number % 2].turn(session, history)
    calls = await pair.a.admin.calls(session.session_id)
    (row,) = await pair.b.admin.trajectories(session.session_id)
    assert len(row["token_ids"]) == len(calls[-1]["prompt_ids"]) + len(calls[-1]["choices"][0]["output_ids"])
    assert [call["index"] for call in calls] == sorted({call["index"] for call in calls})


async def test_calls_of_two_replicas_at_once_fork_and_never_mix(pair: Pair) -> None:
    session = await pair.a.admin.new_session()
    history = list(USER)
    await pair.a.turn(session, history)
    branches = [list(history), [*history[:-1], {"role": "user", "content": "Another question."}]]

    async def go(at: Replica, branch: list[Any]) -> None:
        for _ in range(3):
            await at.turn(session, branch)

    await asyncio.gather(go(pair.a, branches[0]), go(pair.b, branches[1]))
    calls = {call["call_id"]: call for call in await pair.a.admin.calls(session.session_id)}
    assert len({call["index"] for call in calls.values()}) == len(calls)
    for call in calls.values():
        if call["parent"] is not None:
            before = calls[call["parent"]["call_id"]]
            prefix = before["prompt_ids"] + before["choices"][call["parent"]["choice"]]["output_ids"]
            assert call["prompt_ids"][: len(prefix)] == prefix
    assert sum(call["origin"] == "fresh" for call in calls.values()) == 1


async def test_one_learner_gets_the_groups_of_both_replicas_once(pair: Pair) -> None:
    async def rollout(group: str, at: Replica) -> None:
        session = await at.admin.new_session(group_id=group, group_size=2)
        await at.turn(session, list(USER))
        await at.admin.finish(session.session_id, reward=1.0)

    waiting = asyncio.create_task(pair.b.admin.lease(num_groups=2, step=0, wait_s=60))
    groups = [f"g{number}" for number in range(6)]
    await asyncio.gather(*(rollout(group, at) for group in groups for at in (pair.a, pair.b)))
    found: list[str] = []
    lease, at = await waiting, pair.a
    while lease is not None:
        found += [group.group_id for group in lease.groups]
        assert all(len(group.rollouts) == 2 for group in lease.groups)
        assert await at.admin.consume(lease.lease_id, step=0) == len(found) // 2
        at = pair.b if at is pair.a else pair.a
        lease = await at.admin.lease(num_groups=2, step=0, wait_s=0)
    assert sorted(found) == groups
    assert (await pair.a.admin.status()).count("group_consumed", "first") == 6


async def test_a_publish_at_one_replica_is_seen_by_the_other(pair: Pair) -> None:
    ticket = await pair.a.admin.begin_publish(step=1, parent=0)
    assert (await pair.b.admin.policy())["publishing"] == ticket.version
    with pytest.raises(RouterError, match="under way"):
        await pair.b.admin.begin_publish(step=1, parent=0)
    pair.engine.version = str(ticket.version)
    with pytest.raises(RouterError, match="another replica"):
        await pair.b.admin.commit_publish(ticket.publish_id, checksum="", snapshot=None)
    assert pair.engine.paths()[-1] == "/pause_generation"  # nothing above let the engine go on
    await pair.a.admin.commit_publish(ticket.publish_id, checksum="c", snapshot="/weights/1")
    shown = await pair.b.admin.policy()
    assert (shown["version"], shown["checksum"], shown["snapshot"]["version"]) == (1, "c", 1)
    async with asyncio.timeout(30):
        while [engine["version"] for engine in (await pair.b.admin.policy())["engines"]] != [1]:
            pass
    second = await pair.b.admin.begin_publish(step=2, parent=1)
    pair.engine.version = str(second.version)
    assert (await pair.b.admin.commit_publish(second.publish_id, checksum="", snapshot=None))["version"] == 2
    assert (await pair.a.admin.policy())["version"] == 2
    assert "/update_weights_from_disk" not in pair.engine.paths()


def brought_back(engine: FakeEngine) -> bool:
    """Whether a replica, or each of them, loaded the snapshot and let the engine go on."""
    return "/update_weights_from_disk" in engine.paths() and engine.paths()[-1] == "/continue_generation"


async def test_a_restore_ends_the_sessions_and_the_publish_of_all_replicas(pair: Pair) -> None:
    session = await pair.a.admin.new_session(metadata=OPENED_BY_DRIVER)
    history = list(USER)
    await pair.a.turn(session, history)
    ticket = await pair.a.admin.begin_publish(step=1, parent=0)
    pair.engine.version = "half of it"
    report = await pair.b.admin.restore(cursor=0, version=0)
    assert report.interrupted == 1
    assert (await pair.a.chat(session, history)).status_code == 409
    async with asyncio.timeout(30):
        while not brought_back(pair.engine):
            await asyncio.wait_for(pair.a.admin.policy(), 10)
    with pytest.raises(RouterError, match="restored"):
        await pair.a.admin.commit_publish(ticket.publish_id, checksum="", snapshot=None)


@pytest.mark.slow  # a replica is dead when nothing was heard of it for ten seconds
async def test_what_a_killed_replica_was_publishing_is_given_up_by_the_other(pair: Pair) -> None:
    ticket = await pair.a.admin.begin_publish(step=1, parent=0)
    pair.engine.version = "half of it"
    await pair.a.kill()
    async with asyncio.timeout(60):
        while not brought_back(pair.engine):
            await pair.b.admin.lease(num_groups=1, step=0, wait_s=0.2)  # nothing is there: a pause
        assert (await pair.b.admin.policy())["publishing"] is None
    assert pair.engine.version == "0"
    assert (await pair.b.admin.begin_publish(step=1, parent=0)).version == ticket.version + 1


async def test_a_server_that_is_killed_fails_calls_until_it_is_back(tmp_path: Path) -> None:
    server = server_or_skip(fsync=True)
    try:
        async with fake_engine(answer) as engine, replica(engine, server.new_schema(), tmp_path) as router:
            session = await router.admin.new_session()
            history = list(USER)
            await router.turn(session, history)
            hold = asyncio.Event()
            engine.script = lambda body: said("held", hold=hold)
            engine.started.clear()
            flight = asyncio.create_task(router.chat(session, history))
            await engine.started.wait()
            server.kill()
            hold.set()
            for failed in (await flight, await router.chat(session, history)):
                assert failed.status_code == 503, failed.text
                assert failed.headers["x-should-retry"] == "true"
                assert "start the server" in failed.json()["error"]["message"]
            streamed = await router.chat(session, history)
            assert "[DONE]" not in streamed.text
            engine.script = answer
            server.start()
            await router.turn(session, history)
            calls = await router.admin.calls(session.session_id)
            assert [call["origin"] for call in calls] == ["fresh", "extended"]
    finally:
        server.stop()


async def test_a_commit_whose_answer_was_lost_is_found_by_the_retry(tmp_path: Path) -> None:
    """The server stores a commit and waits for a standby that is not there; its connection is ended meanwhile."""
    server = server_or_skip()
    end_waiting = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    reload = "SELECT pg_reload_conf()"
    try:
        async with fake_engine(answer) as engine, replica(engine, server.new_schema(), tmp_path) as router:
            session = await router.admin.new_session()
            history = list(USER)
            await router.turn(session, history)
            server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", reload)
            call = asyncio.create_task(router.chat(session, history))
            async with asyncio.timeout(60):
                while not call.done():
                    await asyncio.to_thread(server.execute, end_waiting)
            response = await call
            assert (response.status_code, response.headers["x-should-retry"]) == (503, "true")
            assert "may be stored or not" in response.json()["error"]["message"]
            server.execute("ALTER SYSTEM RESET synchronous_standby_names", reload)
            assert len(engine.requests) == 2
            again = await router.chat(session, history, retry=1)
            assert again.status_code == 200
            assert len(engine.requests) == 2  # answered from the record
            first, second = await router.admin.calls(session.session_id)
            assert again.json()["id"] == second["call_id"]
            assert second["parent"]["call_id"] == first["call_id"]
    finally:
        server.stop()
