"""OpenAI completions, the answer: a recorded call as one object, or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.chat_answer import DONE, usage
from rlagent.router.dialects.dialect import Begun, Json
from rlagent.router.dialects.served import served, token_logprobs
from rlagent.router.errors import ApiError
from rlagent.router.parse import Event, Text
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Call, Choice


def completion(call: Call, ask: Ask, tokenizer: Tokenizer) -> Json:
    """A `text_completion` object."""
    return {
        **_head(call.call_id, call.started_at, ask),
        "choices": [
            _choice(
                number,
                message.content,
                logprobs=_logprobs(choice, tokenizer) if ask.logprobs else None,
                finish_reason=choice.finish_reason,
            )
            for number, (choice, message) in enumerate(zip(call.choices, served(call), strict=True))
        ],
        "usage": usage(call, tokenizer),
    }


class ChunkWriter:
    """Server-sent events of one streamed answer."""

    def __init__(self, begun: Begun) -> None:
        self._ask = begun.ask
        self._tokenizer = begun.tokenizer
        self._head = _head(begun.call_id, begun.started_at, begun.ask)

    def opening(self) -> bytes:
        """Nothing: a chunk is text."""
        return b""

    def deltas(self, number: int, events: Sequence[Event]) -> bytes:
        """What was read of a choice."""
        texts = [event.text for event in events if isinstance(event, Text)]
        return b"".join(self._chunk(_choice(number, text)) for text in texts)

    def closing(self, call: Call) -> bytes:
        """The last chunk of each choice, the usage if it was asked for, and the end."""
        chunks = [
            self._chunk(
                _choice(
                    number,
                    "",
                    logprobs=_logprobs(choice, self._tokenizer) if self._ask.logprobs else None,
                    finish_reason=choice.finish_reason,
                )
            )
            for number, choice in enumerate(call.choices)
        ]
        if self._ask.include_usage:
            chunks.append(self._event({"choices": [], "usage": usage(call, self._tokenizer)}))
        return b"".join(chunks) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error as the SDK reads it from a stream."""
        return b"data: " + orjson.dumps(error.body) + b"\n\n"

    def _chunk(self, choice: Json) -> bytes:
        return self._event({"choices": [choice]} | ({"usage": None} if self._ask.include_usage else {}))

    def _event(self, body: Json) -> bytes:
        return b"data: " + orjson.dumps({**self._head, **body}) + b"\n\n"


def _head(call_id: str, started_at: float, ask: Ask) -> Json:
    return {"id": call_id, "object": "text_completion", "created": int(started_at), "model": ask.model}


def _choice(number: int, text: str, *, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(choice: Choice, tokenizer: Tokenizer) -> Json:
    """In columns. `top_logprobs` holds the sampled token alone: the others' are not kept."""
    found = token_logprobs(choice, tokenizer)
    offsets: list[int] = []
    end = 0
    for entry in found:
        offsets.append(end)
        end += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in found],
        "token_logprobs": [entry["logprob"] for entry in found],
        "top_logprobs": [{entry["token"]: entry["logprob"]} for entry in found],
        "text_offset": offsets,
    }
