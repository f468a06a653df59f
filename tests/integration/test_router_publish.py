"""Publishing over HTTP: who pauses, what commits, and what brings engines back; with scripted and with real engines."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import orjson
import pytest
from fake_engine import Reply
from router_harness import MODEL, USER, always, router, said

from rlagent.buffer.config import BufferConfig
from rlagent.client import RouterClient
from rlagent.engine.config import EngineConfig
from rlagent.errors import RouterError
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving


async def test_a_commit_needs_the_version_on_every_engine(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("a")), always(said("b"))) as r:
        ticket = await r.admin.begin_publish(step=1, parent=0)
        assert set(ticket.engines) == {engine.url for engine in r.engines}
        assert all(engine.control[-1] == ("/pause_generation", {"mode": "abort"}) for engine in r.engines)
        r.engines[0].version = str(ticket.version)
        with pytest.raises(RouterError, match="holds 0"):
            await r.admin.commit_publish(ticket.publish_id, checksum="c", snapshot=None)
        r.engines[1].version = str(ticket.version)
        assert await r.admin.commit_publish(ticket.publish_id, checksum="c", snapshot=None) == {
            "version": 1,
            "depth": 1,
        }
        assert all(engine.paths()[-1] == "/continue_generation" for engine in r.engines)
        shown = await r.admin.policy()
        assert [engine["version"] for engine in shown["engines"]] == [1, 1]
        assert (shown["version"], shown["publishing"]) == (1, None)
        again = await r.admin.commit_publish(ticket.publish_id, checksum="c", snapshot=None)
        assert again == {"version": 1, "depth": 1}


async def test_a_failed_publish_brings_engines_back_to_the_snapshot(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("a"))) as r:
        ticket = await r.admin.begin_publish(step=1, parent=0)
        with pytest.raises(RouterError, match="under way"):
            await r.admin.begin_publish(step=1, parent=0)
        r.engine.version = str(ticket.version)  # half of it was pushed
        await r.admin.fail_publish(ticket.publish_id, "a bucket was lost")
        assert r.engine.version == "0"
        load = dict(r.engine.control)["/update_weights_from_disk"]
        assert (load["model_path"], load["weight_version"]) == (str(MODEL), "0")
        assert r.engine.paths()[-1] == "/continue_generation"
        assert (await r.admin.begin_publish(step=1, parent=0)).version == 2  # the number is not reused


RELEASE = ("/release_memory_occupation", {"tags": ["kv_cache"]})
RESUME = ("/resume_memory_occupation", {"tags": ["kv_cache"]})


async def test_memory_is_lent_after_all_was_aborted_and_taken_again_before_anything_runs(tmp_path: Path) -> None:
    """SGLang ends when it is told to take what it did not give back, or gives back what is in use."""
    async with router(tmp_path, always(said("a"))) as r:
        began = len(r.engine.control)
        ticket = await r.admin.begin_publish(step=1, parent=0, release_kv_cache=True)
        assert r.engine.control[began:] == [("/pause_generation", {"mode": "abort"}), ("/flush_cache", {}), RELEASE]
        call = asyncio.create_task(r.chat())
        r.engine.version = str(ticket.version)
        await r.admin.commit_publish(ticket.publish_id, checksum="c", snapshot=None)
        assert r.engine.control[-3:] == [RESUME, ("/flush_cache", {}), ("/continue_generation", {})]
        assert (await call).status_code == 200
        await r.admin.begin_publish(step=2, parent=1)
        assert RELEASE not in r.engine.control[began + 3 :]


async def test_a_failed_publish_takes_lent_memory_again_once(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("a"))) as r:
        ticket = await r.admin.begin_publish(step=1, parent=0, release_kv_cache=True)
        await r.admin.fail_publish(ticket.publish_id, "the learner failed")
        assert r.engine.control[-5:-3] == [RESUME, ("/flush_cache", {})]
        assert r.engine.paths()[-2:] == ["/update_weights_from_disk", "/continue_generation"]
        ticket = await r.admin.begin_publish(step=1, parent=0)
        await r.admin.fail_publish(ticket.publish_id, "again")
        assert r.engine.control.count(RESUME) == r.engine.control.count(RELEASE) == 1


async def test_a_publish_whose_lease_runs_out_fails(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("a"))) as r:
        ticket = await r.admin.begin_publish(step=1, parent=0, lease_s=0.01)
        async with asyncio.timeout(5):
            while (await r.admin.policy())["publishing"] is not None:
                pass
        assert r.engine.paths()[-2:] == ["/update_weights_from_disk", "/continue_generation"]
        r.engine.version = str(ticket.version)
        with pytest.raises(RouterError, match="ran out"):
            await r.admin.commit_publish(ticket.publish_id, checksum="", snapshot=None)


async def test_a_learner_that_dies_while_it_begins_leaves_no_engine_paused(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("a"))) as r:
        r.engine.hold_pause = asyncio.Event()
        begin = asyncio.create_task(r.admin.begin_publish(step=1, parent=0, lease_s=0.01))
        await r.engine.pausing.wait()
        begin.cancel()
        await asyncio.wait([begin])
        r.engine.hold_pause.set()
        async with asyncio.timeout(5):
            while "/continue_generation" not in r.engine.paths()[r.engine.paths().index("/pause_generation") :]:
                await r.admin.policy()
        assert (await r.admin.begin_publish(step=1, parent=0)).version == 2


async def test_an_attached_engine_of_another_version_is_loaded_first(tmp_path: Path) -> None:
    async with router(tmp_path, always(said("a"))) as r:
        ticket = await r.admin.begin_publish(step=1, parent=0)
        r.engine.version = str(ticket.version)
        await r.admin.commit_publish(ticket.publish_id, checksum="", snapshot="/weights/1")
    async with router(tmp_path, always(said("a"))) as r:  # a new engine, which says "0"
        assert r.engine.version == "1"
        assert dict(r.engine.control)["/update_weights_from_disk"]["model_path"] == "/weights/1"


async def test_an_engine_that_was_lost_comes_back_with_weights_that_are_known(tmp_path: Path) -> None:
    flaky = always(Reply(ids=[], status=500))
    async with router(tmp_path, flaky) as r:
        r.engine.healthy = False
        assert (await r.chat()).status_code == 503
        assert (await r.http.get("/health")).status_code == 503
        r.engine.script = always(said("back"))
        r.engine.healthy = True
        async with asyncio.timeout(10):
            while (await r.http.get("/health")).status_code != 200:
                pass
        assert "/update_weights_from_disk" in r.engine.paths()
        assert (await r.chat()).status_code == 200


# Tokens of a call that is still being sampled when a publish begins, on a loaded machine too: seconds on an idle one.
LONG = 3000


@asynccontextmanager
async def real_router(
    directory: Path, *, model: Path = MODEL, max_tokens: int = 400
) -> AsyncIterator[tuple[str, RouterClient]]:
    """A router with an embedded engine of its own."""
    async with (
        serving(
            model_dir=model,
            router=RouterConfig(),
            sampling=SamplingConfig(max_tokens=max_tokens),
            engine=EngineConfig(max_total_tokens=8192),
            buffer=BufferConfig(),
            buffer_path=directory / "buffer.db",
        ) as url,
        RouterClient(url) as admin,
    ):
        yield url, admin


def endless_model(directory: Path) -> Path:
    """The demo's model with an end outside its vocabulary: its completions are as long as they may be."""
    shutil.copytree(MODEL, directory)
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        changes = {"eos_token_id": 704} | ({"max_position_embeddings": 8192} if name == "config.json" else {})
        path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | changes))
    return directory


async def chat(url: str, key: str, **body: object) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return await http.post(
            f"{url}/v1/chat/completions",
            json={"model": "policy", "messages": USER, **body},
            headers={"authorization": f"Bearer {key}"},
        )


async def test_a_weight_update_in_mid_call_gives_two_version_spans_and_one_completion(tmp_path: Path) -> None:
    model = endless_model(tmp_path / "model")
    async with real_router(tmp_path, model=model, max_tokens=LONG) as (url, admin):
        long = {"messages": [{"role": "user", "content": "zz qq"}], "stream": True}
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60) as http,
            http.stream(
                "POST", f"{url}/v1/chat/completions", json={"model": "m", **long}, headers={"authorization": "Bearer k"}
            ) as response,
        ):
            lines = response.aiter_lines()
            chunks = (line async for line in lines if '"choices":[{' in line)
            for _ in range(2):  # the opening, and then the first that was sampled
                await anext(chunks)
            ticket = await admin.begin_publish(step=1, parent=0)
            (engine,) = ticket.engines
            await http.post(
                f"{engine}/update_weights_from_disk",
                json={"model_path": str(model), "weight_version": str(ticket.version)},
            )
            await admin.commit_publish(ticket.publish_id, checksum="", snapshot=None)
            session_id = response.headers["x-rlagent-session"]
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
        (call,) = await admin.calls(session_id)
        (choice,) = call["choices"]
        assert [span["version"] for span in choice["versions"]] == [0, 1]
        assert choice["versions"][-1]["end"] == len(choice["output_ids"]) == len(choice["logprobs"]) == LONG


async def test_an_engine_that_is_killed_is_started_again(tmp_path: Path) -> None:
    async with real_router(tmp_path) as (url, admin):
        assert (await chat(url, "a")).status_code == 200
        (pid,) = [int(line) for line in _children_of(os.getpid()) if _is_engine(int(line))]
        os.kill(pid, signal.SIGKILL)
        answers = [await chat(url, f"b{i}") for i in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        (engine,) = (await admin.policy())["engines"]
        assert (engine["state"], engine["version"]) == ("ready", 0)
        assert not Path(f"/proc/{pid}").exists()
    assert not [line for line in _children_of(os.getpid()) if _is_engine(int(line))]


async def test_an_engine_that_cannot_start_is_said_with_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (broken / name).write_bytes((MODEL / name).read_bytes())
    with pytest.raises(Exception, match="did not start"):
        async with serving(
            model_dir=broken, router=RouterConfig(), sampling=SamplingConfig(), engine=EngineConfig(),
            buffer=BufferConfig(), buffer_path=tmp_path / "b.db",
        ):  # fmt: skip
            pass


def _children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _is_engine(pid: int) -> bool:
    return b"rlagent.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
