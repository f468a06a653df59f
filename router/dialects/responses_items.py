"""The items of a response's input as messages: what an assistant said, thought and called without a break is one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rlagent.router.conversation import Message, Role, ToolCall
from rlagent.router.dialects.content import Content
from rlagent.router.dialects.responses_tools import joined_name
from rlagent.router.errors import ApiError, invalid

_ROLES: Final[dict[str, Role]] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS: Final = ("input_text", "output_text", "text")


@dataclass(slots=True)
class _Turn:
    """An assistant's message as its items come."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def end(self) -> list[Message]:
        """The message, if any item came; the next one begins empty."""
        if not (self.texts or self.thoughts or self.calls):
            return []
        content, reasoning, calls = "".join(self.texts), "".join(self.thoughts), tuple(self.calls)
        self.texts, self.thoughts, self.calls = [], [], []
        return [Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)]


def read_items(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages, in their order. ApiError names the item."""
    messages: list[Message] = []
    turn = _Turn()
    for index, item in enumerate(items):
        where = f"input.{index}"
        kind = item.get("type") or "message"
        match kind:
            case "message":
                role = _ROLES.get(str(item.get("role")))
                if role is None:
                    raise invalid(f"{where}.role is {item.get('role')!r}; use one of {', '.join(_ROLES)}", "input")
                content = _content(item.get("content"), f"{where}.content")
                if content.images and role != "user":
                    raise invalid(f"{where}: an image stands in a message of role user, not {role}", "input")
                if role == "assistant":
                    turn.texts.append(content.text)
                else:
                    message = Message(role=role, content=content.text, images=tuple(content.images))
                    messages += [*turn.end(), message]
            case "reasoning":
                if turn.texts or turn.calls:
                    messages += turn.end()
                turn.thoughts.append(_thought(item, where))
            case "function_call":
                turn.calls.append(_call(item, where))
            case "function_call_output":
                messages += [*turn.end(), _output(item, where)]
            case "item_reference":
                raise invalid(
                    f"{where} is an item_reference: send the item itself, or use previous_response_id", "input"
                )
            case _:
                raise _unread(kind, where)
    return messages + turn.end()


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    call_id, name, arguments = (_string(item, field, where) for field in ("call_id", "name", "arguments"))
    return ToolCall(call_id=call_id, name=joined_name(name, item.get("namespace")), arguments=arguments)


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The reasoning itself; a summary is not what was sampled."""
    content = item.get("content") or []
    if not isinstance(content, list):
        raise invalid(f"{where}.content is not a list", "input")
    return "".join(_string(part, "text", where) for part in content if isinstance(part, dict))


def _output(item: Mapping[str, Any], where: str) -> Message:
    call_id, content = _string(item, "call_id", where), _content(item.get("output"), f"{where}.output")
    return Message(role="tool", content=content.text, images=tuple(content.images), tool_call_id=call_id)


def _content(found: Any, where: str) -> Content:
    """Text, or parts: those of text follow one another without a separator, images stand between them."""
    content = Content()
    if found is None or isinstance(found, str):
        content.say(found or "")
        return content
    if not isinstance(found, list):
        raise invalid(f"{where} is neither text nor a list of parts", "input")
    for number, part in enumerate(found):
        at = f"{where}.{number}"
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in _TEXT_PARTS:
            content.say(_string(part, "text", at))
        elif kind == "input_image":
            content.show_url(part.get("image_url"), f"{at}.image_url")
        else:
            raise _unread(kind, at)
    return content


def _string(found: Mapping[str, Any], name: str, where: str) -> str:
    value = found.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name} is not a string", "input")
    return value


def _unread(kind: object, where: str) -> ApiError:
    return invalid(
        f"{where} is of type {kind!r}: the policy reads text and images, and has function tools; leave it out", "input"
    )
