"""Agents that do nothing but ask: conversations of many turns against one URL, from a process of their own.

Started by benchmarks/router.py. It reads one command a line (JSON) from stdin and answers each with a line:
  {"do": "new", "count", "first_tokens", "turn_tokens", "group"}   conversations that have not begun, in place of those before
  {"do": "turns", "clients", "turns"}                     each goes on by so many turns, so many of them at once
  {"do": "finish"}                                        their sessions are finished (rlagent only)
HTTP by hand: a library would cost more than the server that is measured.
"""

import argparse
import asyncio
import itertools
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import uvloop
from tokenizers import Tokenizer

PATH = "/v1/chat/completions"
_WORD_CHARS = 5  # of a token that is a word at least


class Http:
    """One keep-alive connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes, key: str) -> tuple[bytes, bytes]:
        """The answer's head (in lower case) and its body. RuntimeError for any status but 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 24)
        reader, writer = self._streams
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: %b\r\nauthorization: Bearer %b\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b"
            % (path.encode(), (self._host or "").encode(), key.encode(), len(body), body)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in head:
            answer = await _chunks(reader)
        else:
            answer = await reader.readexactly(int(header(head, b"content-length")))
        if head.split(b" ", 2)[1] != b"200":
            raise RuntimeError(f"{path}: {head.splitlines()[0].decode()} {answer[:500].decode()}")
        return head, answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        pieces.append((await reader.readexactly(size + 2))[:-2])
        if not size:
            return b"".join(pieces)


def header(head: bytes, name: bytes) -> bytes:
    """A header's value, "" where it is missing."""
    return head.partition(b"\r\n" + name + b":")[2].split(b"\r\n", 1)[0].strip()


@dataclass(slots=True)
class Conversation:
    """One agent's history; `session` is what the router calls it."""

    messages: list[dict[str, Any]]
    key: str = field(default_factory=lambda: f"bench-{uuid.uuid4().hex}")
    session: str = ""


@dataclass(slots=True)
class Load:
    """The conversations, and what is asked about them."""

    url: str
    tokenizer: Tokenizer
    stream: bool
    conversations: list[Conversation] = field(default_factory=list)
    _turn_tokens: int = 0
    _texts: dict[int, str] = field(default_factory=dict)

    def do(self, command: dict[str, Any]) -> Any:
        match command.pop("do"):
            case "new":
                return self.new(**command)
            case "turns":
                return self.turns(**command)
            case "finish":
                return self.finish()

    async def new(self, count: int, first_tokens: int, turn_tokens: int, group: int = 1) -> dict[str, Any]:
        """So many in a row begin with the same words, as rollouts of one task do, and no others."""
        self._turn_tokens = turn_tokens
        tasks = [f"{uuid.uuid4().hex} {self._text(first_tokens)}" for _ in range(-(-count // group))]
        self.conversations = [
            Conversation([{"role": "user", "content": tasks[number // group]}]) for number in range(count)
        ]
        return {"bytes": len(self._body(self.conversations[0])) if count else 0}

    async def turns(self, clients: int, turns: int) -> dict[str, Any]:
        """Seconds of each call, by turn of the conversation in this command, and of all together."""
        waiting = iter(self.conversations)
        seconds: list[list[float]] = [[] for _ in range(turns)]
        start = time.perf_counter()
        await asyncio.gather(*(self._client(waiting, seconds) for _ in range(clients)))
        return {"seconds": seconds, "elapsed_s": time.perf_counter() - start}

    async def _client(self, waiting: Any, seconds: list[list[float]]) -> None:
        http = Http(self.url)
        for conversation in waiting:
            for found in seconds:
                body = self._body(conversation)
                start = time.perf_counter()
                head, answer = await http.post(PATH, body, conversation.key)
                found.append(time.perf_counter() - start)
                conversation.session = header(head, b"x-rlagent-session").decode()
                said = {"role": "assistant", "content": _content(answer, stream=self.stream)}
                asked = {"role": "user", "content": self._text(self._turn_tokens)}
                conversation.messages += (said, asked)
        http.close()

    async def finish(self) -> dict[str, Any]:
        waiting = iter(self.conversations)

        async def client() -> None:
            http = Http(self.url)
            for conversation in waiting:
                await http.post(f"/sessions/{conversation.session}/finish", b'{"reward": 1.0}', "")
            http.close()

        await asyncio.gather(*(client() for _ in range(16)))
        self.conversations = []
        return {}

    def _body(self, conversation: Conversation) -> bytes:
        return orjson.dumps({"model": "policy", "messages": conversation.messages, "stream": self.stream})

    def _text(self, num_tokens: int) -> str:
        """Words of about so many tokens."""
        if num_tokens not in self._texts:
            tokens = (self.tokenizer.decode([token]) for token in range(self.tokenizer.get_vocab_size()))
            words = [text for text in tokens if text[:1] == " " and text[1:].isalpha() and len(text) > _WORD_CHARS]
            self._texts[num_tokens] = "".join(itertools.islice(itertools.cycle(words), num_tokens))
        return self._texts[num_tokens]


def _content(answer: bytes, *, stream: bool) -> str:
    if not stream:
        return str(orjson.loads(answer)["choices"][0]["message"]["content"])
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in orjson.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def main() -> None:
    """Obey until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", type=Path)
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()
    load = Load(args.url, Tokenizer.from_file(str(args.model / "tokenizer.json")), args.stream)

    async def obey() -> None:
        for line in sys.stdin:
            found = await load.do(orjson.loads(line))
            print(orjson.dumps(found).decode(), flush=True)

    uvloop.run(obey())


if __name__ == "__main__":
    main()
