"""HTTP to an engine's control surface (SGLang's, or the embedded engine's). Every failure is a WeightSyncError that names the engine."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import httpx
import orjson

from rlagent.errors import WeightSyncError

T = TypeVar("T")
TIMEOUT_S: Final = 600.0  # a large bucket is loaded before it is answered
_MOMENT_S: Final = 0.1  # no wait ends before the lease does


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a push must know of an engine: `tensor` ranks hold the model together, in each of `data` replicas; `quantization` is what
    it was told to do to its weights by a flag, or read in its model's config.
    """

    sglang: bool
    on_gpu: bool
    tensor: int
    data: int
    quantization: str | None = None


class EngineApi:
    """Control of one engine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.until = math.inf  # of time.monotonic(): from then on the engine is not ours to change
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    @cached_property
    def facts(self) -> EngineFacts:
        """Asked for once, from /server_info. SGLang tells its own version there, the embedded engine says that it is rlagent's."""
        found = self._request("GET", "/server_info", 0, iter(()), TIMEOUT_S)
        return EngineFacts(
            sglang=found.get("version") != "rlagent",
            on_gpu=found.get("device") != "cpu",
            tensor=int(found.get("tp_size", 1)),
            data=int(found.get("dp_size", 1)),
            quantization=found.get("quantization"),
        )

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """POST; the JSON answer. WeightSyncError with status and body when it is not a success."""
        content = orjson.dumps(dict(body))
        return self._request("POST", path, len(content), iter((content,)), timeout_s)

    def post_pieces(self, path: str, size: int, pieces: Iterator[bytes]) -> dict[str, Any]:
        """POST a JSON body of so many bytes as it is made."""
        return self._request("POST", path, size, pieces, TIMEOUT_S)

    def _request(self, method: str, path: str, size: int, pieces: Iterator[bytes], timeout_s: float) -> dict[str, Any]:
        left_s = max(self.until - time.monotonic(), 0.0)  # a request that begins later is refused by its own body
        try:
            headers = {"content-type": "application/json", "content-length": str(size)}
            content = self._while_ours(path, pieces)
            response = self._http.request(
                method, path, content=content, headers=headers, timeout=min(timeout_s, left_s + _MOMENT_S)
            )
        except httpx.TimeoutException as error:
            late = "before the publish's lease ran out" if left_s < timeout_s else f"within {timeout_s:g} s"
            raise WeightSyncError(
                f"engine {self.url} did not answer {path} {late}: it hangs, or needs longer; see its log, and raise "
                "router.publish_lease_s if a push takes longer"
            ) from error
        except httpx.HTTPError as error:
            raise WeightSyncError(f"engine {self.url} went away at {path}: {type(error).__name__}: {error}") from error
        if response.is_error:
            raise WeightSyncError(f"engine {self.url} refused {path}: {response.status_code} {response.text[:2000]}")
        try:
            answer = response.json() if response.content else {}
        except ValueError as error:
            raise WeightSyncError(f"engine {self.url} answered {path} with no JSON: {response.text[:200]!r}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightSyncError(f"engine {self.url} refused {path}: {answer.get('message')}")
        return answer if isinstance(answer, dict) else {}

    def _while_ours(self, path: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """A body that is left unfinished, and so refused, once the time is up."""
        for piece in pieces:
            if time.monotonic() >= self.until:
                raise WeightSyncError(
                    f"the publish's lease ran out before {path} of engine {self.url}; raise router.publish_lease_s if a push takes longer"
                )
            yield piece

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def refuse_replicas(engine: EngineApi) -> None:
    """WeightSyncError for a server with replicas inside: SGLang takes tensors and broadcasts only where there is one."""
    if engine.facts.data > 1:
        raise WeightSyncError(
            f"engine {engine.url} has {engine.facts.data} data-parallel replicas inside, and SGLang takes weights for these from a "
            "disk only; start a server for each (engine.count), or set sync.transport = 'disk'"
        )


def refuse_other_quantization(engine: EngineApi, *, float8: bool) -> None:
    """WeightSyncError for a quantised engine whose model directory, the learner's too, is not."""
    if engine.facts.quantization is not None and not float8:
        raise WeightSyncError(
            f"engine {engine.url} runs with quantization {engine.facts.quantization!r}, and config.json of the learner's model names "
            "none: whole weights would be taken for quantised ones; set model.path to a directory with float8 blocks "
            "(quant_method 'fp8' and weight_block_size), or start the engine without quantization"
        )


class EngineSet:
    """All engines of a push, spoken to at once."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self.engines = [EngineApi(url) for url in urls]
        self._threads = ThreadPoolExecutor(max_workers=len(urls) + 1, thread_name_prefix="weight-sync")

    def until(self, until: float) -> None:
        """Send nothing from then on (time.monotonic())."""
        for engine in self.engines:
            engine.until = until

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run `work` beside; there is a thread for every engine and one more."""
        return self._threads.submit(work, *args)

    def each(self, work: Callable[[EngineApi], T]) -> list[T]:
        """Run `work` for every engine in parallel; the first failure is raised once all have answered."""
        futures = [self.submit(work, engine) for engine in self.engines]
        failures = [error for future in futures if (error := future.exception()) is not None]
        if failures:
            raise failures[0]
        return [future.result() for future in futures]

    def post(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The same POST to every engine."""
        return self.each(lambda engine: engine.post(path, body))

    def close(self) -> None:
        """Close all connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)  # one may wait for an engine that never joined
        for engine in self.engines:
            engine.close()
