"""The router's own OpenAPI document, served at /openapi.json: made of the application's routes, once, when it starts.

Invariants: a path is in the document exactly when the router answers it, what is not in it is 404; and every answer is as
the document says, whatever was sent (tests send what nobody expects).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson
from aiohttp import web
from pydantic import BaseModel

from rlagent.router import learner_api, metrics, policy_api, sessions_api
from rlagent.router.dialects import DIALECTS, MESSAGES
from rlagent.router.dialects.messages import Prompt
from rlagent.wire import CONTENT_TYPE

PATH: Final = "/openapi.json"
_Json = dict[str, Any]
_PARAMETER: Final = re.compile(r"{(\w+)}")
_OPEN: Final = frozenset({"/health", "/metrics", PATH})
_OF_SESSION: Final = "/sessions/{session_id}"
_NO_NUL: Final = {"type": "string", "minLength": 1, "pattern": "^[^\\x00]*$"}
_STATES: Final = {"type": "string", "enum": list(sessions_api.STATES)}
_COUNT: Final = {"type": "integer", "minimum": 0}

_BODIES: Final[Mapping[str, type[BaseModel]]] = {
    "/sessions": sessions_api.OpenBody,
    f"{_OF_SESSION}/reward": sessions_api.RewardBody,
    f"{_OF_SESSION}/finish": sessions_api.FinishBody,
    "/learner/lease": learner_api.LeaseBody,
    "/learner/consume": learner_api.ConsumeBody,
    "/learner/release": learner_api.ReleaseBody,
    "/learner/restore": learner_api.RestoreBody,
    "/policy/begin": policy_api.BeginBody,
    "/policy/commit": policy_api.CommitBody,
    "/policy/fail": policy_api.FailBody,
    f"/v1/{MESSAGES.path}/count_tokens": Prompt,
    **{f"/v1/{dialect.path}": dialect.body for dialect in DIALECTS},
}
# Bodies that may be left out.
_EMPTY: Final = frozenset({"/sessions", f"{_OF_SESSION}/finish"})
_SESSION: Final = ("session_id", "state", "status", "reward")
# Members that an answer always has.
_MEMBERS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("POST", "/sessions"): ("session_id", "base_url", "api_key"),
    ("GET", "/sessions"): ("sessions",),
    ("GET", _OF_SESSION): _SESSION,
    ("POST", f"{_OF_SESSION}/reward"): _SESSION,
    ("POST", f"{_OF_SESSION}/finish"): (*_SESSION, "warning"),
    ("GET", f"{_OF_SESSION}/calls"): ("calls",),
    ("GET", f"{_OF_SESSION}/trajectories"): ("trajectories",),
    ("POST", "/learner/consume"): ("cursor",),
    ("POST", "/learner/restore"): ("redelivered", "interrupted"),
    ("POST", "/policy/begin"): ("publish_id", "version", "engines", "lease_s"),
    ("POST", "/policy/commit"): ("version", "depth"),
    ("GET", "/v1/models"): ("object", "data"),
    ("GET", "/v1/models/{model}"): ("id", "object"),
    ("POST", "/v1/chat/completions"): ("id", "object", "choices", "usage"),
    ("POST", "/v1/completions"): ("id", "object", "choices", "usage"),
    ("POST", "/v1/responses"): ("id", "object", "status", "output", "usage"),
    ("GET", "/v1/responses/{response_id}"): ("id", "object", "status", "output", "usage"),
    ("POST", "/v1/messages"): ("id", "type", "content", "stop_reason", "usage"),
    ("POST", "/v1/messages/count_tokens"): ("input_tokens",),
    ("GET", "/health"): ("status", "engines_ready", "engines"),
}
_QUERIES: Final[Mapping[str, Mapping[str, _Json]]] = {"/sessions": {"state": _STATES, "limit": _COUNT}}
_RETRY: Final = {"x-should-retry": {"schema": {"type": "string", "enum": ["true", "false"]}}}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}


def document(app: web.Application) -> _Json:
    """OpenAPI 3.1 of all routes of `app`."""
    paths: dict[str, _Json] = {}
    for route in app.router.routes():
        if route.resource is not None and route.method not in ("HEAD", "OPTIONS"):
            path = route.resource.canonical
            paths.setdefault(path, {})[route.method.lower()] = _operation(route.method, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rlagent router", "version": "1"},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": {"Error": _ERROR}},
    }


def add_route(app: web.Application) -> None:
    """Serve the document of all routes of `app`, its own included. Call it after every other route is added."""

    async def show(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app.router.add_get(PATH, show)
    body = orjson.dumps(document(app))


def _operation(method: str, path: str) -> _Json:
    shared = path.removeprefix(_OF_SESSION) if path.startswith(f"{_OF_SESSION}/v1") else path  # as by the key
    names = _PARAMETER.findall(path)
    found = [{"name": name, "in": "path", "required": True, "schema": _NO_NUL} for name in names]
    if method == "GET":
        queries = _QUERIES.get(path, {}).items()
        found += [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in queries]
    operation: _Json = {
        "parameters": found,
        "security": [] if path in _OPEN else [{"key": []}],
        "responses": _answers(method, shared),
    }
    body = _BODIES.get(shared)
    if method == "POST" and body is not None:
        content = {"application/json": {"schema": body.model_json_schema()}}
        operation["requestBody"] = {"required": shared not in _EMPTY, "content": content}
    return operation


def _answers(method: str, path: str) -> _Json:
    """Success in the path's form, and errors, which have one."""
    answers: _Json = {"200": {"description": "what was asked for", "content": _content(method, path)}}
    if path == "/learner/lease":
        answers["204"] = {"description": "nothing became ready within wait_s"}
    if path == "/health":
        return answers | {"503": {"description": "no engine is ready", "content": _content(method, path)}}
    error = {
        "description": "an error in the shape of the path's dialect: `x-should-retry` says whether to retry",
        "headers": _RETRY,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    return answers | {"4XX": error, "503": error}


def _content(method: str, path: str) -> _Json:
    if path == "/learner/lease":
        return {CONTENT_TYPE: {}}
    if path == f"{_OF_SESSION}/images/{{digest}}":
        return {"image/*": {}}
    if path == "/metrics":
        return {metrics.CONTENT_TYPE: {"schema": {"type": "string"}}}
    schema = {"type": "object", "required": list(_MEMBERS.get((method, path), ()))}
    content: _Json = {"application/json": {"schema": schema}}
    if any(path == f"/v1/{dialect.path}" for dialect in DIALECTS):
        content["text/event-stream"] = {}
    return content
