"""The learner's HTTP routes: lease and consume batches, restore, status. Admin only: the router checks the key.

Bodies in are JSON, checked field by field; a lease goes out as safetensors (rlagent.wire). Invariant: these routes
add nothing to what the buffer promises; each is one call of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from rlagent.buffer import Buffer
from rlagent.errors import RlagentError
from rlagent.router.errors import ApiError, to_api_error
from rlagent.router.json_body import KnownId, Natural, parse_body
from rlagent.wire import CONTENT_TYPE, encode_lease

Handler = Callable[[web.Request], Awaitable[web.Response]]

# Longest wait of one lease request: below the idle timeouts of usual proxies. A learner asks again.
MAX_WAIT_S: Final = 300.0


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LeaseBody(_Body):
    """POST /learner/lease."""

    num_groups: int = Field(ge=1, le=1_000_000)
    step: Natural
    wait_s: float = Field(0.0, ge=0.0, le=MAX_WAIT_S, allow_inf_nan=False)


class ConsumeBody(_Body):
    """POST /learner/consume."""

    lease_id: KnownId
    step: Natural


class ReleaseBody(_Body):
    """POST /learner/release."""

    lease_id: KnownId


class RestoreBody(_Body):
    """POST /learner/restore."""

    cursor: Natural
    version: Natural


def routes(buffer: Buffer) -> list[web.RouteDef]:
    """The learner's routes over one buffer."""

    async def lease(request: web.Request) -> web.Response:
        body = parse_body(await request.read(), LeaseBody)
        found = await buffer.lease(num_groups=body.num_groups, step=body.step, wait_s=body.wait_s)
        if found is None:
            return web.Response(status=204)
        return web.Response(body=await asyncio.to_thread(encode_lease, found), content_type=CONTENT_TYPE)

    async def consume(request: web.Request) -> web.Response:
        body = parse_body(await request.read(), ConsumeBody)
        return _json({"cursor": await buffer.consume(body.lease_id, step=body.step)})

    async def release(request: web.Request) -> web.Response:
        body = parse_body(await request.read(), ReleaseBody)
        await buffer.release(body.lease_id)
        return _json({})

    async def restore(request: web.Request) -> web.Response:
        body = parse_body(await request.read(), RestoreBody)
        report = await buffer.restore(cursor=body.cursor, version=body.version)
        return _json({"redelivered": report.redelivered, "interrupted": report.interrupted})

    async def status(_request: web.Request) -> web.Response:
        return _json((await buffer.status()).to_json())

    return [
        web.post("/learner/lease", _answered(lease)),
        web.post("/learner/consume", _answered(consume)),
        web.post("/learner/release", _answered(release)),
        web.post("/learner/restore", _answered(restore)),
        web.get("/learner/status", _answered(status)),
    ]


def _answered(handler: Handler) -> Handler:
    """Turn what is refused into an answer of OpenAI's error shape."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return await handler(request)
        except (ApiError, RlagentError) as error:
            return to_api_error(error).response()

    return answer


def _json(body: object) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
