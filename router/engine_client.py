"""One engine over HTTP: generate, abort, and the control calls that the router makes (SGLang's surface).

In the flow: balance.py chooses an Engine, generate.py drives it. Invariant: what leaves this file is checked: ids and
logprobs of one length, finite, inside the vocabulary, versions that are numbers; anything else is a RecordingError.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
import numpy as np
import orjson
from yarl import URL

from rlagent.errors import EngineError, RecordingError
from rlagent.router.engine_http import Answer, Endpoint
from rlagent.types import Int16Array, Int32Array, VersionSpan

EngineState = Literal["starting", "ready", "down"]

# A control call answers at once; a disk load of weights reads the whole model.
CONTROL_TIMEOUT_S: Final = 30.0
LOAD_TIMEOUT_S: Final = 600.0
# A paused engine may be reading half a gigabyte of weights inline; one whose process is gone refuses at once.
PAUSED_TIMEOUT_S: Final = 30.0
# /health_generate answers once the engine has sampled something, and by itself after 20 s if it has not (SGLang's own limit).
GENERATE_TIMEOUT_S: Final = 25.0
# What was aborted or retracted frees its cache within a step; so long a flush waits for that.
_FLUSH_WAIT_S: Final = 10.0
_FLUSH_POLL_S: Final = 0.05
_BAD_REQUEST: Final = 400
_KV_CACHE: Final = ("kv_cache",)


class EngineDown(EngineError):
    """The engine cannot be reached, or broke off: another one may do."""


class EngineRefused(EngineError):
    """The engine answers, and does not do what a control call asks for."""


class StalePrefix(EngineError):
    """The answer was sampled behind a cached prefix of older weights: ask again."""


class EngineSchema(EngineError):
    """The engine cannot make a grammar of the JSON schema that a client gave."""


class EngineImage(EngineError):
    """The engine cannot read an image that a client gave."""


class EngineOverflow(EngineError):
    """The engine says that prompt and completion do not fit its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What an engine has sampled so far of one request. `finish` is None until its end.

    experts [tokens, layers * top_k] are those of the tokens from the asked one on, the last id's apart, which never went
    through the model; None where they were not asked for, or an engine that was stopped does not tell them.
    """

    ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish: Mapping[str, Any] | None
    experts: Int16Array | None = None
    prompt: list[int] | None = None  # as the model saw it, of a request with images


class Engine:
    """One engine. `state` and `running` are kept by its owners: the pool and the supervisor."""

    def __init__(self, url: str, http: EngineHttp, *, vocabulary: int, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.state: EngineState = "starting"
        self.running = 0
        self.version: int | None = None  # what it last said it holds
        self.lent = False  # whether its KV cache's memory is given back
        self.supervised = False  # whether somebody starts it again when it dies
        self._going = asyncio.Event()  # cleared while it is paused: what is sent then would run under weights to come
        self._going.set()
        self._num_pauses = 0
        self._grammar: bool | None = None  # not asked yet
        self._sees: bool | None = None  # likewise
        self._generate = http.endpoint(f"{self.url}/generate")
        self._http = http.control
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s

    def renew(self) -> None:
        """A new process: what it holds is asked for again."""
        self.state, self.version, self.lent = "starting", None, False
        self._going.set()

    def lose(self) -> None:
        """Out of rotation: it went away, or may hold half an update. Calls wait for one that is being started again."""
        self.state = "starting" if self.supervised else "down"
        self._going.set()

    @property
    def paused(self) -> bool:
        """Whether it is paused for a weight update."""
        return not self._going.is_set()

    async def stream(
        self,
        rid: str,
        ids: Int32Array,
        sampling: Mapping[str, Any],
        *,
        experts_from: int | None = None,
        images: Sequence[str] = (),
    ) -> AsyncIterator[Part]:
        """One completion as it grows; the last part has `finish`, and the experts.

        experts_from: the first of all tokens whose experts are asked for. images: data: URIs, one for each placeholder among
        the ids. EngineDown where no last part comes.
        """
        await self._unpaused()
        version = self.version
        answer = await self._ask(rid, ids, sampling, version, experts_from, images)
        seen_ids: list[int] = []
        seen_logprobs: list[float] = []
        ended = False
        try:
            if await answer.head() != 200:
                self._refuse(answer.status, await answer.rest())
            while lines := await answer.lines():
                for found in self._events(lines):
                    part = self._part(found, seen_ids, seen_logprobs, ids, experts_from)
                    if not seen_ids:
                        self._check_prefix(found, part, version)
                    seen_ids, seen_logprobs = part.ids, part.logprobs
                    ended = part.finish is not None
                    yield part
                    if ended:
                        return
        except OSError as error:
            raise EngineDown(f"{self.url}/generate: {type(error).__name__} {error}") from error
        finally:
            answer.leave(read=ended)
        raise EngineDown(f"{self.url}/generate ended its stream without a finish reason")

    async def abort(self, rid: str) -> None:
        """Free a request's slot. An engine that is gone has freed it."""
        await self.control("/abort_request", {"rid": rid})

    async def pause(self, mode: str) -> None:
        """Stop generating; new requests wait, here and there."""
        self._num_pauses += 1
        self._going.clear()
        await self.control("/pause_generation", {"mode": mode})

    async def flush(self) -> None:
        """Forget cached prefixes: they are of weights that are no more. EngineError when something goes on running.

        SGLang's own `timeout` is of no use here: it waits until nothing is pending, which what was retracted is.
        """
        try:
            async with asyncio.timeout(_FLUSH_WAIT_S):
                while True:
                    with suppress(EngineRefused):
                        await self.control("/flush_cache", {})
                        return
                    await asyncio.sleep(_FLUSH_POLL_S)
        except TimeoutError as error:
            raise EngineRefused(
                f"{self.url} does not flush its cache within {_FLUSH_WAIT_S} s: something runs"
            ) from error

    async def lend(self) -> None:
        """Give the KV cache's memory back, until it generates again. It is paused, and nothing is left that runs."""
        await self.flush()
        await self.control("/release_memory_occupation", {"tags": _KV_CACHE})
        self.lent = True

    async def take_back(self) -> None:
        """Have its memory again. SGLang ends when it is told to take what it did not give back."""
        if self.lent:
            await self.control("/resume_memory_occupation", {"tags": _KV_CACHE})
            self.lent = False

    async def resume(self) -> None:
        """Generate again."""
        await self.take_back()
        await self.control("/continue_generation", {})
        self._going.set()

    async def load(self, path: str, version: int) -> None:
        """Take the weights of a directory as `version`, whatever state an update was left in; it stays paused.

        Cached prefixes are flushed aside: SGLang changes the weights first when asked for both, and then may refuse.
        """
        await self.pause("abort")
        await self.take_back()
        await self.flush()
        with suppress(EngineRefused):  # there is no update to end, as a rule
            await self.control("/end_weight_update", {})
        body = {"model_path": path, "weight_version": str(version), "flush_cache": False, "abort_all_requests": False}
        await self.control("/update_weights_from_disk", body, timeout_s=LOAD_TIMEOUT_S)

    async def held_version(self) -> str:
        """The version of the weights it holds, in its own words."""
        found = await self.control("/model_info", None)
        return str(found.get("weight_version"))

    async def has_grammar(self) -> bool:
        """Whether it takes `json_schema`: SGLang names its grammar backend, other engines have none."""
        if self._grammar is None:
            try:
                found = await self.control("/server_info", None)
            except EngineDown:
                raise
            except EngineError:
                return False
            self._grammar = found.get("grammar_backend") not in (None, "none")
        return self._grammar

    async def sees_images(self) -> bool:
        """Whether it takes `image_data`, as SGLang says of the model that it runs."""
        if self._sees is None:
            self._sees = (await self.control("/model_info", None)).get("has_image_understanding") is True
        return self._sees

    async def healthy(self) -> bool:
        """Whether it can generate. A paused one cannot, and is well as long as it answers."""
        if not self.paused:
            num_pauses = self._num_pauses
            if await self._answers("/health_generate", GENERATE_TIMEOUT_S):
                return True
            if num_pauses == self._num_pauses:
                return False
        return await self._answers("/model_info", PAUSED_TIMEOUT_S)

    async def _answers(self, path: str, timeout_s: float) -> bool:
        try:
            async with self._http.get(f"{self.url}{path}", timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def control(
        self, path: str, body: Mapping[str, Any] | None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Mapping[str, Any]:
        """A control call: POST with a body, GET without. EngineDown if it cannot be reached, EngineError if it refuses."""
        method = "GET" if body is None else "POST"
        try:
            async with self._http.request(
                method, f"{self.url}{path}", json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineDown(f"{method} {self.url}{path}: {type(error).__name__} {error}; is the engine up?") from error
        found = _object(content)
        if response.status != 200 or found.get("success") is False:
            raise EngineRefused(f"{method} {self.url}{path}: {response.status} {_words(found, content)}")
        return found

    async def _unpaused(self) -> None:
        """Wait for the end of a pause: what is sent before it would run under weights to come."""
        if self.paused:
            await self._going.wait()
            if self.state != "ready":
                raise EngineDown(f"{self.url} left the rotation while it was paused")

    async def _ask(
        self,
        rid: str,
        ids: Int32Array,
        sampling: Mapping[str, Any],
        version: int | None,
        experts_from: int | None,
        images: Sequence[str],
    ) -> Answer:
        """Ask for a completion behind prefixes of `version`. The answer is to be left."""
        body = {"rid": rid, "input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": True}
        if version is not None:
            body["extra_key"] = str(version)  # prefixes are shared within one version only
        if experts_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
        if images:
            body |= {"image_data": images, "return_prompt_token_ids": True}
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            return await self._generate.post(data, self._timeout_s)
        except OSError as error:
            raise EngineDown(f"{self.url}/generate: {type(error).__name__} {error}") from error

    def _events(self, lines: Iterable[bytes]) -> Iterator[Any]:
        """What an event stream's lines say."""
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if not data or data == b"[DONE]":
                continue
            found = self._loads(data)
            if "error" in found:
                if _mapping(found["error"]).get("code") == _BAD_REQUEST:
                    self._refuse(_BAD_REQUEST, data)
                raise EngineDown(f"{self.url}/generate broke off: {found['error']}")
            self._refuse_in_stream(found)
            yield found

    def _loads(self, content: bytes) -> Any:
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            pass
        try:
            return json.loads(content)  # Python's own form of NaN, which is then refused as a logprob
        except ValueError as error:
            raise EngineDown(f"{self.url}/generate answered no JSON: {error}; is it an engine?") from error

    def _refuse(self, status: int, content: bytes) -> None:
        words = _words(_object(content), content)
        if status >= 500:
            raise EngineDown(f"{self.url}/generate: {status} {words}")
        if "loading IMAGE data" in words:
            raise EngineImage(words)
        if "grammar" in words:
            raise EngineSchema(words)
        if "context" in words or "longer than" in words:
            raise EngineOverflow(words)
        raise EngineError(f"{self.url}/generate refused the request: {status} {words}")

    def _refuse_in_stream(self, found: Mapping[str, Any]) -> None:
        """SGLang tells what it refuses once the stream has begun (a schema that its grammar cannot take) as an abort with a status."""
        finish = _mapping(_mapping(found.get("meta_info")).get("finish_reason"))
        if finish.get("type") == "abort" and finish.get("status_code") == _BAD_REQUEST:
            self._refuse(_BAD_REQUEST, str(finish.get("message")).encode())

    def _part(
        self, found: Any, seen_ids: list[int], seen_logprobs: list[float], prompt: Int32Array, experts_from: int | None
    ) -> Part:
        """Check an answer. A streamed one holds all ids so far, or only the new ones: the count tells."""
        try:
            meta = found["meta_info"]
            ids = [int(token) for token in found["output_ids"]]
            logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
            sampled = [int(entry[1]) for entry in meta["output_token_logprobs"]]
            finish = meta["finish_reason"]
            count = int(meta["completion_tokens"])
            version = meta["weight_version"]
            spans = meta.get("weight_versions") if finish is not None else None
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise RecordingError(f"{self.url}/generate answered no recordable completion: {error!r}") from error
        if ids != sampled:
            raise RecordingError(f"{self.url}: {len(ids)} output ids and {len(sampled)} logprobs are not of one output")
        if len(ids) != count:
            ids, logprobs = seen_ids + ids, seen_logprobs + logprobs
        if len(ids) != count:
            raise RecordingError(f"{self.url}: completion_tokens is {count}, the output has {len(ids)} ids")
        if not all(map(math.isfinite, logprobs)):
            raise RecordingError(f"{self.url}: a logprob is not finite")
        if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise RecordingError(f"{self.url}: an output id is outside the vocabulary of {self._vocabulary}")
        spans = spans if spans is not None else [{"version": version, "start": 0, "end": count}]
        experts = None
        if experts_from is not None and finish is not None:
            experts = self._experts(meta.get("routed_experts"), len(prompt) + count - 1 - experts_from)
        return Part(
            ids=ids, logprobs=logprobs, spans=self._spans(spans, count), finish=finish, experts=experts,
            prompt=found.get("prompt_token_ids"),
        )  # fmt: skip

    def _experts(self, told: Any, num_tokens: int) -> Int16Array | None:
        """SGLang's form: base64 of int32, layers and top_k of each token in turn."""
        if told is None or num_tokens <= 0:
            return None
        try:
            flat = np.frombuffer(binascii.a2b_base64(told), np.int32)
            found = flat.reshape(num_tokens, -1).astype(np.int16)
        except (ValueError, TypeError) as error:
            raise RecordingError(
                f"{self.url}: its routed_experts are not those of {num_tokens} tokens: {error}"
            ) from error
        if not found.shape[1] or (found != flat.reshape(found.shape)).any():
            raise RecordingError(f"{self.url}: its routed_experts hold what is no expert of {num_tokens} tokens")
        return found

    def _check_prefix(self, found: Any, part: Part, version: int | None) -> None:
        """StalePrefix for a request that met a pause: it asked for prefixes of a version that was then no more in force."""
        cached = bool(found["meta_info"].get("cached_tokens"))
        if cached and version is not None and part.spans and part.spans[0].version != version:
            self.version = part.spans[0].version  # new to us where another replica of the router published it
            raise StalePrefix(f"{self.url} answered with version {part.spans[0].version} behind a prefix of {version}")

    def _spans(self, spans: Any, count: int) -> tuple[VersionSpan, ...]:
        try:
            found = tuple(
                VersionSpan(version=int(span["version"]), start=int(span["start"]), end=int(span["end"]))
                for span in spans
                if span["end"] > span["start"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(
                f"{self.url}: its weight version {spans!r} is no policy version; was it loaded by this router?"
            ) from error
        end = 0
        for span in found:
            if span.start != end:
                break
            end = span.end
        if end != count:
            raise RecordingError(f"{self.url}: version spans {spans!r} do not cover {count} tokens once each")
        return found


def _object(content: bytes) -> Mapping[str, Any]:
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _words(found: Mapping[str, Any], content: bytes) -> str:
    error = found.get("error")
    if isinstance(error, Mapping):
        return str(error.get("message"))
    return str(error or found.get("message") or content[:500].decode(errors="replace"))


class EngineHttp:
    """All connections to engines: as many as there are calls in flight. Proxies of the environment are not for them."""

    def __init__(self, control: aiohttp.ClientSession) -> None:
        self.control = control
        self._endpoints: list[Endpoint] = []

    def endpoint(self, url: str) -> Endpoint:
        """For requests whose answers are read as they come."""
        self._endpoints.append(Endpoint(URL(url)))
        return self._endpoints[-1]

    def close(self) -> None:
        """Close what endpoints keep open."""
        for endpoint in self._endpoints:
            endpoint.close()


@asynccontextmanager
async def new_http() -> AsyncIterator[EngineHttp]:
    """Until the end of the body."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
    async with aiohttp.ClientSession(
        connector=connector,
        json_serialize=lambda body: orjson.dumps(body).decode(),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    ) as control:
        http = EngineHttp(control)
        try:
            yield http
        finally:
            http.close()
