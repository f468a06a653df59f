"""The learner's HTTP routes: lease and consume batches, restore, status. Admin only: the router checks the key.

Bodies in are JSON, checked field by field; a lease goes out as safetensors (rlagent.wire). Invariant: these routes
add nothing to what the buffer promises; each is one call of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlagent.buffer import Buffer
from rlagent.errors import ConflictError, NotFoundError, StoreError
from rlagent.wire import CONTENT_TYPE, encode_lease

B = TypeVar("B", bound="_Body")
Handler = Callable[[web.Request], Awaitable[web.Response]]

# Longest wait of one lease request: below the idle timeouts of usual proxies. A learner asks again.
MAX_WAIT_S: Final = 300.0


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LeaseBody(_Body):
    """POST /learner/lease."""

    num_groups: int = Field(ge=1, le=1_000_000)
    step: int = Field(ge=0)
    wait_s: float = Field(0.0, ge=0.0, le=MAX_WAIT_S, allow_inf_nan=False)


class ConsumeBody(_Body):
    """POST /learner/consume."""

    lease_id: str
    step: int = Field(ge=0)


class ReleaseBody(_Body):
    """POST /learner/release."""

    lease_id: str


class RestoreBody(_Body):
    """POST /learner/restore."""

    cursor: int = Field(ge=0)
    version: int = Field(ge=0)


class _BadRequest(Exception):
    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


def routes(buffer: Buffer) -> list[web.RouteDef]:
    """The learner's routes over one buffer."""

    async def lease(request: web.Request) -> web.Response:
        body = await _parse(request, LeaseBody)
        found = await buffer.lease(num_groups=body.num_groups, step=body.step, wait_s=body.wait_s)
        if found is None:
            return web.Response(status=204)
        return web.Response(body=await asyncio.to_thread(encode_lease, found), content_type=CONTENT_TYPE)

    async def consume(request: web.Request) -> web.Response:
        body = await _parse(request, ConsumeBody)
        return _json({"cursor": await buffer.consume(body.lease_id, step=body.step)})

    async def release(request: web.Request) -> web.Response:
        body = await _parse(request, ReleaseBody)
        await buffer.release(body.lease_id)
        return _json({})

    async def restore(request: web.Request) -> web.Response:
        body = await _parse(request, RestoreBody)
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
    """Turn what the buffer refuses into an answer of OpenAI's error shape."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return await handler(request)
        except _BadRequest as error:
            return _error(400, str(error), "invalid_request_error", error.param, "invalid_body")
        except NotFoundError as error:
            return _error(404, str(error), "invalid_request_error", None, "not_found")
        except ConflictError as error:
            return _error(409, str(error), "invalid_request_error", None, "conflict")
        except StoreError as error:
            return _error(503, str(error), "server_error", None, "store_failed")

    return answer


async def _parse(request: web.Request, shape: type[B]) -> B:
    try:
        found = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise _BadRequest(f"the body is not JSON: {error}; send an object like {_example(shape)}", None) from error
    if not isinstance(found, dict):
        raise _BadRequest(f"the body is a {type(found).__name__}; send an object like {_example(shape)}", None)
    try:
        return shape.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or None
        given = "" if first["type"] == "missing" else f" (given: {first['input']!r})"
        raise _BadRequest(f"{name}: {first['msg']}{given}; send {_example(shape)}", name) from error


def _example(shape: type[_Body]) -> str:
    """The fields of a body with their types, for a message."""
    fields = shape.model_fields.items()
    return "{" + ", ".join(f'"{name}": {getattr(field.annotation, "__name__", "?")}' for name, field in fields) + "}"


def _json(body: object) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


def _error(status: int, message: str, kind: str, param: str | None, code: str) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")
