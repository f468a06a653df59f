"""OpenAI responses, the answer: a recorded call as a response, and as the numbered events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import orjson

from rlagent.router.conversation import ToolCall
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.dialect import Begun, Json
from rlagent.router.dialects.responses_tools import call_names, namespaces
from rlagent.router.dialects.served import events_of, num_reasoning, num_sampled, served, token_logprobs
from rlagent.router.errors import ApiError
from rlagent.router.parse import Event, Text
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Call

_Status = Literal["in_progress", "completed", "incomplete"]
_Kind = Literal["message", "reasoning"]
# What an open item's text is called, and its events.
_PARTS: Final[dict[_Kind, str]] = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def response(call: Call, ask: Ask, tokenizer: Tokenizer) -> Json:
    """A `response` object."""
    items = _Items(call.call_id, ask)
    (answered,) = served(call)
    for event in events_of(answered):
        items.take(event)
    items.close()
    return _finished(call, ask, tokenizer, items.done)


class _Items:
    """The output items of one response, as events complete them."""

    def __init__(self, call_id: str, ask: Ask) -> None:
        self._call_id = call_id
        self.namespaces = namespaces(ask.echo.get("tools", ()))
        self.kind: _Kind | None = None  # of the open item
        self.item_id = ""
        self.text = ""
        self.done: list[Json] = []

    def enter(self, kind: _Kind) -> None:
        """Open an item."""
        self.kind, self.item_id, self.text = kind, self.new_id(kind), ""

    def new_id(self, kind: str) -> str:
        """The next item's id: the same whenever this answer is told."""
        return f"{_PREFIXES[kind]}_{self._call_id.partition('_')[2]}_{len(self.done)}"

    def take(self, event: Event) -> None:
        """Add an event to the items."""
        if isinstance(event, ToolCall):
            self.close()
            self.done.append(self.function_call(event, self.new_id("function_call"), event.arguments, "completed"))
            return
        kind: _Kind = "message" if isinstance(event, Text) else "reasoning"
        if self.kind != kind:
            self.close()
            self.enter(kind)
        self.text += event.text

    def function_call(self, call: ToolCall, item_id: str, arguments: str, status: _Status) -> Json:
        """A call's item."""
        names = call_names(call, self.namespaces)
        return {
            "id": item_id, "type": "function_call", "status": status, "call_id": call.call_id, **names, "arguments": arguments
        }  # fmt: skip

    def close(self) -> None:
        """Complete the open item, if there is one."""
        if self.kind is not None:
            self.done.append(_item(self.kind, self.item_id, "completed", [_part(self.kind, self.text)]))
            self.kind = None


class EventWriter:
    """Server-sent events of one streamed response, in OpenAI's order."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self._number = 0
        self._items = _Items(begun.call_id, begun.ask)

    def opening(self) -> bytes:
        """response.created and response.in_progress."""
        begun = self._begun
        body = {"response": _body(begun.call_id, begun.started_at, begun.ask, "in_progress", [])}
        return self._event("response.created", body) + self._event("response.in_progress", body)

    def deltas(self, number: int, events: Sequence[Event]) -> bytes:
        """What was read; a response has one choice."""
        assert number == 0
        return b"".join(self._told(event) for event in events)

    def closing(self, call: Call) -> bytes:
        """The end of the open item, and response.completed (or .incomplete)."""
        ended = self._close()
        body = _finished(call, self._begun.ask, self._begun.tokenizer, self._items.done)
        return ended + self._event(f"response.{body['status']}", {"response": body})

    def failure(self, error: ApiError) -> bytes:
        """An error event: OpenAI's flat form, and the nested one that the SDK raises."""
        flat = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", {**flat, **error.body})

    def _told(self, event: Event) -> bytes:
        if isinstance(event, ToolCall):
            return self._close() + self._call(event)
        kind: _Kind = "message" if isinstance(event, Text) else "reasoning"
        entered = b"" if self._items.kind == kind else self._close() + self._enter(kind)
        self._items.take(event)
        return entered + self._of_text(kind, "delta", {"delta": event.text})

    def _enter(self, kind: _Kind) -> bytes:
        self._items.enter(kind)
        added = self._of_item("added", _item(kind, self._items.item_id, "in_progress", []))
        return added + self._of_part("response.content_part.added", {"part": _part(kind, "")})

    def _close(self) -> bytes:
        kind, text = self._items.kind, self._items.text
        if kind is None:
            return b""
        pieces = [self._of_text(kind, "done", {"text": text})]
        pieces.append(self._of_part("response.content_part.done", {"part": _part(kind, text)}))
        index = len(self._items.done)
        self._items.close()
        pieces.append(self._of_item("done", self._items.done[index], index))
        return b"".join(pieces)

    def _call(self, call: ToolCall) -> bytes:
        index, item_id = len(self._items.done), self._items.new_id("function_call")
        where = {"item_id": item_id, "output_index": index}
        pieces = [self._of_item("added", self._items.function_call(call, item_id, "", "in_progress"))]
        pieces.append(self._event("response.function_call_arguments.delta", {**where, "delta": call.arguments}))
        done = {**where, "name": call_names(call, self._items.namespaces)["name"], "arguments": call.arguments}
        pieces.append(self._event("response.function_call_arguments.done", done))
        self._items.take(call)
        return b"".join(pieces) + self._of_item("done", self._items.done[index], index)

    def _of_text(self, kind: _Kind, what: str, body: Json) -> bytes:
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        return self._of_part(f"response.{_PARTS[kind]}.{what}", body | logprobs)

    def _of_part(self, event: str, body: Json) -> bytes:
        where = {"item_id": self._items.item_id, "output_index": len(self._items.done), "content_index": 0}
        return self._event(event, where | body)

    def _of_item(self, what: str, item: Json, index: int | None = None) -> bytes:
        index = len(self._items.done) if index is None else index
        return self._event(f"response.output_item.{what}", {"output_index": index, "item": item})

    def _event(self, kind: str, body: Json) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **body})
        self._number += 1
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


def _finished(call: Call, ask: Ask, tokenizer: Tokenizer, items: list[Json]) -> Json:
    (choice,) = call.choices
    status: _Status = "incomplete" if choice.finish_reason == "length" else "completed"
    if ask.logprobs:
        text = next((item["content"][0] for item in items if item["type"] == "message"), None)
        if text is not None:
            text["logprobs"] = token_logprobs(choice, tokenizer)
    sampled = num_sampled(call)
    usage = {
        "input_tokens": call.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": num_reasoning(call, tokenizer)},
        "total_tokens": call.num_prompt_tokens + sampled,
    }
    body = _body(call.call_id, call.started_at, ask, status, items) | {"usage": usage}
    if status == "incomplete":
        return body | {"incomplete_details": {"reason": "max_output_tokens"}}
    return body | {"completed_at": int(call.finished_at)}


def _body(call_id: str, started_at: float, ask: Ask, status: _Status, items: list[Json]) -> Json:
    return {
        "id": call_id,
        "object": "response",
        "created_at": int(started_at),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": ask.model,
        "output": items,
        "usage": None,
        **ask.echo,
    }


def _item(kind: _Kind, item_id: str, status: _Status, content: list[Json]) -> Json:
    more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
    return {"id": item_id, "type": kind, "status": status, **more, "content": content}


def _part(kind: _Kind, text: str) -> Json:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **more}
