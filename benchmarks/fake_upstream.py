"""An engine without a model, so that only what stands before it is measured: SGLang's surface and OpenAI's in one process.

python benchmarks/fake_upstream.py MODEL_DIR [--delay-ms 0]
It prints its URL. `/generate` (whole and streamed, with logprobs and versions) is what the router asks,
`/v1/chat/completions` what other proxies ask; both answer the same sentences at once, or after a delay. Bare asyncio on
uvloop: an HTTP library would cost more than all the rest. No part of the library, and no test's engine.
"""

import argparse
import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop
from tokenizers import Tokenizer

NUM_REPLIES = 64
LOGPROB = -0.7
EOS = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: its ids without the stop token, and the text of each."""

    ids: list[int]
    pieces: list[str]


class Upstream:
    """What is answered to a path and a body."""

    def __init__(self, model: Path, num_tokens: int) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.eos = tokenizer.token_to_id(EOS)
        self.version = "0"
        self._replies = itertools.cycle(_replies(tokenizer, num_tokens))

    def answer(self, path: str, body: dict[str, Any]) -> tuple[bytes, bool]:
        """The answer's body, and whether it is an event stream."""
        if path == "/generate":
            return self._generated(body)
        if path == "/v1/chat/completions":
            return self._chat(body)
        if path == "/update_weights_from_disk":
            self.version = body["weight_version"]
        if path == "/model_info":
            return orjson.dumps({"weight_version": self.version}), False
        if path == "/v1/models":
            return orjson.dumps({"object": "list", "data": [{"id": "policy", "object": "model"}]}), False
        return orjson.dumps({"success": True, "message": "ok"}), False

    def _generated(self, body: dict[str, Any]) -> tuple[bytes, bool]:
        ids, finish = self._sampled(body["sampling_params"]["max_new_tokens"])
        if not body.get("stream"):
            return orjson.dumps(self._part(body, ids, finish)), False
        interval = body["sampling_params"].get("stream_interval", 1)
        parts = [self._part(body, ids[:count], None) for count in range(1, len(ids), interval)]
        return _events([*parts, self._part(body, ids, finish)]), True

    def _sampled(self, limit: int) -> tuple[list[int], dict[str, Any]]:
        ids = [*next(self._replies).ids, self.eos]
        if len(ids) > limit:
            return ids[:limit], {"type": "length", "length": limit}
        return ids, {"type": "stop", "matched": self.eos}

    def _part(self, body: dict[str, Any], ids: list[int], finish: dict[str, Any] | None) -> dict[str, Any]:
        meta = {
            "id": body.get("rid", ""),
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[LOGPROB, token, None] for token in ids],
        }
        if finish is not None:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": len(ids)}]
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _chat(self, body: dict[str, Any]) -> tuple[bytes, bool]:
        pieces = next(self._replies).pieces
        head = {"id": "chatcmpl-0", "created": 0, "model": body["model"]}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(pieces)}
            usage = {"prompt_tokens": 1, "completion_tokens": len(pieces) + 1, "total_tokens": len(pieces) + 2}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return orjson.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}), False
        deltas = [({"content": piece}, None) for piece in pieces]
        choices = [
            {"index": 0, "delta": delta, "finish_reason": finish}
            for delta, finish in [({"role": "assistant", "content": ""}, None), *deltas, ({}, "stop")]
        ]
        return _events([{**head, "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]), True


def _replies(tokenizer: Tokenizer, num_tokens: int) -> list[Reply]:
    """Sentences of exactly so many tokens, whose ids are the tokenizer's own."""
    words = [
        "the",
        "parcel",
        "of",
        "Mia",
        "waits",
        "in",
        "the",
        "depot",
        "Birch",
        "under",
        "code",
        "43",
        "and",
        "order",
        "65",
        "goes",
        "to",
        "Tara",
    ]
    replies = []
    for number in range(NUM_REPLIES):
        text = " ".join(words[(number + step * (number % 5 + 1)) % len(words)] for step in range(num_tokens))
        ids = tokenizer.encode(text).ids[:num_tokens]
        replies.append(Reply(ids, [tokenizer.decode([token]) for token in ids]))
    return replies


def _events(bodies: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % orjson.dumps(body) for body in bodies) + b"data: [DONE]\n\n"


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive and Content-Length, which is all that the proxies before it speak."""

    def __init__(self, answer: Callable[[str, dict[str, Any]], tuple[bytes, bool]], delay_s: float) -> None:
        self._answer = answer
        self._delay_s = delay_s
        self._buffer = b""
        self._transport: Any = None  # uvloop's is none of asyncio's classes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            lower = head.lower()
            _, _, length = lower.partition(b"content-length:")
            size = int(length.split(b"\r\n", 1)[0]) if length else 0
            if len(rest) < size:
                return
            self._buffer = rest[size:]
            path = head.split(b" ", 2)[1].decode()
            answer, stream = self._answer(path, orjson.loads(rest[:size] or b"{}"))
            kind = b"text/event-stream" if stream else b"application/json"
            reply = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(answer), answer)
            if self._delay_s and path in ("/generate", "/v1/chat/completions"):
                asyncio.get_running_loop().call_later(self._delay_s * random.uniform(0.5, 1.5), self._write, reply)
            else:
                self._write(reply)

    def _write(self, reply: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(reply)


async def main() -> None:
    """Listen on a free port until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="half of it to one and a half times it")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer, the stop token apart")
    args = parser.parse_args()
    upstream = Upstream(args.model, args.tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(upstream.answer, args.delay_ms / 1e3), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
