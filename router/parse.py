"""What a model wrote, read as reasoning, text and tool calls (the form of Hermes and Qwen), while it arrives.

In the flow: after generation, before the answer. One parser serves streamed and whole answers, so that both say the
same. Whitespace beside a well-formed tool call is dropped; a malformed one is served as the text it is, and flagged.
Invariant: parsing never touches the recorded ids.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from rlagent.router.conversation import Message, ToolCall
from rlagent.types import ParseStatus

_THINK: Final = "<think>"
_END_THINK: Final = "</think>"
_CALL: Final = "<tool_call>"
_END_CALL: Final = "</tool_call>"
_decoder: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of content."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


Event = Text | Thought | ToolCall


def mint_call_id() -> str:
    """A new tool call's id; it tells later which branch of the forest a history is of."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True, kw_only=True)
class OutputParser:
    """Feed it text, then `finish`. `tools`: whether tool calls are read; `thinking`: the prompt opened a think block."""

    tools: bool
    thinking: bool = False
    mint: Callable[[], str] = mint_call_id
    status: ParseStatus = "text"
    _state: Literal["start", "reasoning", "content", "call"] = "start"
    _buffer: str = ""
    _skip: str = ""  # characters to drop before the next text
    _held: str = ""  # whitespace before an open tool call
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[ToolCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.thinking:
            self._enter_reasoning()

    @property
    def message(self) -> Message:
        """All that was read so far, as the message that is served."""
        return Message(
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
        )

    def feed(self, text: str) -> list[Event]:
        """The events that this text completes."""
        self._buffer += text
        events: list[Event] = []
        while self._step(events, last=False):
            pass
        return events

    def finish(self) -> list[Event]:
        """The events that were held back."""
        events: list[Event] = []
        while self._step(events, last=True):
            pass
        return events

    def _step(self, events: list[Event], *, last: bool) -> bool:
        """Read as far as one state goes; whether there is more to do."""
        step = {
            "start": self._start, "reasoning": self._reason, "content": self._read, "call": self._call
        }[self._state]  # fmt: skip
        return step(events, last)

    def _start(self, _events: list[Event], last: bool) -> bool:
        seen = self._buffer.lstrip()
        if seen.startswith(_THINK):
            self._buffer = seen.removeprefix(_THINK)
            self._enter_reasoning()
            return True
        if _THINK.startswith(seen) and not last:
            return False
        self._state = "content"
        return True

    def _enter_reasoning(self) -> None:
        self._state, self._skip = "reasoning", "\n"

    def _reason(self, events: list[Event], last: bool) -> bool:
        text, end, rest = self._buffer.partition(_END_THINK)
        if end:
            self._think(text.rstrip("\n"), events)
            self._buffer, self._state, self._skip = rest, "content", "\n"
            return True
        ready = len(text) if last else _safe(text, _END_THINK)
        self._think(text[:ready], events)
        self._buffer = text[ready:]
        return False

    def _read(self, events: list[Event], last: bool) -> bool:
        if not self.tools:
            self._say(self._buffer, events)
            self._buffer = ""
            return False
        text, tag, rest = self._buffer.partition(_CALL)
        if tag:
            spoken = text.rstrip()
            self._say(spoken, events)
            self._held = text[len(spoken) :]
            self._buffer, self._state = rest, "call"
            return True
        ready = len(text) if last else _safe(text, _CALL)
        self._say(text[:ready], events)
        self._buffer = text[ready:]
        return False

    def _call(self, events: list[Event], last: bool) -> bool:
        text, end, rest = self._buffer.partition(_END_CALL)
        if not end and not last:
            return False
        found = parse_tool_call(text) if end else None
        if found is not None:
            call = ToolCall(call_id=self.mint(), name=found[0], arguments=found[1])
            self._calls.append(call)
            events.append(call)
            self._skip = " \t\r\n"
            if self.status == "text":
                self.status = "tool_calls"
        else:
            self.status = "malformed"
            self._say(f"{self._held}{_CALL}{text}{end}", events)
        self._buffer, self._state = rest, "content"
        return True

    def _say(self, text: str, events: list[Event]) -> None:
        self._emit(text, self._content, Text, events)

    def _think(self, text: str, events: list[Event]) -> None:
        self._emit(text, self._reasoning, Thought, events)

    def _emit(self, text: str, into: list[str], kind: type[Text] | type[Thought], events: list[Event]) -> None:
        text = text.lstrip(self._skip) if self._skip else text
        if text:
            self._skip = ""
            into.append(text)
            events.append(kind(text))


def _safe(text: str, tag: str) -> int:
    """How much of the text can be told now: not the start of a tag, nor whitespace that a tag may follow."""
    end = len(text)
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            end -= length
            break
    return len(text[:end].rstrip())


def parse_tool_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (their text as it was written) of {"name": ..., "arguments": {...}}; None if it is not that."""
    members = _members(text.strip())
    if members is None or "name" not in members:
        return None
    name = json.loads(members["name"])
    arguments = members.get("arguments", members.get("parameters", "{}"))
    if not isinstance(name, str) or not name or not arguments.startswith("{"):
        return None
    return name, arguments


def _members(text: str) -> dict[str, str] | None:
    """The members of a JSON object, each value's text as it stands; None for anything else, or a name given twice."""
    found: dict[str, str] = {}
    if not text.startswith("{"):
        return None
    at = _skip_space(text, 1)
    try:
        while True:
            name, at = _decoder.raw_decode(text, at)
            at = _skip_space(text, at)
            if not isinstance(name, str) or name in found or text[at] != ":":
                return None
            start = _skip_space(text, at + 1)
            _, end = _decoder.raw_decode(text, start)
            found[name] = text[start:end]
            at = _skip_space(text, end)
            if text[at] == "}":
                return found if at + 1 == len(text) else None
            if text[at] != ",":
                return None
            at = _skip_space(text, at + 1)
    except (ValueError, IndexError, RecursionError):
        return None


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def trim_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
