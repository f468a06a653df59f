"""Anthropic messages, the answer: a recorded call as a message, as the events of a stream, and errors in their shape."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final, Literal

import orjson

from rlagent.router.conversation import Message, ToolCall, digest
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.dialect import Begun, Json
from rlagent.router.dialects.served import num_reasoning, num_sampled, served
from rlagent.router.errors import ApiError
from rlagent.router.parse import Event, Text, Thought
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Call

_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def message(call: Call, ask: Ask, tokenizer: Tokenizer) -> Json:
    """A `message` object."""
    (answered,) = served(call)
    return _head(call.call_id, ask) | {
        "content": _content(answered),
        **_stop(call, answered),
        "usage": _usage(call.num_prompt_tokens, num_sampled(call), num_reasoning(call, tokenizer)),
    }


def error_body(error: ApiError) -> Json:
    """A refusal. Agents know 'prompt is too long', and compact their history."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = f"prompt is too long: {error.message}" if error.code == "context_length_exceeded" else error.message
    return {"type": "error", "error": {"type": kind, "message": text, "param": error.param, "code": error.code}}


class EventWriter:
    """Server-sent events of one streamed message: blocks one after the other, each opened and closed."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self._num_blocks = 0  # closed ones; the index of the open one
        self._open: Literal["text", "thinking"] | None = None
        self._thoughts: list[str] = []  # of the open block

    def opening(self) -> bytes:
        """message_start and a ping."""
        head = _head(self._begun.call_id, self._begun.ask)
        empty: Json = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._begun.prompt_len, 0, 0),
        }
        return _event("message_start", {"message": head | empty}) + _event("ping", {})

    def deltas(self, number: int, events: Sequence[Event]) -> bytes:
        """What was read; a message has one choice."""
        assert number == 0
        return b"".join(self._told(event) for event in events)

    def closing(self, call: Call) -> bytes:
        """The end of the open block, why the message ended, and its end."""
        (answered,) = served(call)
        usage = _usage(call.num_prompt_tokens, num_sampled(call), num_reasoning(call, self._begun.tokenizer))
        ended = _event("message_delta", {"delta": _stop(call, answered), "usage": usage})
        return self._close() + ended + _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        """An error event, which the SDK raises."""
        return _event("error", {"error": error_body(error)["error"]})

    def _told(self, event: Event) -> bytes:
        match event:
            case Text(text):
                return self._enter("text") + self._delta({"type": "text_delta", "text": text})
            case Thought(text):
                entered = self._enter("thinking")
                self._thoughts.append(text)
                return entered + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCall():
                start = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
                pieces = [self._close(), self._start(start)]
                pieces.append(self._delta({"type": "input_json_delta", "partial_json": _strict(event.arguments)}))
                return b"".join(pieces) + self._stop_block()

    def _enter(self, kind: Literal["text", "thinking"]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        empty: Json = (
            {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
        )
        return closed + self._start(empty)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signature = _signature("".join(self._thoughts))
            signed = self._delta({"type": "signature_delta", "signature": signature})
            self._thoughts.clear()
        self._open = None
        return signed + self._stop_block()

    def _start(self, block: Json) -> bytes:
        return _event("content_block_start", {"index": self._num_blocks, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks, "delta": delta})

    def _stop_block(self) -> bytes:
        stopped = _event("content_block_stop", {"index": self._num_blocks})
        self._num_blocks += 1
        return stopped


def _event(kind: str, body: Json) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **body}) + b"\n\n"


def _head(call_id: str, ask: Ask) -> Json:
    return {"id": call_id, "type": "message", "role": "assistant", "model": ask.model}


def _content(answered: Message) -> list[Json]:
    blocks: list[Json] = []
    if answered.reasoning:
        signature = _signature(answered.reasoning)
        blocks.append({"type": "thinking", "thinking": answered.reasoning, "signature": signature})
    if answered.content:
        blocks.append({"type": "text", "text": answered.content})
    for call in answered.tool_calls:
        given = orjson.Fragment(_strict(call.arguments))
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": given})
    return blocks


def _strict(arguments: str) -> str:
    """Arguments as they were sampled, so that they come back so; what only Python takes for JSON, as its nearest JSON."""
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        found = json.loads(arguments, parse_constant=lambda _: None, parse_float=_finite)
        return json.dumps(found, ensure_ascii=False).encode(errors="replace").decode()  # lone surrogates
    return arguments


def _finite(number: str) -> float | None:
    found = float(number)
    return found if math.isfinite(found) else None


def _signature(thinking: str) -> str:
    """Something to send back with a thinking block; the router knows its own by their text."""
    return digest(thinking.encode())


def _stop(call: Call, answered: Message) -> Json:
    (choice,) = call.choices
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answered.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(choice.matched_stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.matched_stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(prompt_len: int, num_output: int, num_thinking: int) -> Json:
    return {
        "input_tokens": prompt_len,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_output,
        "output_tokens_details": {"thinking_tokens": num_thinking},
    }
