"""`rlagent serve`: router and data buffer in one process, with the engines it starts or attaches to.

Starts without torch and transformers. In the flow: everything meets here, and nothing is decided here.
Invariant: it says it is ready only when a call can be answered; on SIGTERM or SIGINT calls in flight are answered
before it leaves.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from rlagent.buffer import Buffer
from rlagent.buffer.config import BufferConfig
from rlagent.engine.config import EngineConfig
from rlagent.errors import ConfigError, EngineError, StoreError
from rlagent.launch.engine_command import on_cpu
from rlagent.launch.engines import engine_processes, start_all, watch_attached
from rlagent.model_directory import read_model, text_part
from rlagent.router.app import Parts, make_app
from rlagent.router.auth import is_loopback
from rlagent.router.balance import Pool
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.router.engine_client import Engine, new_http
from rlagent.router.generate import Generator
from rlagent.router.images import placeholder_of
from rlagent.router.live import LiveSessions
from rlagent.router.policy import Policies
from rlagent.router.recorder import Recorder
from rlagent.router.render import Renderer

# How often sessions, groups and leases past their time are ended.
EXPIRE_EVERY_S: Final = 1.0
_log: Final = logging.getLogger(__name__)
_Keeper = Callable[[], Coroutine[Any, Any, None]]


async def serve(
    *,
    model_dir: Path,
    router: RouterConfig,
    sampling: SamplingConfig,
    engine: EngineConfig,
    buffer: BufferConfig,
    buffer_path: Path,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` gets the base URL once calls can be answered.

    ConfigError, LoadError, StoreError and EngineError say what to mend.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with serving(
            model_dir=model_dir, router=router, sampling=sampling, engine=engine, buffer=buffer, buffer_path=buffer_path
        ) as url:
            _collect_rarely()
            if not stop.is_set():
                ready(url)
            await stop.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _collect_rarely() -> None:
    """What is there now stays, and calls make hardly any cycles: the collector's walks over open sessions cost more than they find."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@asynccontextmanager
async def serving(
    *,
    model_dir: Path,
    router: RouterConfig,
    sampling: SamplingConfig,
    engine: EngineConfig,
    buffer: BufferConfig,
    buffer_path: Path,
) -> AsyncIterator[str]:
    """Everything of `serve` but the signals; yields the base URL."""
    if router.admin_key is None and not is_loopback(router.host):
        raise ConfigError(
            f"router.host = {router.host!r} can be reached from other machines and router.admin_key is not set; set one, "
            "or bind 127.0.0.1"
        )
    if engine.kind == "attach" and not engine.urls:
        raise ConfigError("engine.kind = 'attach' needs engine.urls, e.g. ['http://127.0.0.1:30000']")
    model_dir = _absolute(model_dir)
    model = read_model(model_dir)
    renderer = Renderer.load(model_dir, router.family, placeholder_of(model))
    text = text_part(model)
    vocabulary = max(int(text["vocab_size"]), renderer.tokenizer.size)
    context = int(text["max_position_embeddings"])
    engine = _with_flags(engine, router)
    if engine.kind == "embedded" or (engine.kind == "sglang" and on_cpu(engine)):
        context = min(context, engine.max_total_tokens)
    await _probe_port(router)
    async with AsyncExitStack() as stack:
        store = await Buffer.open(buffer_path, buffer)
        stack.push_async_callback(store.close)
        await store.ensure_initial(checksum="", snapshot=str(model_dir))
        http = await stack.enter_async_context(new_http())

        def make_engine(url: str) -> Engine:
            return Engine(url, http, vocabulary=vocabulary, timeout_s=engine.request_timeout_s)

        pool, policies, keepers = await _engines(stack, store, router, engine, make_engine, buffer_path.parent / "logs")
        live = LiveSessions(store, ttl_s=router.session_ttl_s)
        generator = Generator(pool, renderer.tokenizer, record_experts=router.record_experts)
        recorder = Recorder(store, generator, renderer, router, sampling, context)
        parts = Parts(
            config=router, buffer=store, live=live, pool=pool, policies=policies, recorder=recorder,
            tokenizer=renderer.tokenizer,
        )  # fmt: skip
        url = await stack.enter_async_context(_listening(parts))
        await stack.enter_async_context(_beside(*(keep() for keep in keepers), _expire(parts), policies.follow()))
        yield url
        store.stop_leasing()  # a learner's long poll must not hold up the end; calls in flight may


def _with_flags(engine: EngineConfig, router: RouterConfig) -> EngineConfig:
    """The engines' settings with what the router's ask of SGLang servers that we start."""
    flags: tuple[str, ...] = ()
    if router.pause_mode == "in_place":
        # With overlapped scheduling one token that the old weights sampled is told as of the new version.
        flags += ("--disable-overlap-schedule",)
    if router.record_experts:
        flags += ("--enable-return-routed-experts",)
    args = (*flags, *engine.sglang.args)
    return engine.model_copy(update={"sglang": engine.sglang.model_copy(update={"args": args})})


@asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless tasks beside the body. One that fails cancels the body, and its error is what is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as failures:
        if len(failures.exceptions) == 1:
            raise failures.exceptions[0] from None
        raise


async def _engines(
    stack: AsyncExitStack,
    store: Buffer,
    router: RouterConfig,
    config: EngineConfig,
    make: Callable[[str], Engine],
    logs: Path,
) -> tuple[Pool, Policies, list[_Keeper]]:
    """Engines that hold known weights, and what keeps each in rotation."""
    if config.kind == "attach":
        pool = Pool([make(url) for url in config.urls])
        policies = Policies(store, pool, router)
        stack.push_async_callback(policies.close)
        stack.push_async_callback(pool.close)
        for engine in pool.engines:
            await _attach(engine, policies)
        return pool, policies, [partial(watch_attached, engine, policies) for engine in pool.engines]
    processes = await stack.enter_async_context(engine_processes(make, config, logs))
    pool = Pool([process.engine for process in processes], start_wait_s=config.start_timeout_s)
    policies = Policies(store, pool, router)
    stack.push_async_callback(policies.close)
    stack.push_async_callback(pool.close)
    await start_all(processes, policies)
    return pool, policies, [partial(process.supervise, policies) for process in processes]


async def _attach(engine: Engine, policies: Policies) -> None:
    try:
        await policies.admit(engine)
    except EngineError as error:
        raise EngineError(f"engine {engine.url} of engine.urls cannot be used: {error}") from error


@asynccontextmanager
async def _listening(parts: Parts) -> AsyncIterator[str]:
    config = parts.config
    runner = web.AppRunner(make_app(parts), access_log=None, handler_cancellation=True, shutdown_timeout=config.drain_s)
    await runner.setup()
    try:
        with _says_which_port(config):
            await web.TCPSite(runner, config.host, config.port).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        await runner.cleanup()


async def _probe_port(config: RouterConfig) -> None:
    """A port that is taken is said before a database is opened or an engine loads its weights."""
    with _says_which_port(config):
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, config.host, config.port, start_serving=False
        )
    server.close()
    await server.wait_closed()


@contextmanager
def _says_which_port(config: RouterConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = "the port is in use" if error.errno == errno.EADDRINUSE else str(error)
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {why}; choose another router.port (0 takes a free one)"
        ) from error


async def _expire(parts: Parts) -> None:
    """End what is past its time, until cancelled. A full disk is met again at the next turn."""
    while True:
        await asyncio.sleep(EXPIRE_EVERY_S)
        for session_id in parts.live.drop_expired():
            parts.pool.forget(session_id)
        try:
            await parts.buffer.expire_due(time.time())
        except StoreError as error:
            _log.warning("ending what is past its time: %s", error)


def _absolute(path: Path) -> Path:
    """The initial snapshot's name must hold for engines and for a resume from elsewhere."""
    return path.absolute()
