"""The learner's publish routes over `Policies`: bodies checked, admin only."""

from __future__ import annotations

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from rlagent.router.auth import Auth
from rlagent.router.json_body import KnownId, Natural, parse_body
from rlagent.router.policy import Policies


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BeginBody(_Body):
    """POST /policy/begin."""

    step: Natural
    parent: Natural
    lease_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    mode: str | None = Field(None, pattern="^(abort|retract|in_place)$")
    same_weights: bool = False  # the parent's are sent again, after a resume
    release_kv_cache: bool = False  # engines lend its memory to the learner, which trains now


class CommitBody(_Body):
    """POST /policy/commit."""

    publish_id: KnownId
    checksum: KnownId
    snapshot: KnownId | None = None


class FailBody(_Body):
    """POST /policy/fail."""

    publish_id: KnownId
    reason: KnownId


def routes(policies: Policies, auth: Auth) -> list[web.RouteDef]:
    """The learner's publish routes."""

    async def begin(request: web.Request) -> web.Response:
        await auth.admin(request)
        return _json(await policies.whole(policies.begin(**parse_body(await request.read(), BeginBody).model_dump())))

    async def commit(request: web.Request) -> web.Response:
        await auth.admin(request)
        return _json(await policies.whole(policies.commit(**parse_body(await request.read(), CommitBody).model_dump())))

    async def fail(request: web.Request) -> web.Response:
        await auth.admin(request)
        body = parse_body(await request.read(), FailBody)
        await policies.whole(policies.fail(body.publish_id, body.reason))
        return _json({})

    async def show(request: web.Request) -> web.Response:
        await auth.admin(request)
        return _json(await policies.shown())

    return [
        web.post("/policy/begin", begin),
        web.post("/policy/commit", commit),
        web.post("/policy/fail", fail),
        web.get("/policy", show),
    ]


def _json(body: object) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
