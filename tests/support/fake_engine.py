"""An engine that answers scripted ids: SGLang's /generate and control calls at the outside boundary of the router.

A script is a function of the request to a Reply; what the router sent is kept in `requests`. No model, no clock.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from aiohttp import web


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What to answer. `hold` is waited for before the rest of the output, after `held_ids` of it."""

    ids: Sequence[int]
    finish: dict[str, Any] = field(default_factory=lambda: {"type": "stop", "matched": None})
    logprob: float = -0.5
    logprobs: Sequence[float] | None = None
    spans: Sequence[dict[str, Any]] | None = None
    hold: asyncio.Event | None = None
    held_ids: int = 1
    status: int = 200
    drop: bool = False  # break the connection off instead of ending
    refusal: str | None = None  # told in the stream, as SGLang does: an abort with a status, an id and no logprobs


Script = Callable[[dict[str, Any]], Reply]


class FakeEngine:
    """A scripted engine. `started` is set when a request has come in, `aborted` when one was aborted or hung up on."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.control: list[tuple[str, dict[str, Any]]] = []
        self.version = "0"
        self.url = ""
        self.started = asyncio.Event()
        self.aborted = asyncio.Event()
        self.healthy = True
        self.grammar_backend: str | None = None
        self.image_tokens: tuple[int, int] | None = (
            None  # a placeholder's id, and how many tokens the model sees in its stead
        )
        self.retokenizes = False  # what it says of a prompt with images is not what it was given
        self.tells_experts = False  # of each token [its position, its request], where they are asked for
        self.pausing = asyncio.Event()  # set when a pause has come in
        self.hold_pause: asyncio.Event | None = None
        self.num_running = 0
        self.idle = asyncio.Event()  # set when the last running request has gone

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        reply = self.script(body)
        self.started.set()
        self.num_running += 1
        self.idle.clear()
        try:
            if reply.status != 200:
                return web.json_response({"error": {"message": "scripted failure"}}, status=reply.status)
            return await self._stream(request, reply, body)
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self.idle.set()

    async def _stream(self, request: web.Request, reply: Reply, body: dict[str, Any]) -> web.StreamResponse:
        interval = body["sampling_params"].get("stream_interval", 1)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if reply.refusal is not None:
            finish = {"type": "abort", "message": reply.refusal, "status_code": 400, "err_type": "BadRequestError"}
            meta = {
                "id": "x",
                "finish_reason": finish,
                "completion_tokens": 1,
                "weight_version": self.version,
                "output_token_logprobs": [],
            }
            await response.write(b"data: " + orjson.dumps({"text": "", "output_ids": [0], "meta_info": meta}) + b"\n\n")
        for count in range(1, 0 if reply.refusal is not None else len(reply.ids) + 1):
            if reply.hold is not None and count == reply.held_ids + 1:
                await reply.hold.wait()
            if reply.drop and count == reply.held_ids + 1:
                assert request.transport is not None
                request.transport.abort()
                return response
            last = count == len(reply.ids)
            if last or count % interval == 1 % interval:
                await response.write(b"data: " + orjson.dumps(self._answer(reply, count, body, last=last)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _answer(self, reply: Reply, count: int, body: dict[str, Any], *, last: bool) -> dict[str, Any]:
        logprobs = reply.logprobs if reply.logprobs is not None else [reply.logprob] * len(reply.ids)
        meta: dict[str, Any] = {
            "id": "x",
            "finish_reason": reply.finish if last else None,
            "prompt_tokens": 1,
            "completion_tokens": count,
            "weight_version": self.version,
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(logprobs[:count], reply.ids[:count], strict=True)
            ],
        }
        if last:
            if self.tells_experts and body.get("return_routed_experts"):
                fed = np.arange(body["routed_experts_start_len"], len(body["input_ids"]) + count - 1, dtype=np.int32)
                told = np.stack((fed, np.full_like(fed, self.requests.index(body))), axis=1)
                meta["routed_experts"] = base64.b64encode(told.tobytes()).decode()
            meta["weight_versions"] = reply.spans or [{"version": self.version, "start": 0, "end": count}]
        answer = {"text": "", "output_ids": list(reply.ids[:count]), "meta_info": meta}
        if self.image_tokens is not None and body.get("return_prompt_token_ids"):
            placeholder, repeats = self.image_tokens
            assert body["input_ids"].count(placeholder) == len(body["image_data"]), (
                "SGLang would break off, or drop images"
            )
            seen = [
                again for token in body["input_ids"] for again in [token] * (repeats if token == placeholder else 1)
            ]
            answer["prompt_token_ids"] = seen[::-1] if self.retokenizes else seen
        return answer

    async def command(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"{}")
        self.control.append((request.path, body))
        if request.path == "/abort_request":
            self.aborted.set()
        if request.path == "/pause_generation":
            self.pausing.set()
            if self.hold_pause is not None:
                await self.hold_pause.wait()
        if request.path == "/update_weights_from_disk":
            self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "ok"})

    async def model_info(self, _request: web.Request) -> web.Response:
        sees = self.image_tokens is not None
        return web.json_response({"weight_version": self.version, "has_image_understanding": sees})

    async def server_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"grammar_backend": self.grammar_backend})

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    def paths(self) -> list[str]:
        return [path for path, _ in self.control]


@asynccontextmanager
async def fake_engine(script: Script) -> AsyncIterator[FakeEngine]:
    """A listening scripted engine."""
    engine = FakeEngine(script)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.post("/generate", engine.generate),
            web.get("/health_generate", engine.health),
            web.get("/model_info", engine.model_info),
            web.get("/server_info", engine.server_info),
            *(
                web.post(path, engine.command)
                for path in (
                    "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk",
                    "/flush_cache", "/end_weight_update",
                    "/release_memory_occupation", "/resume_memory_occupation",
                )
            ),
        ]
    )  # fmt: skip
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()
