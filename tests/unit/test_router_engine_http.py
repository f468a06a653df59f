"""The wire to an engine: whole answers free their connection, whatever breaks off or is given up closes it and says so."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from yarl import URL

from rlagent.errors import ConfigError
from rlagent.router import engine_http
from rlagent.router.engine_http import Answer, Endpoint

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
WHOLE = OK + b"content-length: 4\r\n\r\none\n"
Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server that answers bytes. `hung_up` is set when a connection to it was closed by the other side."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.requests: list[tuple[bytes, bytes]] = []  # head and body
        self.num_connections = 0
        self.hung_up = asyncio.Event()
        self.endpoint: Endpoint

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                await self._reply(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up.set()
        finally:
            writer.close()

    async def ask(self, body: bytes = b"{}", timeout_s: float = 60.0) -> Answer:
        return await self.endpoint.post(body, timeout_s)


@asynccontextmanager
async def peer(reply: Reply) -> AsyncIterator[Peer]:
    found = Peer(reply)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.endpoint = Endpoint(URL(f"http://user:word@127.0.0.1:{server.sockets[0].getsockname()[1]}/a/generate"))
    try:
        yield found
    finally:
        found.endpoint.close()
        server.close()
        await asyncio.sleep(0)


def telling(*pieces: bytes) -> Reply:
    """Each piece is sent by itself."""

    async def reply(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return reply


def hanging_up(*pieces: bytes) -> Reply:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await telling(*pieces)(reader, writer)
        writer.close()

    return reply


async def told(answer: Answer) -> list[bytes]:
    """All lines of an answer that is then left."""
    try:
        assert await answer.head() == 200
        lines = []
        while found := await answer.lines():
            lines += found
        return lines
    finally:
        answer.leave()


async def test_lines_are_whole_wherever_chunks_and_packets_are_cut() -> None:
    chunks = (b"3\r\none\r", b"\n5\r\n\ntwo\n\r\n", b"6\r\nthree\n\r\n4\r\nfour\r\n", b"0\r\n\r", b"\n")
    async with peer(telling(CHUNKED[:20], CHUNKED[20:], *chunks)) as engine:
        for _ in range(3):
            assert await told(await engine.ask(b'{"rid": 1}')) == [b"one", b"two", b"three", b"four"]
        assert engine.num_connections == 1
        head, body = engine.requests[-1]
        assert head.startswith(b"POST /a/generate HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"authorization: Basic dXNlcjp3b3Jk\r\n" in head
        assert body == b'{"rid": 1}'


async def test_what_is_asked_at_once_has_a_connection_each_and_those_are_used_again() -> None:
    async with peer(telling(WHOLE)) as engine:
        for _ in range(2):
            answers = [await engine.ask() for _ in range(3)]
            assert [await told(answer) for answer in answers] == [[b"one"]] * 3
        assert engine.num_connections == 3


async def test_a_refusal_is_read_to_its_end_and_an_interim_answer_is_none() -> None:
    refused = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 9\r\n\r\n"
    async with peer(telling(b"HTTP/1.1 100 Continue\r\n\r\n" + refused, b'{"a":\n', b"1}\n")) as engine:
        for _ in range(2):
            answer = await engine.ask()
            assert await answer.head() == 400
            assert await answer.rest() == b'{"a":\n1}'
            answer.leave()
        assert engine.num_connections == 1


@pytest.mark.parametrize(
    "begun", [b"", OK, CHUNKED, CHUNKED + b"4\r\none\n\r\n", OK + b"content-length: 99\r\n\r\none"]
)
async def test_a_connection_lost_before_the_end_is_an_error(begun: bytes) -> None:
    async with peer(hanging_up(begun)) as engine:
        with pytest.raises(ConnectionError):
            await told(await engine.ask())
        with pytest.raises(ConnectionError):  # and the next request has a connection of its own
            await told(await engine.ask())
        assert engine.num_connections == 2


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    for head in (OK + b"\r\n", OK + b"connection: close\r\ncontent-length: 4\r\n\r\n"):
        async with peer(hanging_up(head, b"one\n")) as engine:
            for number in (1, 2):
                assert await told(await engine.ask()) == [b"one"]
                assert engine.num_connections == number


async def test_what_is_no_http_is_an_error() -> None:
    async with peer(telling(b"SSH-2.0-something\r\n")) as engine:
        with pytest.raises(ConnectionError, match="no HTTP"):
            await told(await engine.ask())


async def test_a_second_answer_to_one_request_closes_the_connection() -> None:
    async with peer(telling(WHOLE + OK + b"content-length: 6\r\n\r\nother\n")) as engine:
        for number in (1, 2):
            assert await told(await engine.ask()) == [b"one"]
            assert engine.num_connections == number


@pytest.mark.parametrize("url", ["localhost:30000", "127.0.0.1", "ftp://host:1", "http://"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http://HOST:PORT") as refused:
        Endpoint(URL(url))
    assert url in str(refused.value)


async def test_an_answer_that_is_given_up_closes_its_connection() -> None:
    async with peer(telling(CHUNKED + b"4\r\none\n\r\n")) as engine:
        answer = await engine.ask()
        assert await answer.lines() == [b"one"]
        reading = asyncio.create_task(told(answer))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await engine.hung_up.wait()


async def test_an_answer_of_which_enough_is_read_frees_its_connection_at_its_end() -> None:
    rest = asyncio.Event()

    async def reply(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"4\r\none\n\r\n")
        await rest.wait()
        writer.write(b"7\r\n[DONE]\n\r\n0\r\n\r\n")

    async with peer(reply) as engine:
        first = await engine.ask()
        assert await first.lines() == [b"one"]
        first.leave(read=True)
        second = await engine.ask()  # the first is not free yet
        rest.set()
        assert await told(second) == [b"one", b"[DONE]"]
        for _ in range(10_000):
            if len(engine.endpoint._kept.free) == 2:
                break
            await asyncio.sleep(0.001)
        for answer in [await engine.ask() for _ in range(2)]:
            assert await told(answer) == [b"one", b"[DONE]"]
        assert engine.num_connections == 2
        assert not engine.hung_up.is_set()


async def test_an_answer_that_takes_too_long_is_an_error_and_closes_its_connection() -> None:
    async with peer(telling(CHUNKED)) as engine:
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            await told(await engine.ask(timeout_s=0.01))
        await engine.hung_up.wait()


async def test_a_line_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "MAX_LINE_BYTES", 100)
    async with peer(telling(OK + b"content-length: 300\r\n\r\n", b"a" * 300)) as engine:
        with pytest.raises(ConnectionError, match="longer than 100"):
            await told(await engine.ask())


async def test_an_engine_waits_for_a_reader_who_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "_MAX_UNREAD_BYTES", 1)
    line = b"a" * (1 << 20) + b"\n"
    num_sent = 0

    async def reply(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        writer.write(OK + b"content-length: %d\r\n\r\n" % (64 * len(line)))
        for _ in range(64):
            writer.write(line)
            await writer.drain()
            num_sent += 1

    async with peer(reply) as engine:
        answer = await engine.ask()
        assert await answer.head() == 200
        for _ in range(100):  # as long as it may, the engine goes on
            await asyncio.sleep(0.001)
        assert num_sent < 64
        assert await told(answer) == [line[:-1]] * 64
        assert num_sent == 64


async def test_a_free_connection_that_the_engine_closed_is_not_used() -> None:
    closing: list[asyncio.StreamWriter] = []

    async def reply(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closing.append(writer)
        writer.write(WHOLE)

    async with peer(reply) as engine:
        assert await told(await engine.ask()) == [b"one"]
        closing[0].write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        closing[0].close()
        await engine.hung_up.wait()
        assert await told(await engine.ask()) == [b"one"]
        assert engine.num_connections == 2


async def test_a_connection_that_was_free_for_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer(telling(WHOLE)) as engine:
        await told(await engine.ask())
        monkeypatch.setattr(engine_http, "_MAX_IDLE_S", 0.0)
        await told(await engine.ask())
        assert engine.num_connections == 2


async def test_nobody_listens() -> None:
    async with peer(telling(WHOLE)) as engine:
        pass
    with pytest.raises(ConnectionRefusedError):
        await engine.ask()
