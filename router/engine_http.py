"""HTTP/1.1 to an engine's generate endpoint: kept connections, and answers that are read line by line as they come.

In the flow: engine_client.py asks through it; control calls, of which there are few, go through aiohttp, whose client takes
five times the processor time of this. Invariant: a connection carries one request at a time and is used again only
behind an answer that was whole; whoever gives an answer up closes the connection, which tells the engine so.
"""

from __future__ import annotations

import asyncio
import binascii
import ssl
from dataclasses import dataclass, field
from typing import Any, Final

import httptools
from yarl import URL

from rlagent.errors import ConfigError

CONNECT_TIMEOUT_S: Final = 5.0
# Longest line of an answer: an engine's cumulative ids and logprobs of a long completion.
MAX_LINE_BYTES: Final = 16 * 1024 * 1024
# What has come and nobody has read yet; beyond it the engine has to wait.
_MAX_UNREAD_BYTES: Final = 1024 * 1024
# uvicorn, which engines run on, closes what was silent for 5 s: a request sent into that moment would be lost.
_MAX_IDLE_S: Final = 4.0


class Answer(asyncio.Protocol):
    """A connection, and what comes over it in answer to its present request."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None  # uvloop's is none of asyncio's classes
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s = 0.0
        self._whole = True
        self._left = False  # nobody reads it any more
        self._closed = False
        self._paused = False
        self._idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self.status = 0  # known once the head has come
        self._framed = False  # whether its head says where it ends
        self._keeps = False  # whether the connection lives on behind it
        self._error: Exception | None = None
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._rest: list[bytes] = []  # of a line that has not ended

    def ask(self, request: bytes, timeout_s: float) -> None:
        """Send a request; its answer is to be whole within `timeout_s`."""
        self._begin()
        self._whole = self._left = False
        self._timeout_s = timeout_s
        self._timer = self._loop.call_later(timeout_s, self._late)
        self._transport.write(request)

    async def head(self) -> int:
        """The status. OSError where none comes."""
        while not self.status:
            await self._more()
        return self.status

    async def lines(self) -> list[bytes]:
        """The lines that have come, at least one; none at the answer's end. OSError where it breaks off."""
        while True:
            while not self._pieces:
                if self._whole:
                    last, self._rest = b"".join(self._rest), []
                    return [last] if last else []
                await self._more()
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._num_unread = 0
            self._resume()
            first, *others = data.split(b"\n")
            self._rest.append(first)
            if others:
                lines = [b"".join(self._rest), *others[:-1]]
                self._rest = [others[-1]]
                return lines
            if sum(map(len, self._rest)) > MAX_LINE_BYTES:
                raise ConnectionError(f"a line is longer than {MAX_LINE_BYTES} bytes")

    async def rest(self) -> bytes:
        """All lines to the answer's end."""
        found: list[bytes] = []
        while lines := await self.lines():
            found += lines
        return b"\n".join(found)

    def leave(self, *, read: bool = False) -> None:
        """Done with it. `read`: what is left of it says nothing, and the connection is free behind it; else it is given up."""
        self._left = True
        if self._whole:
            self._free()
        elif read:
            self._resume()
        else:
            self.close()

    @property
    def usable(self) -> bool:
        """Whether a free connection may carry another request."""
        closing = self._closed or self._transport.is_closing()
        return not closing and self._loop.time() - self._idle_since < _MAX_IDLE_S

    def close(self) -> None:
        """Break the connection off."""
        self._closed = True
        self._stop_timer()
        self._transport.abort()

    async def _more(self) -> None:
        """Wait for something to come. Raises why nothing will."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.close()
        self._wake()

    def _late(self) -> None:
        self._fail(TimeoutError(f"no whole answer within {self._timeout_s:g} s"))

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _free(self) -> None:
        if self._keeps and not self._closed:
            self._idle_since = self._loop.time()
            self._kept.free.append(self)
        else:
            self.close()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._kept.open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._whole:
            self.close()  # nothing was asked: the engine says goodbye
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"it answers no HTTP: {error}"))
        else:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._kept.forget(self)
        if self._whole or self._error is not None:
            return
        if error is None and self.status and not self._framed:
            self.on_message_complete()  # an answer without a length ends with the connection
            self._wake()
        else:
            self._fail(error or ConnectionResetError("the engine closed the connection before the end of its answer"))

    # What the parser calls.

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._whole:
            self.close()  # a second answer: whose?
            return
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0  # an answer comes behind a 1xx
        self._keeps = self._parser.should_keep_alive()  # the parser knows it only here

    def on_body(self, piece: bytes) -> None:
        if self._left or self._whole:
            return
        self._pieces.append(piece)
        self._num_unread += len(piece)
        if self._num_unread > _MAX_UNREAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._whole or not self.status:
            return
        self._whole = True
        self._stop_timer()
        if self._left:
            self._free()


@dataclass(frozen=True, slots=True)
class Kept:
    """The connections to one endpoint; those that carry no request are free, the one used last at the end."""

    open: set[Answer] = field(default_factory=set)
    free: list[Answer] = field(default_factory=list)

    def forget(self, answer: Answer) -> None:
        """It was closed."""
        self.open.discard(answer)
        if answer in self.free:
            self.free.remove(answer)


class Endpoint:
    """One URL that JSON is posted to, and the connections to it. ConfigError for what is no absolute http URL."""

    def __init__(self, url: URL) -> None:
        if url.scheme not in ("http", "https") or url.host is None or url.port is None:
            raise ConfigError(f"engine.urls: {str(url)!r} is no address of an engine; write http://HOST:PORT")
        self._host, self._port = url.host, url.port
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        host = f"[{url.raw_host}]" if ":" in url.host else url.raw_host
        port = "" if url.is_default_port() else f":{url.port}"
        lines = [f"POST {url.raw_path_qs} HTTP/1.1", f"host: {host}{port}"]
        if url.user is not None:
            key = binascii.b2a_base64(f"{url.user}:{url.password or ''}".encode(), newline=False).decode()
            lines.append(f"authorization: Basic {key}")
        self._head = "\r\n".join([*lines, "content-type: application/json", "content-length: "]).encode()
        self._kept = Kept()

    async def post(self, body: bytes, timeout_s: float) -> Answer:
        """Send `body`. The answer is to be left (`Answer.leave`), however it ends. OSError where nobody listens."""
        answer = self._free() or await self._connect()
        answer.ask(b"%b%d\r\n\r\n%b" % (self._head, len(body), body), timeout_s)
        return answer

    def _free(self) -> Answer | None:
        """The one used last, so that those that are not needed grow old."""
        while self._kept.free:
            found = self._kept.free.pop()
            if found.usable:
                return found
            found.close()
        return None

    async def _connect(self) -> Answer:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, answer = await asyncio.get_running_loop().create_connection(
                lambda: Answer(self._kept), self._host, self._port, ssl=self._ssl
            )
        return answer

    def close(self) -> None:
        """Close all connections."""
        for answer in tuple(self._kept.open):
            answer.close()
