"""The engine's HTTP surface: SGLang's paths, bodies and answers, as far as the router and the weight sync use them."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web

from rlagent.engine.loop import PAUSE_MODES, Engine
from rlagent.engine.requests import GenerateRequest, answer
from rlagent.engine.sequence import Progress, Sequence
from rlagent.errors import EngineError, LoadError

_MAX_BODY_BYTES: Final = 4 * 1024**3  # a weight bucket travels in one body
_HEALTH_TIMEOUT_S: Final = 20.0
_HEALTH_POLL_S: Final = 0.01
Body = dict[str, Any]
Handler = Callable[[Body], Awaitable[web.StreamResponse]]


def make_app(engine: Engine) -> web.Application:
    """The aiohttp application of one engine."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    control = Control(engine)
    app.router.add_post("/generate", lambda request: _generate(request, engine))
    for path, handler in control.handlers().items():
        wrapped = _json_handler(handler)
        app.router.add_post(path, wrapped)
        app.router.add_get(path, wrapped)
    return app


def _json_handler(handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler({**request.query, **await _body(request)})
        except (EngineError, LoadError) as error:
            return _error(str(error))
        except (KeyError, TypeError, ValueError) as error:
            return _error(f"{request.path}: malformed body ({type(error).__name__}: {error})")

    return handle


async def _body(request: web.Request) -> Body:
    raw = await request.read()
    if not raw:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise EngineError(f"the body must be a JSON object, not {type(body).__name__}")
    return body


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _error(message: str, status: int = 400) -> web.Response:
    return _json({"success": False, "message": message, "error": {"message": message}}, status)


def _done(message: str = "Success") -> web.Response:
    return _json({"success": True, "message": message})


async def _generate(http: web.Request, engine: Engine) -> web.StreamResponse:
    try:
        request = GenerateRequest.parse(await _body(http), engine)
    except EngineError as error:
        return _error(str(error))
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[Progress] = asyncio.Queue()

    def emit(progress: Progress) -> None:  # in the engine's thread
        loop.call_soon_threadsafe(news.put_nowait, progress)

    sequences = request.sequences(emit)
    try:
        for sequence in sequences:
            engine.submit(sequence)
        if request.stream:
            return await _stream(http, request, engine, sequences, news)
        ended: dict[Sequence, Progress] = {}
        while len(ended) < len(sequences):
            progress = await news.get()
            if progress.stop is not None:
                ended[progress.sequence] = progress
        engine.ensure_healthy()
        answers = [answer(request, ended[sequence], engine) for sequence in sequences]
        return _json(answers if request.batched else answers[0])
    except EngineError as error:
        return _error(str(error), 503)
    finally:  # the client went away: free the rows
        if engine.healthy and any(s.stop is None for s in sequences):
            await engine.call(lambda: engine.scheduler.abort(lambda s: s in sequences, "client disconnected"))


async def _stream(
    http: web.Request,
    request: GenerateRequest,
    engine: Engine,
    sequences: list[Sequence],
    news: asyncio.Queue[Progress],
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
    await response.prepare(http)
    index = {sequence: i for i, sequence in enumerate(sequences)}
    left = len(sequences)
    while left:
        newest: dict[Sequence, Progress] = {}  # several steps may have passed: only the newest of each is sent
        progress = await news.get()
        newest[progress.sequence] = progress
        while not news.empty():
            progress = news.get_nowait()
            newest[progress.sequence] = progress
        for sequence, progress in newest.items():
            chunk = answer(request, progress, engine)
            if request.batched:
                chunk["index"] = index[sequence]
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
            left -= progress.stop is not None
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


class Control:
    """Everything beside /generate."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def handlers(self) -> dict[str, Handler]:
        """Path -> handler of a JSON body."""
        return {
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/abort_request": self.abort_request,
            "/flush_cache": self.flush_cache,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/begin_weight_update": self.begin_weight_update,
            "/end_weight_update": self.end_weight_update,
            "/update_weights_from_tensor": self.update_weights_from_tensor,
            "/update_weights_from_distributed": self.update_weights_from_distributed,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/init_weights_update_group": self.init_weights_update_group,
            "/destroy_weights_update_group": self.destroy_weights_update_group,
            "/update_weight_version": self.update_weight_version,
            "/release_memory_occupation": self.release_memory_occupation,
            "/resume_memory_occupation": self.resume_memory_occupation,
            "/weights_checker": self.weights_checker,
        }

    async def health(self, _: Body) -> web.Response:
        """200 while the engine's thread steps."""
        return web.Response(status=200 if self._engine.healthy else 503)

    async def health_generate(self, _: Body) -> web.Response:
        """200 once the engine has made a step, for whom ever; an idle one is asked for a token. 503 while paused."""
        before, asked = self._engine.num_steps, False
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                while not self._engine.paused and self._engine.healthy:
                    if not asked and not self._engine.scheduler.busy:
                        asked = True
                        self._ask_for_a_token()
                    await asyncio.sleep(_HEALTH_POLL_S)
                    if self._engine.num_steps > before:
                        return web.Response(status=200)
        except TimeoutError:
            pass
        return web.Response(status=503)

    def _ask_for_a_token(self) -> None:
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "rid": "health"}
        for sequence in GenerateRequest.parse(body, self._engine).sequences(lambda _: None):
            self._engine.submit(sequence)

    async def model_info(self, _: Body) -> web.Response:
        """The model and the weight version in force."""
        a = self._engine.model.architecture
        return _json(
            {"weight_version": self._engine.scheduler.version, "model_type": a.family, "is_generation": True,
             "context_length": a.context, "vocab_size": a.vocab_size}
        )  # fmt: skip

    async def server_info(self, _: Body) -> web.Response:
        """Settings and load."""
        scheduler = self._engine.scheduler
        return _json(
            {**self._engine.config.model_dump(mode="json"), "version": "rlagent", "pid": os.getpid(),
                "paused": self._engine.paused,
             "num_running": len(scheduler.running), "num_waiting": len(scheduler.waiting)}
        )  # fmt: skip

    async def abort_request(self, body: Body) -> web.Response:
        """Abort by rid (prefix, as SGLang does) or all."""
        everything, rid = bool(body.get("abort_all")), str(body.get("rid") or "")
        if not everything and not rid:
            raise EngineError("give rid, or abort_all = true")
        await self._engine.call(
            lambda: self._engine.scheduler.abort(lambda s: everything or s.rid.startswith(rid), "aborted")
        )
        return web.Response(status=200)

    async def flush_cache(self, _: Body) -> web.Response:
        """Forget retained prefixes; 400 while requests run."""
        if not await self._engine.call(self._engine.flush_cache):
            return _error("the cache is not flushed: requests are running")
        return _done("Cache flushed.")

    async def pause_generation(self, body: Body) -> web.Response:
        """Stop generating; new requests wait."""
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise EngineError(f"mode {mode!r} is not one of {', '.join(PAUSE_MODES)}")
        await self._engine.call(lambda: self._engine.pause(mode))
        return _done("Generation paused.")

    async def continue_generation(self, _: Body) -> web.Response:
        """Generate again."""
        await self._engine.call(self._engine.resume)
        return _done("Generation continued.")

    async def begin_weight_update(self, _: Body) -> web.Response:
        """Open an update: from now on tensors are staged."""
        await self._engine.call(self._engine.updates.begin)
        return _done()

    async def end_weight_update(self, _: Body) -> web.Response:
        """Put everything staged in place and stamp the version."""
        version = await self._engine.call(self._engine.end_update)
        return _done(f"weight_version is {version}")

    async def update_weights_from_tensor(self, body: Body) -> web.Response:
        """Stage a bucket."""
        payloads, load_format = body["serialized_named_tensors"], body.get("load_format")
        version = _version(body)
        await self._engine.call(lambda: self._engine.updates.from_tensor(payloads, load_format, version))
        return _done()

    async def update_weights_from_distributed(self, body: Body) -> web.Response:
        """Receive a broadcast and stage it."""
        group = body.get("group_name", "weight_update_group")
        await self._engine.call(
            lambda: self._engine.updates.from_distributed(
                body["names"], body["dtypes"], body["shapes"], group, body.get("load_format"), _version(body)
            )
        )
        return _done()

    async def update_weights_from_disk(self, body: Body) -> web.Response:
        """Load a full checkpoint; the old weights stay when it does not load."""
        path = Path(body["model_path"])
        await self._engine.call(lambda: self._engine.load_from_disk(path, _version(body)))
        return _done("Succeeded to update model weights.")

    async def init_weights_update_group(self, body: Body) -> web.Response:
        """Join a broadcast group; answers when all members are there."""
        await self._engine.call(
            lambda: self._engine.updates.join(
                body.get("group_name", "weight_update_group"), host=body["master_address"], port=int(body["master_port"]),
                rank=int(body["rank_offset"]), world_size=int(body["world_size"]), backend=body.get("backend", "gloo"),
            )
        )  # fmt: skip
        return _done()

    async def destroy_weights_update_group(self, body: Body) -> web.Response:
        """Leave a broadcast group."""
        await self._engine.call(lambda: self._engine.updates.leave(body.get("group_name", "weight_update_group")))
        return _done()

    async def update_weight_version(self, body: Body) -> web.Response:
        """Rename the weights in force; by default what runs is aborted first."""
        version = str(body["new_version"])

        def rename() -> None:
            if body.get("abort_all_requests", True):
                self._engine.scheduler.abort(lambda _: True, "aborted: the weight version changes")
            self._engine.scheduler.version = version

        await self._engine.call(rename)
        return _json({"success": True, "message": "Success", "new_version": version})

    async def release_memory_occupation(self, body: Body) -> web.Response:
        """Release the KV cache (the weights stay: there is nothing else to give back)."""
        _check_tags(body)
        await self._engine.call(self._engine.release_memory)
        return _done()

    async def resume_memory_occupation(self, body: Body) -> web.Response:
        """Take the KV cache again."""
        _check_tags(body)
        await self._engine.call(self._engine.resume_memory)
        return _done()

    async def weights_checker(self, body: Body) -> web.Response:
        """sha256 of every tensor. SGLang's `ranks` carry its fused tensors; ours the Hugging Face ones."""
        if body.get("action", "checksum") != "checksum":
            raise EngineError(f"action {body['action']!r} is not supported; use 'checksum'")
        checksums = await self._engine.call(self._engine.updates.checksums)
        return _json({"success": True, "message": "Success", "naming": "hf", "checksums": checksums})


def _version(body: Body) -> str | None:
    found = body.get("weight_version")
    return None if found is None else str(found)


def _check_tags(body: Body) -> None:
    unknown = set(body.get("tags") or []) - {"kv_cache", "weights", "cuda_graph"}
    if unknown:
        raise EngineError(f"tags {sorted(unknown)} are unknown (kv_cache, weights, cuda_graph)")
