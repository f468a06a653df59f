"""Engines, embedded or SGLang, as supervised child processes.

In the flow: serve.py starts them before it listens. Invariant: an engine that died is started again with the newest
snapshot and gets requests only once it holds weights that the buffer knows; children end with their parent, however
that ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from rlagent.engine.config import EngineConfig
from rlagent.errors import EngineError
from rlagent.launch.engine_command import engine_command
from rlagent.launch.local import free_port
from rlagent.router.engine_client import Engine
from rlagent.router.policy import Policies
from rlagent.types import PolicyVersion

_log: Final = logging.getLogger(__name__)

# Between two looks at an engine that does not answer yet: a fraction of the time a start takes.
POLL_S: Final = 0.1
# Between two looks at engines in rotation: a dead one is usually noticed earlier, by a call.
PROBE_S: Final = 2.0
# Before a process that died while it started is tried again.
RESTART_PAUSE_S: Final = 5.0
TERMINATE_GRACE_S: Final = 10.0
_LOG_TAIL: Final = 2000


class EngineProcess:
    """One engine at a fixed URL: its process, started again whenever it dies."""

    def __init__(self, engine: Engine, port: int, config: EngineConfig, log: Path) -> None:
        self.engine = engine
        engine.supervised = True
        self._port = port
        self._config = config
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, weights: PolicyVersion) -> None:
        """Start the process and wait until it answers. EngineError, with the end of its log, if it does not."""
        config = self._config
        self.engine.renew()
        command = engine_command(config, weights, number=self._number, port=self._port)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **command.environ},
                start_new_session=True,  # Ctrl-C goes to serve, which ends its children in order
            )
        try:
            async with asyncio.timeout(config.start_timeout_s):
                while not await self.engine.healthy():
                    if self._process.returncode is not None:
                        raise EngineError(f"engine {self._number} did not start; {self._fate()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            await self.stop()
            raise EngineError(
                f"engine {self._number} did not answer within engine.start_timeout_s = {config.start_timeout_s}; {self._fate()}"
            ) from error

    async def supervise(self, policies: Policies) -> None:
        """Keep it in rotation, until cancelled."""
        while True:
            assert self._process is not None
            process = self._process
            exited = asyncio.create_task(process.wait())
            try:
                await _probe(self.engine, policies, until=exited, patience_s=self._config.hang_timeout_s)
            finally:
                exited.cancel()
            if process.returncode is None:
                _log.warning(
                    "engine %d answered nothing for engine.hang_timeout_s = %g s; it is killed",
                    self._number,
                    self._config.hang_timeout_s,
                )
                process.kill()
                await process.wait()
            _log.warning("%s; starting it again", self._fate())
            self.engine.state = "starting"
            await self._restart(policies)

    async def _restart(self, policies: Policies) -> None:
        while True:
            try:
                await self.start(policies.weights())
                await policies.admit(self.engine)
                return
            except EngineError as error:
                _log.warning("%s", error)
                self.engine.state = "down"
                await self.stop()
                await asyncio.sleep(RESTART_PAUSE_S)

    async def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL."""
        process = self._process
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is not None:
                return
            process.send_signal(number)
            try:
                async with asyncio.timeout(TERMINATE_GRACE_S):
                    await process.wait()
            except TimeoutError:
                continue

    @property
    def pid(self) -> int | None:
        """The process id, while it runs."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    @property
    def _number(self) -> int:
        return int(self._log.stem.rpartition("-")[2])

    def _fate(self) -> str:
        code = None if self._process is None else self._process.returncode
        text = self._log.read_text(errors="replace")[-_LOG_TAIL:].strip() if self._log.exists() else ""
        return f"engine {self._number} ended with code {code}; the end of {self._log}:\n{text}"


async def _probe(
    engine: Engine, policies: Policies, *, until: asyncio.Task[int] | None, patience_s: float = math.inf
) -> None:
    """Look after an engine that runs: out of rotation when it does not answer, back when it does.

    Ends when `until` is done, or when nothing was heard of the engine for patience_s.
    """
    heard = time.monotonic()
    while True:
        if until is not None:
            await asyncio.wait([until], timeout=PROBE_S)
            if until.done():
                return
        else:
            await asyncio.sleep(PROBE_S)
        healthy = await engine.healthy()
        if healthy:
            heard = time.monotonic()
        elif time.monotonic() - heard > patience_s:
            engine.lose()
            return
        if engine.state == "ready" and not healthy:
            engine.lose()
        elif engine.state != "ready" and healthy:
            try:
                await policies.admit(engine)
            except EngineError as error:
                _log.warning("%s stays out of rotation: %s", engine.url, error)


@asynccontextmanager
async def engine_processes(
    make: Callable[[str], Engine], config: EngineConfig, logs: Path
) -> AsyncIterator[Sequence[EngineProcess]]:
    """Processes on loopback ports, not yet started; stopped on leaving."""
    processes: list[EngineProcess] = []
    for number in range(config.count):
        port = config.sglang.port + number if config.kind == "sglang" and config.sglang.port else free_port()
        engine = make(f"http://127.0.0.1:{port}")
        processes.append(EngineProcess(engine, port, config, logs / f"engine-{number}.log"))
    try:
        yield processes
    finally:
        await asyncio.gather(*(process.stop() for process in processes))


async def start_all(processes: Sequence[EngineProcess], policies: Policies) -> None:
    """Start and admit all of them side by side. EngineError if one does not start."""
    weights = policies.weights()

    async def one(process: EngineProcess) -> None:
        await process.start(weights)
        await policies.admit(process.engine)

    await asyncio.gather(*(one(process) for process in processes))


async def watch_attached(engine: Engine, policies: Policies) -> None:
    """Keep an engine that is not ours in rotation while it answers, until cancelled."""
    await _probe(engine, policies, until=None)
