"""Errors as answers: the one place that turns what went wrong into OpenAI's error shape.

Invariant: an agent's SDK retries exactly where a retry can help (`x-should-retry`), and no failure looks like success.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from aiohttp import web

from rlagent.errors import (
    ConflictError,
    EngineError,
    MovedError,
    NotFoundError,
    RecordingError,
    RequestError,
    RlagentError,
    StoreError,
)
from rlagent.router.balance import NoEngine
from rlagent.router.chat_template import TemplateError
from rlagent.router.engine_client import EngineImage, EngineOverflow, EngineSchema

_INVALID = "invalid_request_error"


class ApiError(Exception):
    """A request that is refused. `retry` says whether the same request may succeed later; None leaves it to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry = retry

    @property
    def body(self) -> dict[str, object]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, body: Mapping[str, object] | None = None) -> web.Response:
        """The whole answer; `body` is that of another dialect than OpenAI's."""
        headers = {} if self.retry is None else {"x-should-retry": "true" if self.retry else "false"}
        content = orjson.dumps(self.body if body is None else body)
        return web.Response(status=self.status, body=content, content_type="application/json", headers=headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that a retry does not mend."""
    return ApiError(400, message, param=param, code=code, retry=False)


def overflow(message: str) -> ApiError:
    """The prompt does not fit: agents know the code, and compact their history."""
    return invalid(message, "messages", "context_length_exceeded")


def _unread(error: EngineImage | EngineSchema) -> ApiError:
    """What the engine cannot make use of."""
    if isinstance(error, EngineImage):
        return invalid(f"the engine cannot read an image: {str(error)[:300]}", "messages", "invalid_image")
    return invalid(f"the engine refuses the JSON schema: {error}", "response_format", "invalid_schema")


def to_api_error(error: Exception) -> ApiError:
    """The answer to any failure that users can meet."""
    match error:
        case ApiError():
            return error
        case TemplateError():
            return invalid(f"the model's chat template refuses these messages: {error}", "messages")
        case NotFoundError():
            return ApiError(404, str(error), code="not_found", retry=False)
        case MovedError():
            return ApiError(409, str(error), code="session_moved", retry=True)
        case RequestError():
            return invalid(str(error))
        case ConflictError():
            return ApiError(409, str(error), code="conflict", retry=False)
        case StoreError():
            return ApiError(503, str(error), kind="server_error", code="store_failed", retry=True)
        case EngineOverflow():
            return overflow(str(error))
        case EngineImage() | EngineSchema():
            return _unread(error)
        case NoEngine():
            return ApiError(503, str(error), kind="server_error", code="no_engine", retry=True)
        case RecordingError():
            return ApiError(
                500,
                f"the completion was not recorded: {error}",
                kind="server_error",
                code="recording_failed",
                retry=False,
            )
        case RlagentError():
            code = "engine_failed" if isinstance(error, EngineError) else "internal"
            return ApiError(500, str(error), kind="server_error", code=code, retry=False)
    raise error
