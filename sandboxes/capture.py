"""A pipe that is read to its end while only its first bytes are kept."""

import asyncio
import os
from contextlib import suppress
from typing import Final

_PIECE_BYTES: Final = 262144  # more than a pipe holds


class Capture:
    """Keeps `limit` bytes in `data`; what comes after is taken and thrown away, so that no writer blocks and no memory grows."""

    def __init__(self, limit: int) -> None:
        self.truncated = False
        self._kept = bytearray()
        self._limit = limit
        self._read_end = -1
        self._ended = asyncio.Event()

    @property
    def data(self) -> bytes:
        """What was kept so far."""
        return bytes(self._kept)

    def open(self) -> int:
        """Make the pipe; the end to write to, which the caller closes."""
        self._read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        asyncio.get_running_loop().add_reader(self._read_end, self._take)
        return write_end

    async def close(self, wait_s: float) -> None:
        """Take what is still in the pipe, up to `wait_s` where somebody holds it open, and close it."""
        if self._read_end < 0:
            return
        try:
            self._take()  # what a pipe holds
            self._take()  # its end, if nobody has it open any more
            if not self._ended.is_set():
                async with asyncio.timeout(wait_s):
                    await self._ended.wait()
        except TimeoutError:
            pass
        finally:
            if not self._ended.is_set():
                asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1

    def _take(self) -> None:
        if self._ended.is_set():
            return
        with suppress(BlockingIOError):
            data = os.read(self._read_end, _PIECE_BYTES)
            if not data:  # no process has the pipe open for writing
                self._ended.set()
                asyncio.get_running_loop().remove_reader(self._read_end)
                return
            room = self._limit - len(self._kept)
            self._kept += data[:room]
            self.truncated |= len(data) > room
