"""HTTP to an engine's control surface (SGLang's, or the embedded engine's). Every failure is a WeightSyncError that names the engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import httpx
import orjson

from rlagent.errors import WeightSyncError

T = TypeVar("T")
_PIECE_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 600.0  # a large bucket is loaded before it is answered


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a push must know of an engine: `tensor` ranks hold the model together, in each of `data` replicas."""

    sglang: bool
    on_gpu: bool
    tensor: int
    data: int


class EngineApi:
    """Control of one engine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    @cached_property
    def facts(self) -> EngineFacts:
        """Asked for once, from /server_info. SGLang tells its own version there, the embedded engine says that it is rlagent's."""
        found = self._request("GET", "/server_info", None, TIMEOUT_S)
        return EngineFacts(
            sglang=found.get("version") != "rlagent",
            on_gpu=found.get("device") != "cpu",
            tensor=int(found.get("tp_size", 1)),
            data=int(found.get("dp_size", 1)),
        )

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """POST; the JSON answer. WeightSyncError with status and body when it is not a success."""
        return self._request("POST", path, dict(body), timeout_s)

    def _request(self, method: str, path: str, body: object, timeout_s: float) -> dict[str, Any]:
        try:
            content = b"" if body is None else orjson.dumps(body)  # a bucket is one string of tens of megabytes
            headers = {"content-type": "application/json", "content-length": str(len(content))}
            response = self._http.request(method, path, content=_pieces(content), headers=headers, timeout=timeout_s)
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

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def _pieces(content: bytes) -> Iterator[bytes]:
    """httpx copies what is left of a body after every write to the socket: of a bucket, more than the bucket many times over."""
    view = memoryview(content)
    for start in range(0, len(view), _PIECE_BYTES):
        yield bytes(view[start : start + _PIECE_BYTES])


class EngineSet:
    """All engines of a push, spoken to at once."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self.engines = [EngineApi(url) for url in urls]
        self._threads = ThreadPoolExecutor(max_workers=len(urls) + 1, thread_name_prefix="weight-sync")

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
