"""The router as an aiohttp application: which path is whose, and how every failure is answered.

Invariant: a path that is not listed here is 404; nothing is ever proxied unrecorded.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import orjson
from aiohttp import web

from rlagent.buffer import Buffer
from rlagent.errors import RlagentError
from rlagent.router import learner_api, metrics, openapi, policy_api
from rlagent.router.auth import SESSION_KEY, Auth
from rlagent.router.balance import Pool
from rlagent.router.chat_template import TemplateError
from rlagent.router.completions_api import DIALECT_KEY, SESSION_HEADER, CompletionsApi
from rlagent.router.config import RouterConfig
from rlagent.router.dialects import DIALECTS, MESSAGES
from rlagent.router.errors import ApiError, invalid, to_api_error
from rlagent.router.live import LiveSessions
from rlagent.router.policy import Policies
from rlagent.router.recorder import Recorder
from rlagent.router.sessions_api import SessionsApi
from rlagent.router.tokenizer import Tokenizer

_log: Final = logging.getLogger(__name__)
_PATHS: Final = ", ".join(f"/v1/{dialect.path}" for dialect in DIALECTS)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the application is made of; serve.py makes and ends them."""

    config: RouterConfig
    buffer: Buffer
    live: LiveSessions
    pool: Pool
    policies: Policies
    recorder: Recorder
    tokenizer: Tokenizer


def make_app(parts: Parts) -> web.Application:
    """All routes. Run it with handler_cancellation=True, so that an agent that goes away frees its slot."""
    auth = Auth(parts.config, parts.live)
    app = web.Application(middlewares=[_answered], client_max_size=parts.config.max_body_bytes)
    completions = CompletionsApi(auth, parts.recorder, parts.tokenizer, parts.config)
    sessions = SessionsApi(parts.buffer, auth, parts.live, parts.pool, parts.config, parts.recorder.counts)
    app.add_routes(completions.routes())
    app.add_routes(sessions.routes())
    app.add_routes(policy_api.routes(parts.policies, auth))
    app.add_routes(_learner_routes(parts, auth))
    app.add_routes([web.get("/health", _health(parts)), web.get("/metrics", _metrics(parts))])
    openapi.add_route(app)
    return app


def _learner_routes(parts: Parts, auth: Auth) -> list[web.RouteDef]:
    """The learner's routes behind the admin key. A restore ends sessions: what is in memory is read again."""

    def guarded(handler: Handler, *, restores: bool) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            await auth.admin(request)
            response = await handler(request)
            if restores:
                parts.live.drop_all()
            return response

        return answer

    return [
        web.route(route.method, route.path, guarded(route.handler, restores=route.path.endswith("/restore")))
        for route in learner_api.routes(parts.buffer)
    ]


def _health(parts: Parts) -> Handler:
    async def health(_request: web.Request) -> web.Response:
        ready, total = len(parts.pool.ready), len(parts.pool.engines)
        body = {"status": "ok" if ready else "no_engine", "engines_ready": ready, "engines": total}
        body |= {"version": parts.buffer.policy().version}
        return web.Response(status=200 if ready else 503, body=orjson.dumps(body), content_type="application/json")

    return health


def _metrics(parts: Parts) -> Handler:
    async def show(_request: web.Request) -> web.Response:
        text = metrics.render(parts.recorder.counts, parts.live, parts.pool, parts.buffer.policy())
        return web.Response(body=text.encode(), headers={"content-type": metrics.CONTENT_TYPE})

    return show


@web.middleware
async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer names its session; every failure has the shape that its dialect's SDK reads."""
    try:
        for name, value in request.match_info.items():
            if "\0" in value:  # no store can look it up
                raise invalid(f"{name} in the path holds a NUL character; use the id that was answered", name)
        response = await handler(request)
    except asyncio.CancelledError:
        raise
    except web.HTTPException as error:
        response = _refusal(request, _http_error(request, error))
    except (ApiError, TemplateError, RlagentError) as error:
        failure = to_api_error(error)
        if failure.status >= 500:
            _log.warning("%s %s: %s", request.method, request.path, error)
        response = _refusal(request, failure)
    except ConnectionError:
        raise  # the agent went away: there is nobody to answer
    except Exception:  # our own bug: the agent gets an error of the right shape, the log gets the traceback
        _log.exception("%s %s", request.method, request.path)
        failure = ApiError(500, "internal error of the router; see its log", kind="server_error", code="internal")
        response = _refusal(request, failure)
    session_id = request.get(SESSION_KEY)
    if session_id is not None and not response.prepared:
        response.headers[SESSION_HEADER] = session_id
    return response


def _refusal(request: web.Request, failure: ApiError) -> web.Response:
    """The error in the shape of the dialect that was spoken, with an id that a user can quote."""
    dialect = request.get(DIALECT_KEY)
    if dialect is None and f"/v1/{MESSAGES.path}" in request.path:  # a path below it that nobody serves
        dialect = MESSAGES
    if dialect is None:
        return failure.response()
    response = failure.response(dialect.error(failure))
    response.headers[dialect.request_id] = f"req_{uuid.uuid4().hex}"
    return response


def _http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    where = f"{request.method} {request.path}"
    if isinstance(error, web.HTTPNotFound):
        message = f"unknown path {where}; agents use {_PATHS} and /v1/models"
        return ApiError(404, message, code="unknown_url", retry=False)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, f"{where}: use {allowed}", code="method_not_allowed", retry=False)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message = "the body is larger than router.max_body_bytes; send a shorter history"
        return ApiError(413, message, code="body_too_large", retry=False)
    return ApiError(error.status, error.reason or "refused", retry=False)
