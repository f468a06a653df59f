"""A whole router over scripted engines, for tests: real HTTP, real buffer, real tokenizer and template of the demo."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
from fake_engine import FakeEngine, Reply, Script, fake_engine

from rlagent.buffer.config import BufferConfig
from rlagent.client import RouterClient
from rlagent.engine.config import EngineConfig
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.router.tokenizer import Tokenizer
from rlagent.serve import serving

MODEL = Path(__file__).resolve().parents[2] / "examples" / "parcels" / "model"
TOKENIZER = Tokenizer.load(MODEL)
EOS = TOKENIZER.encode("<|im_end|>")[0]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
]
USER = [{"role": "user", "content": "What is the code?"}]


def said(text: str, **more: Any) -> Reply:
    """A reply that says a text and ends."""
    return Reply(ids=[*TOKENIZER.encode(text), EOS], finish={"type": "stop", "matched": EOS}, **more)


def always(reply: Reply) -> Script:
    """The same reply to everything."""
    return lambda _body: reply


def in_turn(*replies: Reply) -> Script:
    """One reply after the other; the last one for all that follow."""
    left = list(replies)
    return lambda _body: left.pop(0) if len(left) > 1 else left[0]


def error_of(response: httpx.Response) -> Any:
    """What an OpenAI-shaped refusal says."""
    return orjson.loads(response.content)["error"]


@dataclass(kw_only=True)
class Harness:
    """A router, its engines, and clients of it. `http` speaks as an agent with the key "agent"."""

    url: str
    engines: Sequence[FakeEngine]
    http: httpx.AsyncClient
    admin: RouterClient

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    async def chat(self, messages: Sequence[Any] = USER, *, key: str = "agent", **body: Any) -> httpx.Response:
        """POST /v1/chat/completions."""
        headers = {"authorization": f"Bearer {key}"} | body.pop("headers", {})
        return await self.http.post(
            "/v1/chat/completions", json={"model": "policy", "messages": list(messages)} | body, headers=headers
        )

    async def only_calls(self) -> list[dict[str, Any]]:
        """All calls of the one session there is."""
        (session,) = await self.admin.sessions()
        return await self.admin.calls(session["session_id"])

    async def session_of(self, response: httpx.Response) -> str:
        return response.headers["x-rlagent-session"]

    async def calls(self, response: httpx.Response) -> list[dict[str, Any]]:
        """All calls of the session that a response belongs to."""
        return await self.admin.calls(response.headers["x-rlagent-session"])


@asynccontextmanager
async def router(
    directory: Path,
    *scripts: Script,
    config: RouterConfig | None = None,
    sampling: SamplingConfig | None = None,
    model: Path = MODEL,
    buffer: BufferConfig | None = None,
) -> AsyncIterator[Harness]:
    """A router over one scripted engine a script."""
    config = config or RouterConfig()
    async with (
        _engines(scripts) as engines,
        serving(
            model_dir=model,
            router=config,
            sampling=sampling or SamplingConfig(max_tokens=32),
            engine=EngineConfig(kind="attach", urls=tuple(engine.url for engine in engines)),
            buffer=buffer or BufferConfig(),
            buffer_path=directory / "buffer.db",
        ) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as http,
        RouterClient(url, admin_key=config.admin_key) as admin,
    ):
        yield Harness(url=url, engines=engines, http=http, admin=admin)


@asynccontextmanager
async def _engines(scripts: Sequence[Script]) -> AsyncIterator[list[FakeEngine]]:
    if not scripts:
        yield []
        return
    async with fake_engine(scripts[0]) as first, _engines(scripts[1:]) as rest:
        yield [first, *rest]
