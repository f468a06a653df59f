"""The output of a forced tool call, read: under such a grammar a model writes one call's JSON, without any tag.

In the flow: where parse.py stands for other outputs. What is no call (cut by length) is served as its text, and flagged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlagent.router.conversation import Message, ToolCall
from rlagent.router.parse import Event, Text, mint_call_id, parse_tool_call
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
