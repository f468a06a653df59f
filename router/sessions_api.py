"""Sessions over HTTP: open, reward, finish, look at. Opening and rewarding are the admin's.

Invariant: `finish` answers only when nothing of the session is in flight any more and the seal is on disk.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Any, Final, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from rlagent.buffer import Buffer
from rlagent.errors import ConfigError, NotFoundError
from rlagent.router.auth import Auth
from rlagent.router.balance import Pool
from rlagent.router.config import RouterConfig
from rlagent.router.errors import invalid
from rlagent.router.images import kind_of
from rlagent.router.json_body import MAX_INTEGER, ChosenId, KnownId, parse_body
from rlagent.router.live import LiveSessions, hash_key, new_key
from rlagent.router.sampling import check_session_sampling
from rlagent.router.shown import call_json, session_json, trajectory_json
from rlagent.types import Reward, Session, SessionState

B = TypeVar("B", bound=BaseModel)
STATES: Final[tuple[SessionState, ...]] = ("open", "sealed", "failed", "expired")
_MAX_REWARD: Final = 1e30  # sums of rewards stay finite, in single precision too
_MAX_DIGITS: Final = 9  # of the number of sessions that are listed
_UNREWARDED: Final = (
    "finished without a reward, and is not trained on; give one when you finish it, or open it with train = false"
)
_WITH_IMAGES: Final = "it holds images, and is not trained on: the learner trains text models"
_log: Final = logging.getLogger(__name__)
_NO_SNIFF: Final = {"x-content-type-options": "nosniff"}
_Number = int | float


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OpenBody(_Body):
    """POST /sessions."""

    task_id: ChosenId | None = None
    group_id: ChosenId | None = None
    group_size: int | None = Field(None, ge=1, le=MAX_INTEGER)
    deadline_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    train: bool = True
    sampling: dict[str, _Number] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    ttl_s: float | None = Field(None, gt=0, allow_inf_nan=False)


class RewardBody(_Body):
    """POST /sessions/{id}/reward."""

    reward: _Number | dict[str, _Number]
    call_id: KnownId | None = None


class FinishBody(_Body):
    """POST /sessions/{id}/finish."""

    reward: _Number | dict[str, _Number] | None = None
    status: ChosenId = "completed"


class SessionsApi:
    """Handlers of `/sessions`."""

    def __init__(
        self,
        buffer: Buffer,
        auth: Auth,
        live: LiveSessions,
        pool: Pool,
        config: RouterConfig,
        counts: Counter[tuple[str, str]],
    ) -> None:
        self._buffer = buffer
        self._auth = auth
        self._live = live
        self._pool = pool
        self._drain_s = config.drain_s
        self._counts = counts  # (what, which) -> how often; for /metrics

    def routes(self) -> list[web.RouteDef]:
        """The routes."""
        one = "/sessions/{session_id}"
        return [
            web.post("/sessions", self.open),
            web.get("/sessions", self.listed),
            web.get(one, self.show),
            web.get(f"{one}/calls", self.calls),
            web.get(f"{one}/trajectories", self.trajectories),
            web.get(f"{one}/images/{{digest}}", self.image),
            web.post(f"{one}/reward", self.reward),
            web.post(f"{one}/finish", self.finish),
        ]

    async def open(self, request: web.Request) -> web.Response:
        """A new session with a key of its own."""
        await self._auth.admin(request)
        body = await _parse(request, OpenBody, empty=True)
        try:
            check_session_sampling(body.sampling)
        except ConfigError as error:
            raise invalid(str(error), "sampling") from error
        if body.group_size is not None and body.group_id is None:
            raise invalid("group_size needs a group_id", "group_size")
        key, now = new_key(), time.time()
        session = self._live.new(hash_key(key))
        session = replace(
            session,
            task_id=body.task_id,
            group_id=body.group_id,
            group_size=body.group_size,
            train=body.train,
            sampling=body.sampling,
            metadata=body.metadata,
            deadline_at=None if body.deadline_s is None else now + body.deadline_s,
            expires_at=session.expires_at if body.ttl_s is None else now + body.ttl_s,
        )
        await self._live.open(session)
        base_url = f"{request.scheme}://{request.host}/sessions/{session.session_id}/v1"
        return _json({"session_id": session.session_id, "base_url": base_url, "api_key": key})

    async def reward(self, request: web.Request) -> web.Response:
        """Add to an open session's reward."""
        await self._auth.admin(request)
        session_id = request.match_info["session_id"]
        body = await _parse(request, RewardBody)
        if body.call_id is None:
            given = Reward(components=_components(body.reward))
        elif isinstance(body.reward, dict):
            raise invalid("the reward of one call is a number", "reward")
        else:
            given = Reward(calls={body.call_id: _finite("reward", body.reward)})
        await self._buffer.add_reward(session_id, given)
        return await self._shown(session_id)

    async def finish(self, request: web.Request) -> web.Response:
        """Drain and seal. The same body again answers the same."""
        await self._auth.admin(request)
        session_id = request.match_info["session_id"]
        body = await _parse(request, FinishBody, empty=True)
        given = None if body.reward is None else Reward(components=_components(body.reward))
        live, now = self._live.loaded(session_id), time.time()
        if live is not None:
            await live.drain(self._drain_s)
        try:
            session = await self._buffer.finish_session(session_id, status=body.status, reward=given)
        finally:
            self._live.drop(session_id)
            self._pool.forget(session_id)
        unrewarded = session.train and session.status == "completed" and session.reward is None
        if unrewarded and session.sealed_at is not None and session.sealed_at >= now:
            if not self._counts["sessions", "unrewarded"]:
                _log.warning("session %s was %s (said once; /metrics counts them)", session_id, _UNREWARDED)
            self._counts["sessions", "unrewarded"] += 1
        with_images = session.train and live is not None and live.forest.has_images
        warning = _UNREWARDED if unrewarded else _WITH_IMAGES if with_images else None
        return _json(session_json(session) | {"warning": warning})

    async def listed(self, request: web.Request) -> web.Response:
        """The newest sessions."""
        await self._auth.admin(request)
        state = request.query.get("state")
        if state is not None and state not in STATES:
            raise invalid(f"state is {state!r}; use one of {', '.join(STATES)}", "state")
        limit = request.query.get("limit", "100")
        if not limit.isdecimal() or len(limit) > _MAX_DIGITS:
            raise invalid(f"limit is {limit!r}, not a number", "limit")
        found = await self._buffer.sessions(state=_state(state), limit=int(limit))
        return _json({"sessions": [session_json(session) for session in found]})

    async def show(self, request: web.Request) -> web.Response:
        """One session."""
        return await self._shown(await self._readable(request))

    async def calls(self, request: web.Request) -> web.Response:
        """A session's calls, whole prompts included."""
        session_id = await self._readable(request)
        await self._need(session_id)
        calls = await self._buffer.calls(session_id)
        by_id = {call.call_id: call for call in calls}
        return _json({"calls": [call_json(call, by_id) for call in calls]})

    async def trajectories(self, request: web.Request) -> web.Response:
        """A session's rows."""
        session_id = await self._readable(request)
        await self._need(session_id)
        rows = await self._buffer.trajectories(session_id)
        return _json({"trajectories": [trajectory_json(row) for row in rows]})

    async def image(self, request: web.Request) -> web.Response:
        """The bytes of an image that a call of the session has."""
        session_id, digest = await self._readable(request), request.match_info["digest"]
        calls = await self._buffer.calls(session_id)
        known = any(image.digest == digest for call in calls for image in call.images)
        data = await self._buffer.image(digest) if known else None
        if data is None:
            raise NotFoundError(f"no call of session {session_id!r} has an image {digest!r}")
        return web.Response(body=data, content_type=kind_of(data) or "application/octet-stream", headers=_NO_SNIFF)

    async def _readable(self, request: web.Request) -> str:
        session_id = request.match_info["session_id"]
        await self._auth.reader(request, session_id)
        return session_id

    async def _need(self, session_id: str) -> Session:
        session = await self._buffer.session(session_id)
        if session is None:
            raise NotFoundError(f"there is no session {session_id!r}")
        return session

    async def _shown(self, session_id: str) -> web.Response:
        return _json(session_json(await self._need(session_id)))


def _components(given: float | dict[str, _Number]) -> dict[str, float]:
    if isinstance(given, dict):
        return {name: _finite(f"reward.{name}", value) for name, value in given.items()}
    return {"reward": _finite("reward", given)}


def _finite(name: str, value: float) -> float:
    if not abs(value) <= _MAX_REWARD:  # nor NaN
        raise invalid(f"{name} is {value}; a reward must be a finite number, of at most {_MAX_REWARD:g}", "reward")
    return float(value)


def _state(name: str | None) -> SessionState | None:
    return next((state for state in STATES if state == name), None)


async def _parse(request: web.Request, shape: type[B], *, empty: bool = False) -> B:
    return parse_body(await request.read(), shape, empty=empty)


def _json(body: object) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
