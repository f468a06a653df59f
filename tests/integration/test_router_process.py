"""`serve` as a process: what a kill -9 leaves, how SIGTERM ends it, and what a full disk does to calls."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from fake_engine import FakeEngine, fake_engine
from router_harness import MODEL, USER, always, router, said

from rlagent.client import RouterClient

SERVE = """
import asyncio, sys
from pathlib import Path
from rlagent.buffer.config import BufferConfig
from rlagent.engine.config import EngineConfig
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serve

model, engine, buffer = sys.argv[1:]
asyncio.run(
    serve(
        model_dir=Path(model), router=RouterConfig(), sampling=SamplingConfig(),
        engine=EngineConfig(kind="attach", urls=(engine,)), buffer=BufferConfig(), buffer_path=Path(buffer),
        ready=lambda url: print(url, flush=True),
    )
)
"""


@asynccontextmanager
async def served(engine: FakeEngine, buffer: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """`serve` in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, str(MODEL), engine.url, str(buffer), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().strip(), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def chat(url: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        return await http.post(
            f"{url}/v1/chat/completions",
            json={"model": "m", "messages": USER},
            headers={"authorization": "Bearer agent", "x-stainless-retry-count": "1"},
        )


async def test_a_kill_9_after_an_answer_loses_nothing_of_it(tmp_path: Path) -> None:
    async with fake_engine(always(said("ok"))) as engine:
        async with served(engine, tmp_path / "buffer.db") as (url, process):
            first = await chat(url)
            process.kill()
            await process.wait()
        async with served(engine, tmp_path / "buffer.db") as (url, _):
            assert (await chat(url)).content == first.content  # the SDK's retry, answered from the record
            async with RouterClient(url) as admin:
                (call,) = await admin.calls(first.headers["x-rlagent-session"])
                assert call["prompt_ids"] == engine.requests[0]["input_ids"]
        assert len(engine.requests) == 1


async def test_sigterm_answers_calls_in_flight_and_ends_waiting_leases(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with (
        fake_engine(always(said("ok", hold=hold))) as engine,
        served(engine, tmp_path / "b.db") as (url, process),
    ):
        call = asyncio.create_task(chat(url))
        await engine.started.wait()
        async with RouterClient(url) as admin:
            lease = asyncio.create_task(admin.lease(num_groups=1, step=0, wait_s=60))
            assert (await admin.policy())["version"] == 0  # the lease was sent before this
            process.send_signal(signal.SIGTERM)
            assert await lease is None
            hold.set()
            assert (await call).status_code == 200
            assert await process.wait() == 0


async def test_a_full_disk_fails_calls_and_says_so(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("ok"))) as r:
        first = await r.chat()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        wal = tmp_path / "buffer.db-wal"
        resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size, hard))
        try:
            for stream in (False, True):
                full = await r.chat(stream=stream)
                if stream:
                    assert "store_failed" in full.text
                    assert "[DONE]" not in full.text
                else:
                    assert full.status_code == 503
                    assert full.headers["x-should-retry"] == "true"
                    assert "free space" in full.json()["error"]["message"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (await r.chat()).status_code == 200
        assert len(await r.admin.calls(first.headers["x-rlagent-session"])) == 2
