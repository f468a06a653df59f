"""OpenAI chat completions, the answer: a recorded call as one object, or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from rlagent.router.conversation import Message, ToolCall
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.dialect import Begun, Json
from rlagent.router.dialects.served import num_reasoning, num_sampled, served, token_logprobs
from rlagent.router.errors import ApiError
from rlagent.router.parse import Event, Text, Thought
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Call, Choice

DONE: Final = b"data: [DONE]\n\n"


def completion(call: Call, ask: Ask, tokenizer: Tokenizer) -> Json:
    """A `chat.completion` object."""
    return {
        "id": call.call_id,
        "object": "chat.completion",
        "created": int(call.started_at),
        "model": call.model,
        "choices": [
            {
                "index": number,
                "message": _message(message),
                "logprobs": _logprobs(choice, tokenizer) if ask.logprobs else None,
                "finish_reason": _finish_reason(choice, message),
            }
            for number, (choice, message) in enumerate(zip(call.choices, served(call), strict=True))
        ],
        "usage": usage(call, tokenizer),
    }


def usage(call: Call, tokenizer: Tokenizer) -> Json:
    """Token counts. Completion tokens are those sampled, stop token included."""
    sampled = num_sampled(call)
    return {
        "prompt_tokens": call.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": call.num_prompt_tokens + sampled,
        "completion_tokens_details": {"reasoning_tokens": num_reasoning(call, tokenizer)},
    }


class ChunkWriter:
    """Server-sent events of one streamed answer. The order: opening, deltas, closing, DONE."""

    def __init__(self, begun: Begun) -> None:
        self._ask = begun.ask
        self._tokenizer = begun.tokenizer
        self._head: Json = {
            "id": begun.call_id,
            "object": "chat.completion.chunk",
            "created": int(begun.started_at),
            "model": begun.ask.model,
        }
        self._num_calls: dict[int, int] = {}

    def opening(self) -> bytes:
        """The first chunk of each choice: its role."""
        return b"".join(self._chunk(number, {"role": "assistant", "content": ""}) for number in range(self._ask.n))

    def deltas(self, number: int, events: Sequence[Event]) -> bytes:
        """What was read of a choice."""
        return b"".join(self._chunk(number, self._delta(number, event)) for event in events)

    def closing(self, call: Call) -> bytes:
        """The last chunk of each choice, the usage if it was asked for, and the end."""
        chunks = [
            self._chunk(
                number,
                {},
                finish_reason=_finish_reason(choice, message),
                logprobs=_logprobs(choice, self._tokenizer) if self._ask.logprobs else None,
            )
            for number, (choice, message) in enumerate(zip(call.choices, served(call), strict=True))
        ]
        if self._ask.include_usage:
            chunks.append(self._event({"choices": [], "usage": usage(call, self._tokenizer)}))
        return b"".join(chunks) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error as the SDK reads it from a stream."""
        return b"data: " + orjson.dumps(error.body) + b"\n\n"

    def _delta(self, number: int, event: Event) -> Json:
        match event:
            case Text(text):
                return {"content": text}
            case Thought(text):
                return {"reasoning_content": text}
            case ToolCall():
                index = self._num_calls.get(number, 0)
                self._num_calls[number] = index + 1
                return {"tool_calls": [{"index": index, **_tool_call(event)}]}

    def _chunk(
        self, number: int, delta: Json, *, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._event({"choices": [choice]} | ({"usage": None} if self._ask.include_usage else {}))

    def _event(self, body: Json) -> bytes:
        return b"data: " + orjson.dumps({**self._head, **body}) + b"\n\n"


def _message(message: Message) -> Json:
    body: Json = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return body


def _tool_call(call: ToolCall) -> Json:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(choice: Choice, message: Message) -> str:
    if choice.finish_reason == "length":
        return "length"
    return "tool_calls" if message.tool_calls else "stop"


def _logprobs(choice: Choice, tokenizer: Tokenizer) -> Json:
    return {"content": token_logprobs(choice, tokenizer), "refusal": None}
