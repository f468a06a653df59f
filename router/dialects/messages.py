"""Anthropic messages, the request: system, blocks and tools parsed into an Ask.

A user's message may hold several tool results and text: each result becomes a tool's message, the text between them a
user's, in their order. An assistant's text, thinking and tool_use blocks are one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson
from pydantic import Field

from rlagent.router.conversation import Conversation, Message, Role, ToolCall, digest
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.body import (
    OTHER_SAMPLING,
    Body,
    ignored,
    read_body,
    read_retry_count,
    read_stops,
    read_template_args,
    refuse,
)
from rlagent.router.dialects.content import Content
from rlagent.router.errors import invalid
from rlagent.router.grammar import Grammar, forced_call, json_answer
from rlagent.router.sampling import Asked

_REFUSED: Final = {
    "mcp_servers": "the router calls no tools; let the agent call them",
    "container": "there is no code execution here; give the policy a tool instead",
    "prefill": "an answer cannot be begun for the policy; leave it out",
}
# Beginnings of their types, which are dated.
_VENDOR_RUN: Final = ("web_search_", "web_fetch_", "code_execution_", "tool_search_")


class Prompt(Body):
    """What count_tokens reads of a request."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Request(Prompt):
    """The fields that have an effect."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=10, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None


def parse(content: bytes, headers: Mapping[str, str]) -> Ask:
    """A request's body as an Ask. ApiError names the field and what to do."""
    body = read_body(Request, content)
    conversation = _conversation(body)
    choice = (body.tool_choice or {}).get("type", "auto")
    without_effect = {
        "output_config": {name: value for name, value in (body.output_config or {}).items() if name != "format"},
        "tools": [tool for tool in body.tools or [] if _is_vendor_run(tool)],
    }
    return Ask(
        dialect="messages",
        id_prefix="msg_",
        model=body.model,
        conversation=conversation,
        asked=Asked(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            max_tokens=body.max_tokens,
            stop=read_stops(body.stop_sequences, "stop_sequences"),
            other={name: value for name in OTHER_SAMPLING if (value := getattr(body, name)) is not None},
        ),
        grammar=_grammar(body, conversation),
        tools=bool(conversation.tools) and choice != "none",
        stream=bool(body.stream),
        ignored=ignored(body) | {name: value for name, value in without_effect.items() if value},
        body_digest=digest(content),
        retry_count=read_retry_count(headers),
    )


def parse_prompt(content: bytes) -> Ask:
    """The body of count_tokens: a request without its limits."""
    body = read_body(Prompt, content)
    return Ask(dialect="messages", model=body.model, conversation=_conversation(body), asked=Asked())


def _conversation(body: Prompt) -> Conversation:
    refuse(body, _REFUSED)
    system = [Message(role="system", content=_text(body.system, "system"))] if body.system else []
    found = [message for index, sent in enumerate(body.messages) for message in _messages(sent, f"messages.{index}")]
    if found and found[-1].role == "assistant":
        raise invalid(
            "messages end with the assistant: an answer cannot be begun for the policy; end with a user's message",
            "messages",
        )
    return Conversation(
        messages=(*system, *found),
        tools=tuple(_tool(tool, index) for index, tool in enumerate(body.tools or []) if not _is_vendor_run(tool)),
        template_args=read_template_args(body.chat_template_kwargs),
    )


def _grammar(body: Request, conversation: Conversation) -> Grammar | None:
    choice = body.tool_choice or {}
    kind = choice.get("type", "auto")
    if kind not in ("auto", "none", "any", "tool"):
        raise invalid(f"tool_choice.type is {kind!r}; use auto, any, tool or none", "tool_choice")
    if kind == "any":
        return forced_call(conversation.tools, None)
    if kind == "tool":
        return forced_call(conversation.tools, str(choice.get("name")))
    if choice.get("disable_parallel_tool_use"):
        raise invalid(
            "tool_choice.disable_parallel_tool_use cannot be enforced; say so in the prompt, or force one call",
            "tool_choice",
        )
    form = (body.output_config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise invalid("output_config.format is not {'type': 'json_schema', 'schema': {...}}", "output_config")
    return json_answer(form.get("schema"), "output_config.format.schema")


def _is_vendor_run(tool: Mapping[str, Any]) -> bool:
    """Whether the vendor would run it: such a tool is left out of the prompt, so that the policy never asks for it."""
    return str(tool.get("type")).startswith(_VENDOR_RUN)


def _tool(found: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """A tool in chat's form, which templates expect. `strict` is left out: without a grammar it says nothing."""
    kind, schema = found.get("type") or "custom", found.get("input_schema")
    if kind != "custom":
        raise invalid(f"tools.{index} is of type {kind!r}, which the router cannot run; use a custom tool", "tools")
    if not isinstance(found.get("name"), str) or not isinstance(schema, dict):
        raise invalid(f"tools.{index} is not {{'name', 'description', 'input_schema': {{...}}}}", "tools")
    function: dict[str, Any] = {"name": found["name"]}
    if found.get("description") is not None:
        function["description"] = found["description"]
    function["parameters"] = schema
    return {"type": "function", "function": function}


def _messages(found: Mapping[str, Any], where: str) -> list[Message]:
    role, content = found.get("role"), found.get("content")
    match role:
        case "assistant":
            return [_assistant(content, where)]
        case "user":
            return _user(content, where)
        case "system":
            return [Message(role="system", content=_text(content, f"{where}.content"))]
    raise invalid(f"{where}.role is {role!r}; use user or assistant", "messages")


def _user(content: Any, where: str) -> list[Message]:
    messages: list[Message] = []
    said = Content()
    for kind, block, at in _blocks(content, where):
        if kind == "tool_result":
            messages += [*_said("user", said), _tool_result(block, at)]
            said = Content()
        else:
            _say(said, kind, block, at)
    return [*messages, *_said("user", said)] or [Message(role="user")]


def _tool_result(block: Mapping[str, Any], where: str) -> Message:
    result, said = block.get("content"), Content()
    for kind, inner, at in _blocks(result or "", where):
        _say(said, kind, inner, at)
    call_id = _string(block, "tool_use_id", where)
    return Message(role="tool", content=said.text, images=tuple(said.images), tool_call_id=call_id)


def _said(role: Role, said: Content) -> list[Message]:
    return [Message(role=role, content=said.text, images=tuple(said.images))] if said else []


def _say(said: Content, kind: str, block: Mapping[str, Any], at: str) -> None:
    """A block of text, or an image."""
    match kind:
        case "text":
            said.say(_string(block, "text", at))
        case "image":
            source = block.get("source")
            if not isinstance(source, dict):
                raise invalid(f"{at}.source is not an object", "messages")
            if source.get("type") == "base64":
                said.show_base64(source.get("data"), f"{at}.source.data")
            else:
                said.show_url(source.get("url") or f"{source.get('type')}:", f"{at}.source.url")
        case _:
            raise _unread(kind, at)


def _assistant(content: Any, where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for kind, block, at in _blocks(content, where):
        match kind:
            case "text":
                texts.append(_string(block, "text", at))
            case "thinking":
                thoughts.append(_string(block, "thinking", at))
            case "tool_use":
                given = block.get("input")
                if not isinstance(given, dict):
                    raise invalid(f"{at}.input is not an object", "messages")
                name, call_id = _string(block, "name", at), _string(block, "id", at)
                calls.append(ToolCall(call_id=call_id, name=name, arguments=orjson.dumps(given).decode()))
            case _:
                raise _unread(kind, at)
    return Message(role="assistant", content="".join(texts), reasoning="".join(thoughts), tool_calls=tuple(calls))


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Each block's type, itself, and where it stands. Text alone is one text block."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise invalid(f"{where}.content is neither text nor a list of blocks", "messages")
    for number, block in enumerate(content):
        at = f"{where}.content.{number}"
        if not isinstance(block, dict):
            raise invalid(f"{at} is not a block", "messages")
        yield str(block.get("type")), block, at


def _text(found: Any, where: str) -> str:
    """Text, or text blocks, which follow one another without a separator."""
    if isinstance(found, str):
        return found
    field = where.partition(".")[0]
    if not isinstance(found, list):
        raise invalid(f"{where} is neither text nor a list of text blocks", field)
    texts: list[str] = []
    for number, block in enumerate(found):
        at = f"{where}.{number}"
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _unread(str(block.get("type")) if isinstance(block, dict) else type(block).__name__, at)
        texts.append(_string(block, "text", at))
    return "".join(texts)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name} is not a string", where.partition(".")[0])
    return value


def _unread(kind: str, where: str) -> Exception:
    reason = (
        "it was not made here; leave it out"
        if kind == "redacted_thinking"
        else "the policy reads text and images; leave it out"
    )
    return invalid(f"{where} is a block of type {kind!r}: {reason}", where.partition(".")[0])
