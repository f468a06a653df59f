"""How a chat template wants its messages: found by showing it a conversation with a tool call and seeing what it prints.

In the flow: learned once when a model is loaded; render.py gives every message in this form. Templates differ in whether
a call's arguments are an object or its JSON text, whether content beside calls is "" or none, how long a call's id may
be, and under which name they look for reasoning. Invariant: forms differ in representation only, never in what is said.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import orjson

from rlagent.router.chat_template import TemplateError
from rlagent.router.conversation import Message, ToolCall
from rlagent.router.json_body import text_too_deep

Plain = dict[str, Any]
Guard = Callable[[Any], Any]
Render = Callable[[Sequence[Plain]], str]

# Mistral's templates take ids of nine letters and digits only.
_SHORT_ID: Final = 9
# An id that was minted for a call to which the model gave one itself (parse.py): the template gets the model's.
_OWN_ID: Final = re.compile("call_[0-9a-f]{24}_([0-9A-Za-z]{9})")
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_NAME, _KEY, _VALUE, _THOUGHT = "probe_name", "probe_key", "probe_value", "probe_thought"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """The representation that a template takes. `shows_calls`, `shows_reasoning`: whether it printed them at all."""

    arguments_as_text: bool = False
    null_content: bool = False
    short_ids: bool = False
    reasoning_key: str = "reasoning_content"
    shows_calls: bool = True
    shows_reasoning: bool = True

    def plain(self, message: Message, guard: Guard) -> Plain:
        """A message as the template takes it; `guard` keeps an agent's text from becoming special tokens."""
        empty = self.null_content and message.tool_calls and not message.content
        body: Plain = {"role": message.role, "content": None if empty else guard(message.content)}
        if message.images:
            body["content"] = [
                {"type": "text", "text": guard(part)} if isinstance(part, str) else {"type": "image"}
                for part in message.parts
            ]
        if message.reasoning:
            body[self.reasoning_key] = guard(message.reasoning)
        if message.tool_calls:
            body["tool_calls"] = [
                {
                    "id": guard(self._id(call.call_id)),
                    "type": "function",
                    "function": {"name": guard(call.name), "arguments": guard(self._arguments(call.arguments))},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            body["tool_call_id"] = guard(self._id(message.tool_call_id))
        if message.name is not None:
            body["name"] = guard(message.name)
        return body

    def _id(self, call_id: str) -> str:
        own = _OWN_ID.fullmatch(call_id) if self.short_ids else None
        if own is not None:
            return own[1]
        short = self.short_ids and not (len(call_id) == _SHORT_ID and call_id.isalnum())
        return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_SHORT_ID] if short else call_id

    def _arguments(self, text: str) -> Mapping[str, Any] | str:
        """Objects, as transformers asks for; what is no object stays the text that the model wrote."""
        if self.arguments_as_text or text_too_deep(text):
            return text
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
        return found if isinstance(found, dict) else text


def learn(render: Render) -> MessageForm:
    """The first form in which the template prints a tool call and its arguments; the usual one where none does."""
    found = MessageForm(shows_calls=False)
    for text, null, short in product((False, True), repeat=3):
        form = MessageForm(arguments_as_text=text, null_content=null, short_ids=short)
        printed = _shown(render, form, reasoning="")
        escaped = '{\\"' in printed  # an object's text, quoted once more: the template takes objects
        if _NAME in printed and _KEY in printed and _VALUE in printed and not escaped:
            found = form
            break
    return _with_reasoning(render, found)


def _with_reasoning(render: Render, form: MessageForm) -> MessageForm:
    for key in _REASONING:
        named = replace(form, reasoning_key=key)
        if _THOUGHT in _shown(render, named, reasoning=_THOUGHT):
            return named
    return replace(form, shows_reasoning=False)


def _shown(render: Render, form: MessageForm, *, reasoning: str) -> str:
    call = ToolCall(call_id="call_0123456789", name=_NAME, arguments=f'{{"{_KEY}": "{_VALUE}"}}')
    calling = Message(role="assistant", reasoning=reasoning, tool_calls=(call,) if form.shows_calls else ())
    said = [Message(role="user", content="a"), calling]
    if form.shows_calls:
        said.append(Message(role="tool", content="b", tool_call_id=call.call_id))
    try:
        return render([form.plain(message, lambda value: value) for message in said])
    except TemplateError:
        return ""
