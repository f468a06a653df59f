"""One command in a container: followed to its end, told how it ended, and everything of it swept up.

Invariant: after `sweep` the container's first process, which sleeps, is the only one: where another is, or the container did not survive
the command, the container is killed and started again, which keeps its files.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from rlagent.errors import SandboxError
from rlagent.sandboxes.docker_connection import Connection, call
from rlagent.sandboxes.docker_stream import ExecStream

_LOOK_S: Final = 0.5  # how often a running command's container is looked at: it may have died under it
_TOLD_S: Final = 0.5  # within which the engine knows that a process ran out of memory
_START_FAILED: Final = b"OCI runtime exec failed"
_LOST_CODE: Final = 128  # what runsc ends with when its kernel died under the command
_DYING_S: Final = 3.0  # within which the engine knows of that death


class ContainerExec:
    """Of `container`, docker-py's. `timed_out` and `exit_code` (None when the container went first) are known after `run`."""

    def __init__(self, connection: Connection, container: Any, *, gvisor: bool, output_limit_bytes: int) -> None:
        self.stream = ExecStream(output_limit_bytes)
        self.timed_out = False
        self.exit_code: int | None = None
        self._starved = False
        self._connection, self._container, self._gvisor = connection, container, gvisor
        self._since = time.time()

    async def run(
        self, argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], cwd: str, timeout_s: float | None
    ) -> None:
        """Run it to its end, and end what it left behind, also when cancelled. SandboxError where it cannot be started."""
        api = self._connection.client.api
        made = await call(lambda: api.exec_create(
            self._container.id, list(argv), stdin=True, environment=dict(env), workdir=cwd
        ))  # fmt: skip
        clean = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._watched(self.stream.run(self._connection.socket, made["Id"], stdin))
            clean = True
        except TimeoutError:
            self.timed_out = True
        finally:
            self.exit_code = None if self.timed_out else await self._told_code(made["Id"])
            if self._gvisor and self.exit_code == _LOST_CODE and await self._dies():
                self.exit_code = None
            self._starved = await asyncio.shield(self._sweep(dirty=not clean))
        said = bytes(self.stream.stdout)
        if self.stream.refused or said.startswith(_START_FAILED):
            why = self.stream.refused or said.decode(errors="replace")
            raise SandboxError(f"{argv[0]!r} cannot be started in the sandbox: {why}")

    async def was_starved(self, killed: int | None) -> bool:
        """Whether memory was wanting; for a command that was killed the engine is asked, which may learn of it a little later."""
        if killed == signal.SIGKILL and not self.timed_out and not self._starved:
            until = time.time() + _TOLD_S
            return await self._connection.had_no_memory(self._container.id, self._since, until)
        return self._starved

    async def _watched(self, running: Awaitable[None]) -> None:
        """Until the command ends, or its container has."""
        task = asyncio.ensure_future(running)
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                if not (await self._state())["Running"]:
                    return
            task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _state(self) -> Any:
        await call(self._container.reload)
        return self._container.attrs["State"]

    async def _told_code(self, exec_id: str) -> int | None:
        with suppress(SandboxError):
            code: int | None = (await call(lambda: self._connection.client.api.exec_inspect(exec_id)))["ExitCode"]
            return code
        return None

    async def _dies(self) -> bool:
        """Whether the container is dead or dying."""
        with suppress(SandboxError):
            await call(lambda: self._container.wait(timeout=_DYING_S))
            return True
        return False

    async def _sweep(self, *, dirty: bool) -> bool:
        """Leave the sleeper alone in its container. Whether the engine says that the container ran out of memory."""
        state = await self._state()
        dead, starved = not state["Running"], bool(state["OOMKilled"])
        if not (dead or starved or dirty):
            dirty = len((await call(self._container.top))["Processes"]) > 1
        if dead or starved or dirty:
            if not dead:
                await call(lambda: self._container.kill("KILL"))
                await call(self._container.wait)
            await call(self._container.start)
        return starved
