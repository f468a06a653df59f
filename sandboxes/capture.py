"""A pipe that is read to its end while only its first bytes are kept."""

import asyncio
import os


class Capture(asyncio.Protocol):
    """Keeps `limit` bytes in `data`; what comes after is taken and thrown away, so that no writer blocks and no memory grows."""

    def __init__(self, limit: int) -> None:
        self.truncated = False
        self._kept = bytearray()
        self._limit = limit
        self._ended = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None

    @property
    def data(self) -> bytes:
        """What was kept so far."""
        return bytes(self._kept)

    async def open(self) -> int:
        """Make the pipe; the end to write to, which the caller closes."""
        read_end, write_end = os.pipe()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: self, os.fdopen(read_end, "rb", buffering=0)
        )
        return write_end

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        room = self._limit - len(self._kept)
        self._kept += data[:room]
        self.truncated |= len(data) > room

    def connection_lost(self, _: Exception | None) -> None:
        """Called by the event loop once no process has the pipe open for writing."""
        self._ended.set()

    async def close(self, wait_s: float) -> None:
        """Take what is still in the pipe, up to `wait_s` where somebody holds it open, and close it."""
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._ended.wait()
        except TimeoutError:
            pass
        finally:
            self._transport.close()
