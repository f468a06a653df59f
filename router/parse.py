"""What a model wrote, read as reasoning, text and tool calls in the form of its family, while it arrives.

In the flow: after generation, before the answer; families.py says by which markers, tool_calls.py reads between them. One
parser serves streamed and whole answers, so that both say the same. Whitespace beside a well-formed tool call is dropped;
a malformed one is served as the text it is, and flagged. Invariant: parsing never touches the recorded ids.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlagent.router.conversation import Message, ToolCall
from rlagent.router.families import HERMES, OutputForm
from rlagent.router.tool_calls import Tools
from rlagent.types import ParseStatus


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
class Reading(ABC):
    """What every family's parser is: fed text, it tells events, and at the end the message. A family reads one `_step` at a time."""

    mint: Callable[[], str] = mint_call_id
    status: ParseStatus = "text"
    _buffer: str = ""
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[ToolCall] = field(default_factory=list)

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

    @abstractmethod
    def _step(self, events: list[Event], *, last: bool) -> bool:
        """Read as far as one state goes; whether there is more to do."""


@dataclass(slots=True, kw_only=True)
class OutputParser(Reading):
    """Feed it text, then `finish`. `tools`: whether tool calls are read; `thinking`: the prompt opened a think block.

    `schemas` are the tools' JSON: some families write arguments whose types only the schema tells.
    """

    tools: bool
    thinking: bool = False
    form: OutputForm = HERMES
    schemas: Tools = ()
    _state: Literal["start", "reasoning", "lead", "content", "call"] = "start"
    _skip: str = ""  # characters to drop before the next text
    _held: str = ""  # whitespace and marker before an open tool call

    def __post_init__(self) -> None:
        if self.thinking:
            self._enter_reasoning()

    def _step(self, events: list[Event], *, last: bool) -> bool:
        """Read as far as one state goes; whether there is more to do."""
        step = {
            "start": self._start, "reasoning": self._reason, "lead": self._lead, "content": self._read,
            "call": self._call,
        }[self._state]  # fmt: skip
        return step(events, last)

    def _start(self, _events: list[Event], last: bool) -> bool:
        seen = self._buffer.lstrip()
        think = self.form.think[0]
        if seen.startswith(think):
            self._buffer = seen.removeprefix(think)
            self._enter_reasoning()
            return True
        if think.startswith(seen) and not last:
            return False
        self._state = "lead"
        return True

    def _enter_reasoning(self) -> None:
        self._state, self._skip = "reasoning", "\n"

    def _reason(self, events: list[Event], last: bool) -> bool:
        end_think = self.form.think[1]
        text, end, rest = self._buffer.partition(end_think)
        if end:
            self._think(text.rstrip("\n"), events)
            self._buffer, self._state, self._skip = rest, "lead", "\n"
            return True
        ready = len(text) if last else safe_length(text, end_think)
        self._think(text[:ready], events)
        self._buffer = text[ready:]
        return False

    def _lead(self, _events: list[Event], last: bool) -> bool:
        """The answer's first characters: is it a call without a marker?"""
        seen = "".join(self._buffer.split())
        for bare in self.form.bare if self.tools else ():
            if seen.startswith(bare):
                self._state, self._held = "call", ""
                return True
            if bare.startswith(seen) and not last:
                return False
        self._state = "content"
        return True

    def _read(self, events: list[Event], last: bool) -> bool:
        opens = self.form.opens
        if not self.tools or not opens:
            self._say(self._buffer, events)
            self._buffer = ""
            return False
        text, tag, rest = self._buffer.partition(opens)
        if tag:
            spoken = text.rstrip()
            self._say(spoken, events)
            self._held = text[len(spoken) :] + tag
            self._buffer, self._state = rest, "call"
            return True
        ready = len(text) if last else safe_length(text, opens)
        self._say(text[:ready], events)
        self._buffer = text[ready:]
        return False

    def _call(self, events: list[Event], last: bool) -> bool:
        closes = self.form.closes
        text, end, rest = self._buffer.partition(closes) if closes else (self._buffer, "", "")
        if not end and not last:
            return False
        is_call = bool(self._held) or '"parameters"' in text or '"arguments"' in text  # else: an answer that is JSON
        found = self.form.read(text, self.schemas) if self.form.read and is_call and (end or not closes) else None
        if found is not None:
            for name, arguments, own_id in found:
                call = ToolCall(call_id=self.mint() + (f"_{own_id}" if own_id else ""), name=name, arguments=arguments)
                self._calls.append(call)
                events.append(call)
            self._skip = " \t\r\n"
            if self.status == "text":
                self.status = "tool_calls"
        else:
            if is_call:
                self.status = "malformed"
            self._say(f"{self._held}{text}{end}", events)
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


def safe_length(text: str, tag: str) -> int:
    """How much of the text can be told now: not the start of a tag, nor whitespace that a tag may follow."""
    end = len(text)
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            end -= length
            break
    return len(text[:end].rstrip())


def trim_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
