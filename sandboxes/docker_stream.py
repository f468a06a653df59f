"""One exec's input and output, over a connection of its own to the engine's unix socket.

After the request the connection carries the command's input one way and frames the other way: eight bytes (which stream, and
the length), then the bytes. What comes after the cap is taken and thrown away.
"""

import asyncio
import json
import struct
from pathlib import Path

_HEADER = struct.Struct(">BxxxL")
_SWITCHED = b"101"


class ExecStream:
    """Keeps `limit` bytes of `stdout` and of `stderr`. `refused`: what the engine said instead of starting it."""

    def __init__(self, limit: int) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.truncated = False
        self.refused = ""
        self._limit = limit

    async def run(self, engine: Path, exec_id: str, stdin: bytes) -> None:
        """Start the exec and follow it to its end."""
        reader, writer = await asyncio.open_unix_connection(engine)
        sending: asyncio.Task[None] | None = None
        try:
            body = json.dumps({"Detach": False, "Tty": False}).encode()
            writer.write(
                b"POST /exec/"
                + exec_id.encode()
                + b"/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
                b"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: "
                + str(len(body)).encode()
                + b"\r\n\r\n"
                + body
            )
            answer = await reader.readuntil(b"\r\n\r\n")
            if _SWITCHED not in answer.split(b"\r\n")[0]:
                self.refused = (await reader.read(self._limit)).decode(errors="replace").strip() or "no reason given"
                return
            sending = asyncio.create_task(self._send(writer, stdin))
            await self._receive(reader)
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.wait([sending])
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, stdin: bytes) -> None:
        try:
            writer.write(stdin)
            await writer.drain()
            writer.write_eof()
        except OSError:  # the command ended without reading it
            return

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                which, left = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            kept = self.stderr if which == 2 else self.stdout
            while left:
                data = await reader.read(min(left, 65536))
                if not data:
                    return
                left -= len(data)
                room = self._limit - len(kept)
                kept += data[:room]
                self.truncated |= len(data) > room
