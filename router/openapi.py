"""The router's own OpenAPI document, served at /openapi.json: made of the application's routes, once, when it starts.

Invariant: a path is in the document exactly when the router answers it; what is not in it is 404.
"""

from __future__ import annotations

import re
from typing import Final

import orjson
from aiohttp import web

PATH: Final = "/openapi.json"
_PARAMETER: Final = re.compile(r"{(\w+)}")
_OPEN: Final = frozenset({"/health", "/metrics", PATH})
_ANSWERS: Final = {
    "default": {
        "description": "an answer, or an error in the shape of the path's dialect: `x-should-retry` says whether to retry",
        "headers": {"x-should-retry": {"schema": {"type": "string", "enum": ["true", "false"]}}},
    }
}


def document(app: web.Application) -> dict[str, object]:
    """OpenAPI 3.1 of all routes of `app`. Bodies are JSON objects; their fields are checked, and told, by each path's errors."""
    paths: dict[str, dict[str, object]] = {}
    for route in app.router.routes():
        if route.resource is not None and route.method not in ("HEAD", "OPTIONS"):
            path = route.resource.canonical
            paths.setdefault(path, {})[route.method.lower()] = _operation(route.method, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rlagent router", "version": "1"},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def add_route(app: web.Application) -> None:
    """Serve the document of all routes of `app`, its own included. Call it after every other route is added."""

    async def show(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app.router.add_get(PATH, show)
    body = orjson.dumps(document(app))


def _operation(method: str, path: str) -> dict[str, object]:
    names = _PARAMETER.findall(path)
    operation: dict[str, object] = {
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names],
        "security": [] if path in _OPEN else [{"key": []}],
        "responses": _ANSWERS,
    }
    if method == "POST":
        operation["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
    return operation
