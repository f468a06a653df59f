"""Our own way to the router over HTTP: sessions, leases, publishes.

The driver, the CLI and rollout workers use it; no other code knows the URLs. One keep-alive client. Calls that may
safely be repeated are tried again on connection errors; the others are not, because the first attempt may have taken
effect. Invariant: every failure is a RouterError that carries the router's own message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx
import orjson

from rlagent.buffer.leases import RestoreReport
from rlagent.buffer.status import BufferStatus
from rlagent.errors import RouterError
from rlagent.finite import not_finite
from rlagent.types import Lease, Reward
from rlagent.wire import decode_lease

Json = dict[str, Any]

# A router answers everything but a lease's wait at once; the slowest other answer is a commit that waits for engines.
TIMEOUT_S: Final = 120.0
# Pauses before the second, third, ... attempt of a repeatable call: a restarting router is back within about a second.
RETRY_PAUSES_S: Final = (0.1, 0.5, 2.0)
# Beside the wait itself, a lease's body takes time to build and send.
LEASE_GRACE_S: Final = 60.0
# Requests in flight at once, leases apart; others wait their turn. httpx's pool looks at every connection for every
# request, so its cost grows with the square of them, and the router answers within milliseconds.
MAX_CONCURRENT: Final = 8
_V1: Final = "/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHandle:
    """One episode as an agent sees it; what a rollout function gets as `session`.

    >>> SessionHandle(session_id="s1", base_url="http://127.0.0.1:8000/sessions/s1/v1",
    api_key="k").environ()["ANTHROPIC_BASE_URL"] 'http://127.0.0.1:8000/sessions/s1'
    """

    session_id: str
    base_url: str  # ends in /v1
    api_key: str

    def environ(self) -> dict[str, str]:
        """Environment variables for an agent that is a program of its own. Anthropic's SDK adds /v1 itself."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix(_V1),
            "ANTHROPIC_API_KEY": self.api_key,
        }

    def to_json(self) -> dict[str, str]:
        """Plain JSON; SessionHandle(**body) is the inverse, in another process."""
        return {"session_id": self.session_id, "base_url": self.base_url, "api_key": self.api_key}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTicket:
    """A publish under way: push `version` to these engines (base URLs), then commit.

    until: of time.monotonic(), on this machine; from then on they may serve other weights, and nothing more may be sent to them.
    """

    publish_id: str
    version: int
    engines: tuple[str, ...]
    until: float


class RouterClient:
    """A client of one router. `async with RouterClient(url, admin_key=...) as client: ...`."""

    def __init__(self, url: str, *, admin_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        headers = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=2 * MAX_CONCURRENT)
        self._turns = asyncio.Semaphore(MAX_CONCURRENT)
        # trust_env=False: a proxy set for the agent's internet access must not stand between us and our own router.
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout_s, limits=limits, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # Sessions

    async def new_session(
        self,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        deadline_s: float | None = None,
        train: bool = True,
        sampling: Mapping[str, float | int] | None = None,
        metadata: Mapping[str, object] | None = None,
        ttl_s: float | None = None,
    ) -> SessionHandle:
        """Open a session with a key of its own."""
        given = {
            "task_id": task_id,
            "group_id": group_id,
            "group_size": group_size,
            "deadline_s": deadline_s,
            "train": train,
            "sampling": None if sampling is None else dict(sampling),
            "metadata": None if metadata is None else dict(metadata),
            "ttl_s": ttl_s,
        }
        answer = await self._post("/sessions", {name: value for name, value in given.items() if value is not None})
        with _answer_of("/sessions"):
            return SessionHandle(
                session_id=answer["session_id"], base_url=answer["base_url"], api_key=answer["api_key"]
            )

    async def finish(self, session_id: str, *, reward: Reward | float | None = None, status: str = "completed") -> Json:
        """Seal a session; a given reward replaces the total. Safe to repeat with the same arguments."""
        body: Json = {"status": status}
        if isinstance(reward, Reward):
            for call_id, value in reward.calls.items():
                await self.reward(session_id, value, call_id=call_id)
            reward_body: object = dict(reward.components)
        else:
            reward_body = reward
        if reward_body is not None:
            body["reward"] = reward_body
        return await self._post(f"/sessions/{session_id}/finish", body, repeat=True)

    async def reward(self, session_id: str, reward: float | Mapping[str, float], *, call_id: str | None = None) -> Json:
        """Add to an open session's reward, or to that of one of its calls."""
        body: Json = {"reward": dict(reward) if isinstance(reward, Mapping) else reward}
        if call_id is not None:
            body["call_id"] = call_id
        return await self._post(f"/sessions/{session_id}/reward", body)

    async def session(self, session_id: str) -> Json:
        """A session as the router shows it."""
        return await self._get(f"/sessions/{session_id}")

    async def sessions(self, *, state: str | None = None, limit: int = 100) -> list[Json]:
        """The newest sessions first."""
        query = {"limit": str(limit)} | ({} if state is None else {"state": state})
        return _list(await self._get("/sessions", query), "sessions")

    async def calls(self, session_id: str) -> list[Json]:
        """A session's calls in order of arrival."""
        return _list(await self._get(f"/sessions/{session_id}/calls"), "calls")

    async def trajectories(self, session_id: str) -> list[Json]:
        """A session's rows: token_ids, loss_mask, logprobs and versions are lists of one length."""
        return _list(await self._get(f"/sessions/{session_id}/trajectories"), "trajectories")

    # The learner

    async def lease(self, *, num_groups: int, step: int, wait_s: float) -> Lease | None:
        """The next batch, or None when nothing is ready within wait_s."""
        body = {"num_groups": num_groups, "step": step, "wait_s": wait_s}
        response = await self._request("POST", "/learner/lease", body, timeout_s=wait_s + LEASE_GRACE_S)
        return None if response.status_code == httpx.codes.NO_CONTENT else decode_lease(response.content)

    async def consume(self, lease_id: str, *, step: int) -> int:
        """Count a lease as trained on; the cursor that a checkpoint stores."""
        answer = await self._post("/learner/consume", {"lease_id": lease_id, "step": step}, repeat=True)
        with _answer_of("/learner/consume"):
            return int(answer["cursor"])

    async def release(self, lease_id: str) -> None:
        """Give a lease back untrained."""
        await self._post("/learner/release", {"lease_id": lease_id}, repeat=True)

    async def restore(self, *, cursor: int, version: int) -> RestoreReport:
        """Tell the buffer at which checkpoint the learner stands."""
        answer = await self._post("/learner/restore", {"cursor": cursor, "version": version}, repeat=True)
        with _answer_of("/learner/restore"):
            return RestoreReport(redelivered=answer["redelivered"], interrupted=answer["interrupted"])

    async def status(self) -> BufferStatus:
        """What the buffer holds."""
        answer = await self._get("/learner/status")
        with _answer_of("/learner/status"):
            return BufferStatus.from_json(answer)

    # Publishes

    async def begin_publish(
        self, *, step: int, parent: int, lease_s: float | None = None, same_weights: bool = False,
        release_kv_cache: bool = False,
    ) -> PublishTicket:  # fmt: skip
        """Take a version number and the engines, which pause, and give the KV cache's memory back if told so, until the commit. Not
        repeated: a number is given out once.
        """
        body: Json = {"step": step, "parent": parent} | ({} if lease_s is None else {"lease_s": lease_s})
        if same_weights:
            body["same_weights"] = True
        if release_kv_cache:
            body["release_kv_cache"] = True
        began = time.monotonic()  # the router's clock of the lease starts later
        answer = await self._post("/policy/begin", body)
        with _answer_of("/policy/begin"):
            return PublishTicket(
                publish_id=answer["publish_id"], version=answer["version"], engines=tuple(answer["engines"]),
                until=began + answer["lease_s"],
            )  # fmt: skip

    async def commit_publish(self, publish_id: str, *, checksum: str, snapshot: str | None) -> Json:
        """Stamp the version: {version, depth}. Every engine must report it already."""
        body = {"publish_id": publish_id, "checksum": checksum, "snapshot": snapshot}
        return await self._post("/policy/commit", body, repeat=True)

    async def fail_publish(self, publish_id: str, reason: str) -> None:
        """Give a publish up: engines go back to the newest snapshot."""
        await self._post("/policy/fail", {"publish_id": publish_id, "reason": reason}, repeat=True)

    async def policy(self) -> Json:
        """The current version and what each engine holds."""
        return await self._get("/policy")

    async def health(self) -> Json:
        """The router's own health."""
        return await self._get("/health")

    # Transport

    async def _get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        async with self._turns:
            return _object(await self._request("GET", path, query=query, repeat=True))

    async def _post(self, path: str, body: Json, *, repeat: bool = False) -> Json:
        async with self._turns:
            return _object(await self._request("POST", path, body, repeat=repeat))

    async def _request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: Mapping[str, str] | None = None,
        repeat: bool = False,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """One request, again after connection errors if it may be repeated. RouterError for every failure."""
        content = None if body is None else _encoded(body)
        headers = {} if body is None else {"content-type": "application/json"}
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        for pause in (*(RETRY_PAUSES_S if repeat else ()), None):
            try:
                response = await self._http.request(
                    method, path, content=content, headers=headers, params=query, timeout=timeout
                )
                break
            except httpx.TransportError as error:
                if pause is None or isinstance(error, httpx.TimeoutException):
                    raise RouterError(
                        f"{method} {self.url}{path}: {type(error).__name__} {error}; is the router running there?"
                    ) from error
                await asyncio.sleep(pause)
        if response.is_error:
            raise RouterError(f"{method} {self.url}{path}: {response.status_code} {_message(response)}")
        return response


def _encoded(body: Json) -> bytes:
    """JSON; RouterError for a number that has none (orjson would write null, and a reward would be none)."""
    for name, value in not_finite(body):
        raise RouterError(f"{name} = {value} has no place in JSON; give a finite number")
    return orjson.dumps(body)


def _object(response: httpx.Response) -> Json:
    with _answer_of(str(response.url)):
        found = orjson.loads(response.content)
        if not isinstance(found, dict):
            raise TypeError(f"a {type(found).__name__}, not an object")
        return found


def _list(answer: Json, name: str) -> list[Json]:
    with _answer_of(name):
        found: list[Json] = answer[name]
        return found


def _message(response: httpx.Response) -> str:
    """The router's own words, from an error of OpenAI's shape, or the start of whatever came."""
    try:
        return str(orjson.loads(response.content)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return response.text[:500]


@contextmanager
def _answer_of(what: str) -> Iterator[None]:
    """Errors of reading an answer that no router would give."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise RouterError(
            f"{what}: not a router's answer ({type(error).__name__}: {error}); is the URL right?"
        ) from error
