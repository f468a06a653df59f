"""A pipe that is read to its end while only its first bytes are kept."""

import asyncio
import os


class Capture(asyncio.Protocol):
    """Keeps `limit` bytes in `data`; what comes after is taken and thrown away, so that no writer blocks and no memory grows."""

    def __init__(self, limit: int) -> None:
        self.data = bytearray()
        self.truncated = False
        self.began = asyncio.Event()  # the first bytes, or the end, have come
        self._limit = limit
        self._ended = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None

    async def open(self) -> int:
        """Make the pipe; the end to write to, which the caller closes."""
        read_end, write_end = os.pipe()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: self, os.fdopen(read_end, "rb", buffering=0)
        )
        return write_end

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self.began.set()
        room = self._limit - len(self.data)
        self.data += data[:room]
        self.truncated |= len(data) > room

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop once no process has the pipe open for writing."""
        self.began.set()
        self._ended.set()

    async def close(self, wait_s: float) -> None:
        """Take what is still in the pipe, up to `wait_s` where somebody holds it open, and close it."""
        try:
            async with asyncio.timeout(wait_s):
                await self._ended.wait()
        except TimeoutError:
            pass
        finally:
            if self._transport is not None:
                self._transport.close()
