"""gpt-oss's harmony form, read: channels of reasoning, calls and answer, each with a header, while it arrives.

In the flow: where parse.py stands for other families, with the same promises. The prompt ends in `<|start|>assistant`;
the tokens `<|return|>` and `<|call|>` that end a turn are stop tokens and do not arrive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rlagent.router.conversation import ToolCall
from rlagent.router.parse import Event, Reading, Text, Thought, safe_length
from rlagent.router.tool_calls import object_call

_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_START: Final = "<|start|>assistant"
_TO: Final = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")


@dataclass(slots=True, kw_only=True)
class HarmonyParser(Reading):
    """Feed it text, then `finish`. `tools`: whether tool calls are read."""

    tools: bool
    _header: str | None = None  # of the message that is open

    def _step(self, events: list[Event], *, last: bool) -> bool:
        if self._header is None:
            return self._open(events, last=last)
        if self._recipient is not None:
            return self._call(events, last=last)
        return self._body(events, last=last)

    def _open(self, events: list[Event], *, last: bool) -> bool:
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if mark:
            self._header, self._buffer = header, rest
            return True
        if last:
            self._say(self._buffer, events)  # no message at all: text as it is
            self._buffer = ""
        return False

    @property
    def _recipient(self) -> str | None:
        found = _TO.search(self._header or "") if self.tools else None
        return None if found is None else found[1].removeprefix("functions.")

    def _body(self, events: list[Event], *, last: bool) -> bool:
        put = self._think if "<|channel|>analysis" in (self._header or "") else self._say
        at, mark = self._end()
        if mark:
            put(self._buffer[:at], events)
            self._buffer, self._header = self._buffer[at + len(mark) :], None
            return True
        ready = len(self._buffer) if last else min(safe_length(self._buffer, end) for end in _ENDS)
        put(self._buffer[:ready], events)
        self._buffer = self._buffer[ready:]
        return False

    def _call(self, events: list[Event], *, last: bool) -> bool:
        at, mark = self._end()
        if not mark and not last:
            return False
        body = self._buffer[:at]
        found = object_call(self._recipient or "", body)
        if found is not None:
            call = ToolCall(call_id=self.mint(), name=found[0][0], arguments=found[0][1])
            self._calls.append(call)
            events.append(call)
            if self.status == "text":
                self.status = "tool_calls"
        else:
            self.status = "malformed"
            header = (self._header or "").removeprefix(_START)
            self._say(f"{header}{_MESSAGE}{body}{mark}", events)
        self._buffer, self._header = self._buffer[at + len(mark) :], None
        return bool(mark)

    def _end(self) -> tuple[int, str]:
        found = [(at, end) for end in _ENDS if (at := self._buffer.find(end)) >= 0]
        return min(found, default=(len(self._buffer), ""))

    def _say(self, text: str, events: list[Event]) -> None:
        if text:
            self._content.append(text)
            events.append(Text(text))

    def _think(self, text: str, events: list[Event]) -> None:
        if text:
            self._reasoning.append(text)
            events.append(Thought(text))
