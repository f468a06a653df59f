"""The agents' HTTP routes: completions in every dialect, and models, by the session's path or by its key.

In the flow: the first and last code that an agent's call meets. Invariant: the last byte of an answer leaves after the
call is committed, and its delivery is noted after the last byte left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import orjson
from aiohttp import web

from rlagent.errors import RlagentError
from rlagent.router.auth import SESSION_KEY, Auth
from rlagent.router.config import RouterConfig
from rlagent.router.dialects import DIALECTS, MESSAGES, RESPONSES
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.dialect import Begun, Dialect, StreamWriter
from rlagent.router.dialects.messages import parse_prompt
from rlagent.router.dialects.responses import asked_of
from rlagent.router.dialects.served import events_of, served
from rlagent.router.errors import ApiError, invalid, to_api_error
from rlagent.router.live import LiveSession
from rlagent.router.parse import Event
from rlagent.router.recorder import Recorder
from rlagent.router.sampling import Decision
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Call

SESSION_HEADER: Final = "x-rlagent-session"
_STREAM_HEADERS: Final = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
# The dialect that a request is answered in; errors take its shape.
DIALECT_KEY: Final = web.RequestKey("dialect", Dialect)
_Piece = tuple[int, Sequence[Event]]


class CompletionsApi:
    """Handlers of `/v1` and `/sessions/{id}/v1`."""

    def __init__(self, auth: Auth, recorder: Recorder, tokenizer: Tokenizer, config: RouterConfig) -> None:
        self._auth = auth
        self._recorder = recorder
        self._tokenizer = tokenizer
        self._model_name = config.model_name
        self._started_at = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """Each path twice: named by the session, and by the key."""
        return [
            route
            for prefix in ("/v1", "/sessions/{session_id}/v1")
            for route in (
                *(web.post(f"{prefix}/{dialect.path}", self._handler(dialect)) for dialect in DIALECTS),
                web.post(f"{prefix}/messages/count_tokens", self.count_tokens),
                web.get(f"{prefix}/{RESPONSES.path}/{{response_id}}", self.response),
                web.get(f"{prefix}/models", self.models),
                web.get(f"{prefix}/models/{{model}}", self.model),
            )
        ]

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            request[DIALECT_KEY] = dialect
            return await self.complete(request, dialect)

        return handle

    async def complete(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        """One completion, whole or streamed."""
        live = await self._session(request)
        with live.answering():
            ask = await self._recorder.complete(live, dialect.parse(await request.read(), request.headers))
            decision = self._recorder.decide(live, ask)
            if ask.stream:
                return await self._stream(request, dialect, live, ask, decision)
            flight, _ = self._recorder.begin(live, ask, decision, None)
            call = await self._recorder.join(live, flight)
            body = orjson.dumps(dialect.answer(call, ask, self._tokenizer))
            headers = _headers(call.call_id, decision, dialect)
            response = web.Response(body=body, content_type="application/json", headers=headers)
            return await self._deliver(request, live, call, response)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens: of the prompt that the same request would have now. Nothing is recorded."""
        request[DIALECT_KEY] = MESSAGES
        live = await self._session(request)
        with live.answering():
            ask = parse_prompt(await request.read())
            return _json({"input_tokens": await self._recorder.num_prompt_tokens(live, ask)})

    async def response(self, request: web.Request) -> web.Response:
        """GET /v1/responses/{response_id}: a recorded answer, as it was given."""
        request[DIALECT_KEY] = RESPONSES
        if request.query.get("stream") == "true":
            raise invalid("stream is not supported here: the answer is complete; leave it out", "stream")
        session_id = await self._reader(request)
        response_id = request.match_info["response_id"]
        call = None if session_id is None else await self._recorder.recorded(session_id, response_id)
        if call is None or call.dialect != RESPONSES.path:
            what = f"Response with id {response_id!r} not found: a session's key reads its own answers"
            raise ApiError(404, what, param="response_id", code="not_found", retry=False)
        return _json(RESPONSES.answer(call, asked_of(call), self._tokenizer))

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        await self._reader(request)
        name = self._model_name
        page = {"has_more": False, "first_id": name, "last_id": name}  # Anthropic's
        return _json({"object": "list", "data": [self._model(name)], **page})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}: any name is served by the policy."""
        await self._reader(request)
        return _json(self._model(request.match_info["model"]))

    def _model(self, name: str) -> dict[str, object]:
        """OpenAI's model and Anthropic's in one."""
        created_at = datetime.fromtimestamp(self._started_at, UTC).isoformat()
        openai = {"object": "model", "created": self._started_at, "owned_by": "rlagent"}
        return {"id": name, **openai, "type": "model", "display_name": name, "created_at": created_at}

    async def _session(self, request: web.Request) -> LiveSession:
        session_id = request.match_info.get("session_id")
        if session_id is not None:
            return await self._auth.by_path(request, session_id)
        return await self._auth.by_key(request)

    async def _reader(self, request: web.Request) -> str | None:
        session_id = request.match_info.get("session_id")
        if session_id is not None:
            await self._auth.reader(request, session_id)
        else:
            session_id = await self._auth.any_key(request)
        if session_id is not None:
            request[SESSION_KEY] = session_id
        return session_id

    async def _deliver(
        self, request: web.Request, live: LiveSession, call: Call, response: web.Response
    ) -> web.StreamResponse:
        """Send a whole answer; delivered once its last byte is with the kernel."""
        response.headers[SESSION_HEADER] = live.session.session_id
        try:
            await response.prepare(request)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self._recorder.lost(live, call.call_id)
            raise
        self._recorder.delivered(live, call.call_id)
        return response

    async def _stream(
        self, request: web.Request, dialect: Dialect, live: LiveSession, ask: Ask, decision: Decision
    ) -> web.StreamResponse:
        """Send an answer as it is sampled. What fails before the first token is answered as an error."""
        pieces: asyncio.Queue[_Piece | None] = asyncio.Queue()  # bounded by the call's max_tokens
        flight, own = self._recorder.begin(live, ask, decision, lambda *piece: pieces.put_nowait(piece))
        waiting = asyncio.create_task(self._recorder.join(live, flight))
        waiting.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            first = await pieces.get()
            if first is None:
                await waiting
            writer = dialect.stream(
                Begun(
                    call_id=flight.call_id,
                    started_at=flight.started_at,
                    prompt_len=flight.prompt_len,
                    ask=ask,
                    tokenizer=self._tokenizer,
                )
            )
            response = web.StreamResponse(headers=_headers(flight.call_id, decision, dialect) | _STREAM_HEADERS)
            response.headers[SESSION_HEADER] = live.session.session_id
            await response.prepare(request)
            await response.write(writer.opening())
            call = await self._send(response, writer, pieces, first, waiting)
            if call is not None:
                replayed = b"" if own else _replay(writer, call)
                await response.write(replayed + writer.closing(call))
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._recorder.lost(live, flight.call_id)
            raise
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])
        if call is not None:
            self._recorder.delivered(live, call.call_id)
        return response

    @staticmethod
    async def _send(
        response: web.StreamResponse,
        writer: StreamWriter,
        pieces: asyncio.Queue[_Piece | None],
        piece: _Piece | None,
        waiting: asyncio.Task[Call],
    ) -> Call | None:
        """Write deltas until the call is committed. None if it failed on the way, which the stream then says."""
        while piece is not None:
            await response.write(writer.deltas(*piece))
            piece = await pieces.get()
        try:
            return await waiting
        except (RlagentError, ApiError) as error:
            await response.write(writer.failure(to_api_error(error)))
            return None


def _replay(writer: StreamWriter, call: Call) -> bytes:
    """All deltas of a call that was made before."""
    return b"".join(writer.deltas(number, events_of(message)) for number, message in enumerate(served(call)))


def _headers(call_id: str, decision: Decision, dialect: Dialect) -> dict[str, str]:
    headers = {"x-rlagent-call": call_id, dialect.request_id: call_id}
    if decision.overridden:
        headers["x-rlagent-overridden"] = ", ".join(decision.overridden)
    return headers


def _json(body: object) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
