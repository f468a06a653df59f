"""Outputs in which no tag is looked for: a forced tool call, and the completion of a raw prompt.

In the flow: where parse.py stands for other outputs. A forced call is one call's JSON; what is no call (cut by length) is
served as its text, and flagged. The completion of a raw prompt is text, whatever stands in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlagent.router.conversation import Message, ToolCall
from rlagent.router.parse import Event, Text, mint_call_id
from rlagent.router.tool_calls import parse_tool_call
from rlagent.types import ParseStatus


@dataclass(slots=True, kw_only=True)
class ForcedCallParser:
    """Feed it text, then `finish`: nothing can be told before the end."""

    mint: Callable[[], str] = mint_call_id
    status: ParseStatus = "text"
    message: Message = field(default_factory=lambda: Message(role="assistant"))
    _text: str = ""

    def feed(self, text: str) -> list[Event]:
        """Keep the text."""
        self._text += text
        return []

    def finish(self) -> list[Event]:
        """The call, or what was written instead."""
        found = parse_tool_call(self._text)
        if found is None:
            self.status = "malformed"
            self.message = Message(role="assistant", content=self._text)
            return [Text(self._text)] if self._text else []
        call = ToolCall(call_id=self.mint(), name=found[0], arguments=found[1])
        self.status = "tool_calls"
        self.message = Message(role="assistant", tool_calls=(call,))
        return [call]


@dataclass(slots=True, kw_only=True)
class TextParser:
    """Feed it text: all of it is content."""

    status: ParseStatus = "text"
    _texts: list[str] = field(default_factory=list)

    @property
    def message(self) -> Message:
        """All that was read so far."""
        return Message(role="assistant", content="".join(self._texts))

    def feed(self, text: str) -> list[Event]:
        """The text."""
        if not text:
            return []
        self._texts.append(text)
        return [Text(text)]

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []
