"""The learner's routes over real HTTP: the client on one side, the buffer on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from buffer_calls import first_call

from rlagent.buffer import Buffer
from rlagent.buffer.config import BufferConfig
from rlagent.client import RouterClient
from rlagent.errors import RouterError
from rlagent.router import learner_api
from rlagent.types import Reward, Session


@dataclass
class Served:
    buffer: Buffer
    client: RouterClient


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    buffer = await Buffer.open(tmp_path / "b.db", BufferConfig())
    await buffer.ensure_initial(checksum="", snapshot="model")
    app = web.Application()
    app.add_routes(learner_api.routes(buffer))
    async with TestServer(app) as server, RouterClient(str(server.make_url(""))) as client:
        yield Served(buffer, client)
    await buffer.close()


async def add(buffer: Buffer, name: str) -> None:
    await buffer.open_session(Session(session_id=name, key_hash=name, group_id=name, group_size=1))
    await buffer.record_call(first_call(name, 5, 6))
    await buffer.finish_session(name, status="completed", reward=Reward(components={"r": 1.0}))


async def test_a_batch_goes_to_the_learner_and_is_consumed(served: Served) -> None:
    for name in ("a", "b", "c"):
        await add(served.buffer, name)
    assert await served.client.lease(num_groups=4, step=0, wait_s=0.0) is None
    lease = await served.client.lease(num_groups=2, step=0, wait_s=0.0)
    assert lease is not None
    (first, second) = lease.groups
    assert (first.group_id, second.group_id) == ("a", "b")
    (row,) = first.rollouts[0].rows
    assert row.token_ids.tolist() == [1, 5, 6]
    assert row.loss_mask.tolist() == [False, True, True]
    assert row.logprobs.tolist() == [0.0, -1.0, -0.5]
    assert await served.client.consume(lease.lease_id, step=0) == 1
    assert await served.client.consume(lease.lease_id, step=0) == 1
    released = await served.client.lease(num_groups=1, step=1, wait_s=0.0)
    assert released is not None
    await served.client.release(released.lease_id)
    report = await served.client.restore(cursor=0, version=0)
    assert (report.redelivered, report.interrupted) == (1, 0)
    again = await served.client.lease(num_groups=1, step=0, wait_s=0.0)
    assert again is not None
    assert again.redelivered
    assert [group.group_id for group in again.groups] == ["a", "b"]
    assert await served.client.status() == await served.buffer.status()


async def test_a_lease_request_waits_for_the_data(served: Served) -> None:
    waiting = asyncio.create_task(served.client.lease(num_groups=1, step=0, wait_s=30.0))
    await add(served.buffer, "a")
    lease = await asyncio.wait_for(waiting, 10.0)
    assert lease is not None


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("lease", b"{", None, "not valid JSON"),
        ("lease", b"[]", None, "the body is a JSON list"),
        ("lease", b"{}", "num_groups", "Field required"),
        ("lease", b'{"num_groups": 0, "step": 1}', "num_groups", "greater than or equal to 1"),
        ("lease", b'{"num_groups": "2", "step": 1}', "num_groups", "given: '2'"),
        ("lease", b'{"num_groups": 1, "step": 1, "wait_s": 1e9}', "wait_s", "less than or equal to 300"),
        ("lease", b'{"num_groups": 1, "step": 1, "more": 1}', "more", "Extra inputs are not permitted"),
        ("consume", b'{"step": 1}', "lease_id", "known fields: lease_id, step"),
        ("release", b'{"lease_id": 5}', "lease_id", "valid string"),
        ("restore", b'{"cursor": -1, "version": 0}', "cursor", "greater than or equal to 0"),
    ],
)
async def test_a_bad_body_is_answered_with_the_field_and_the_fix(
    served: Served, path: str, body: bytes, param: str | None, message: str
) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{served.client.url}/learner/{path}", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in error["message"]


async def test_what_the_buffer_refuses_comes_back_as_its_message(served: Served) -> None:
    with pytest.raises(RouterError, match="404 there is no lease 'x'"):
        await served.client.consume("x", step=0)
    with pytest.raises(RouterError, match="404 cursor 7 was never given out"):
        await served.client.restore(cursor=7, version=0)
    await add(served.buffer, "a")
    lease = await served.client.lease(num_groups=1, step=0, wait_s=0.0)
    assert lease is not None
    await served.client.release(lease.lease_id)
    with pytest.raises(RouterError, match=r"409 .*released: its groups went back"):
        await served.client.consume(lease.lease_id, step=0)
