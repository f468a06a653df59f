"""The router's own model of a conversation: what every dialect is parsed into, and what history is matched by.

In the flow: dialect -> Conversation -> forest (matching) and render (text). Invariant: `match_key` is equal exactly for
messages that say the same: a representation may differ (null, "" and [] contents, order of argument keys, JSON
whitespace), a character of text, a duplicate key or the spelling of a number may not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from rlagent.router.images import Image

Role = Literal["system", "user", "assistant", "tool"]
_DIGEST_CHARS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of one tool. `arguments` is the JSON text as it was sampled or sent."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. Empty content is "", whatever the client wrote for it. `images` stand within its text, in order."""

    role: Role
    content: str = ""
    images: tuple[Image, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The OpenAI form, as recorded; `from_json` is the inverse."""
        body: dict[str, Any] = {"role": self.role, "content": self.content or None}
        if self.images:
            body["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else part.to_json() for part in self.parts
            ]
        if self.reasoning:
            body["reasoning_content"] = self.reasoning
        if self.tool_calls:
            body["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            body["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            body["name"] = self.name
        return body

    @property
    def parts(self) -> list[str | Image]:
        """Text and images in their order."""
        parts: list[str | Image] = []
        start = 0
        for image in self.images:
            parts += [text, image] if (text := self.content[start : image.at]) else [image]
            start = image.at
        return [*parts, rest] if (rest := self.content[start:]) else parts

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Message:
        """A message as it was recorded; the bytes of its images are not part of it."""
        content = body.get("content") or ""
        images: list[Image] = []
        if isinstance(content, list):
            text = ""
            for part in content:
                if part["type"] == "text":
                    text += part["text"]
                else:
                    images.append(Image.from_json(part, len(text)))
            content = text
        return cls(
            role=body["role"],
            content=content,
            images=tuple(images),
            reasoning=body.get("reasoning_content") or "",
            tool_calls=tuple(
                ToolCall(call_id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
                for call in body.get("tool_calls", ())
            ),
            tool_call_id=body.get("tool_call_id"),
            name=body.get("name"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """A prompt that no template renders: `ids` where the client gave them, else `text`."""

    text: str = ""
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What an agent asks a completion of: messages, tools in their JSON form, arguments of the chat template.

    With a `prompt` there are no messages: it is completed as it stands.
    """

    messages: tuple[Message, ...]
    prompt: RawPrompt | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> tuple[Image, ...]:
        """All images, in order."""
        return tuple(image for message in self.messages for image in message.images)


@dataclass(frozen=True, slots=True)
class Root:
    """What a tree of calls has in common; a change of any of it starts a new tree."""

    model: str
    tools: str
    template: str

    def change(self, other: Root) -> str:
        """Why a conversation under `other` cannot extend one under this root; "" when it can."""
        if self.tools != other.tools:
            return "tools_changed"
        if self.template != other.template:
            return "template_changed"
        return "" if self.model == other.model else "model_changed"


def root_of(model: str, conversation: Conversation, renderer: str) -> Root:
    """The root of a conversation. `renderer` is the digest of tokenizer and template."""
    if conversation.prompt is not None:
        return Root(model, "raw_prompt", renderer)
    tools = orjson.dumps([dict(tool) for tool in conversation.tools])
    args = orjson.dumps(dict(conversation.template_args), option=orjson.OPT_SORT_KEYS)
    return Root(model, digest(tools), digest(renderer.encode(), args))


def digest(*pieces: bytes) -> str:
    """A short hash of byte strings, each delimited by its length."""
    state = hashlib.sha256()  # processors have instructions for it
    for piece in pieces:
        state.update(len(piece).to_bytes(8, "little"))
        state.update(piece)
    return state.hexdigest()[:_DIGEST_CHARS]


def history_digests(messages: Sequence[Message], *, after: str = "") -> list[str]:
    """For each message, the digest of the history up to and including it. `after` is that of what came before."""
    found: list[str] = []
    last = after
    for message in messages:
        last = digest(last.encode(), match_key(message))
        found.append(last)
    return found


def match_key(message: Message) -> bytes:
    """Equal for messages that say the same. Ids and reasoning are left out: the forest decides about them."""
    said: list[Any] = [message.role, message.name, len(message.content)]
    if message.images:
        said.append([(image.at, image.digest) for image in message.images])
    if message.tool_calls:
        calls = [(call.name, canonical_arguments(call.arguments)) for call in message.tool_calls]
        head = json.dumps([*said, calls]).encode()
    else:
        head = orjson.dumps(said)
    return head + message.content.encode(errors="surrogatepass")


def canonical_arguments(text: str) -> str:
    """Tool arguments with their keys sorted and their JSON whitespace removed; numbers keep their spelling.

    What is not a JSON document without duplicate keys stands for itself.

    >>> canonical_arguments('{"b": 1.0, "a": "x"}')
    '{"a":"x","b":1.0}'
    """
    try:
        return _written(_decoder.decode(text))
    except (ValueError, RecursionError):
        return f"={text}"


class _Number(str):
    """A JSON number as it was spelled."""

    __slots__ = ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _written(value: Any) -> str:
    if isinstance(value, _Number):
        return value[:]
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_written(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_Number, parse_int=_Number, parse_constant=_Number)
