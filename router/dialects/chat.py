"""OpenAI chat completions, the request: checked field by field and parsed into an Ask.

A known field that cannot be honoured is refused with the reason; an unknown or harmless one is recorded and has no
effect. Invariant: no field of a body reaches an engine unless it is named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
from rlagent.router.grammar import Grammar, forced_call, is_forced, json_answer
from rlagent.router.sampling import Asked

# OpenAI's own limit.
MAX_CHOICES: Final = 128
_ROLES: Final[dict[str, Role]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"
}  # fmt: skip
_SEEING: Final[tuple[Role, ...]] = ("user", "tool")
_REFUSED: Final = {
    "logit_bias": "it would change the distribution that is trained on; leave it out",
    "audio": "the policy is a text model; leave it out",
    "prediction": "predicted outputs are not supported; leave it out",
    "web_search_options": "the policy cannot search; give it a tool instead",
    "functions": "it is deprecated; use tools",
    "function_call": "it is deprecated; use tool_choice",
}


class Request(Body):
    """The fields that have an effect."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=10, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse(content: bytes, headers: Mapping[str, str]) -> Ask:
    """A request's body as an Ask. ApiError names the field and what to do."""
    body = read_body(Request, content)
    _check(body)
    tools = body.tools or []
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    return Ask(
        dialect="chat",
        model=body.model,
        conversation=Conversation(
            messages=tuple(_message(found, index) for index, found in enumerate(body.messages)),
            tools=tuple(tools),
            template_args=read_template_args(body.chat_template_kwargs),
        ),
        asked=Asked(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            max_tokens=min(limits, default=None),
            stop=read_stops(body.stop),
            other={name: value for name in OTHER_SAMPLING if (value := getattr(body, name)) is not None},
        ),
        grammar=_grammar(body),
        n=body.n or 1,
        tools=bool(tools) and body.tool_choice != "none",
        stream=bool(body.stream),
        include_usage=bool((body.stream_options or {}).get("include_usage")),
        logprobs=bool(body.logprobs),
        ignored=ignored(body),
        body_digest=digest(content),
        retry_count=read_retry_count(headers),
    )


def _check(body: Request) -> None:
    """Refuse what is known and cannot be honoured."""
    refuse(body, _REFUSED)
    if body.top_logprobs:
        raise invalid(
            "top_logprobs is not supported: only the sampled token's logprob is kept; use logprobs", "top_logprobs"
        )
    if body.modalities not in (None, ["text"]):
        raise invalid("modalities: the policy is a text model; use ['text']", "modalities")
    if body.parallel_tool_calls is False and not is_forced(body.tool_choice):
        raise invalid(
            "parallel_tool_calls = false cannot be enforced; say so in the prompt, or force one call",
            "parallel_tool_calls",
        )
    for index, tool in enumerate(body.tools or []):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise invalid(f"tools.{index} is not {{'type': 'function', 'function': {{'name': ...}}}}", "tools")


def _grammar(body: Request) -> Grammar | None:
    choice, form = body.tool_choice, body.response_format or {}
    if isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, dict):
            raise invalid("tool_choice is not {'type': 'function', 'function': {'name': ...}}", "tool_choice")
        return forced_call(body.tools or [], str(function.get("name")))
    if choice == "required":
        return forced_call(body.tools or [], None)
    if choice not in (None, "auto", "none"):
        raise invalid(f"tool_choice is {choice!r}; use 'auto', 'none', 'required' or a function", "tool_choice")
    match form.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return json_answer({"type": "object"}, "response_format")
        case "json_schema":
            named = form.get("json_schema")
            return json_answer(
                named.get("schema") if isinstance(named, dict) else None, "response_format.json_schema.schema"
            )
    raise invalid(
        f"response_format is of type {form.get('type')!r}; use 'text', 'json_object' or 'json_schema'",
        "response_format",
    )


def _message(found: Mapping[str, Any], index: int) -> Message:
    role, text = _ROLES.get(str(found.get("role"))), found.get("content")
    if role is not None and isinstance(text, str) and len(found) == 2:
        return Message(role=role, content=text)  # most messages are no more than that
    where = f"messages.{index}"
    if role is None:
        raise invalid(f"{where}.role is {found.get('role')!r}; use one of {', '.join(_ROLES)}", "messages")
    reasoning = found.get("reasoning_content") or found.get("reasoning") or ""
    name, call_id = found.get("name"), found.get("tool_call_id")
    for field, value in (("reasoning_content", reasoning), ("name", name or ""), ("tool_call_id", call_id or "")):
        if not isinstance(value, str):
            raise invalid(f"{where}.{field} is not a string", "messages")
    calls = found.get("tool_calls") or []
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls is not a list", "messages")
    content = _content(found.get("content"), where)
    if content.images and role not in _SEEING:
        raise invalid(f"{where}: an image stands in a message of role user or tool, not {role}", "messages")
    return Message(
        role=role,
        content=content.text,
        images=tuple(content.images),
        reasoning=reasoning,
        tool_calls=tuple(_tool_call(call, f"{where}.tool_calls.{number}") for number, call in enumerate(calls)),
        tool_call_id=call_id,
        name=name,
    )


def _content(found: Any, where: str) -> Content:
    """Text, or a list of parts: those of text follow one another without a separator, images stand between them."""
    content = Content()
    if found is None or isinstance(found, str):
        content.say(found or "")
        return content
    if not isinstance(found, list):
        raise invalid(f"{where}.content is neither text nor a list of parts", "messages")
    for number, part in enumerate(found):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "text" and isinstance(part.get("text"), str):
            content.say(part["text"])
        elif kind == "image_url":
            image = part.get("image_url")
            at = f"{where}.content.{number}.image_url"
            content.show_url(image.get("url") if isinstance(image, dict) else image, f"{at}.url")
        else:
            raise invalid(
                f"{where}.content has a part of type {kind!r}; the policy reads parts of type text and image_url",
                "messages",
            )
    return content


def _tool_call(found: Any, where: str) -> ToolCall:
    try:
        function = found["function"]
        arguments = function.get("arguments")
        call = ToolCall(call_id=found["id"], name=function["name"], arguments="" if arguments is None else arguments)
    except (KeyError, TypeError, AttributeError) as error:
        raise invalid(f"{where} is not {{'id', 'type', 'function': {{'name', 'arguments'}}}}", "messages") from error
    if not (isinstance(call.call_id, str) and isinstance(call.name, str) and isinstance(call.arguments, str)):
        raise invalid(f"{where}: id, name and arguments are strings (arguments is JSON text)", "messages")
    return call
