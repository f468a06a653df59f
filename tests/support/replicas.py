"""`rlagent serve` as processes that share a PostgreSQL database, over one scripted engine."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fake_engine import FakeEngine, Reply
from router_harness import MODEL, said

from rlagent.client import RouterClient, SessionHandle


def answer(body: dict[str, Any]) -> Reply:
    """Another text for each prompt."""
    return said(f"I was given {len(body['input_ids'])} ids")


@dataclass(kw_only=True)
class Replica:
    url: str
    admin: RouterClient
    process: asyncio.subprocess.Process

    async def chat(self, session: SessionHandle, messages: list[Any], *, retry: int = 0) -> httpx.Response:
        """A call of a session through this replica, whichever opened it."""
        headers = {"authorization": f"Bearer {session.api_key}", "x-stainless-retry-count": str(retry)}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            return await http.post(
                f"{self.url}/sessions/{session.session_id}/v1/chat/completions",
                json={"model": "policy", "messages": messages}, headers=headers,
            )  # fmt: skip

    async def turn(self, session: SessionHandle, history: list[Any]) -> None:
        """One turn, appended to the history; asked again where the answer says that it helps, as the SDKs do."""
        for retry in range(50):
            response = await self.chat(session, history, retry=retry)
            if response.headers.get("x-should-retry") != "true":
                break
        assert response.status_code == 200, response.text
        history += [response.json()["choices"][0]["message"], {"role": "user", "content": "And then?"}]

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def replica(engine: FakeEngine, database: str, directory: Path) -> AsyncIterator[Replica]:
    """The command, as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlagent.cli", "serve", "--model", str(MODEL), "--engine-url", engine.url, "--port", "0",
        "--buffer-url", database, "--set", f"run.dir={directory}", "--set", "sampling.max_tokens=32",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().split()[-1]
        async with RouterClient(url) as admin:
            yield Replica(url=url, admin=admin, process=process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
