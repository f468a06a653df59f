"""OpenAI responses, the request: instructions, input and tools in their flat form parsed into an Ask.

With previous_response_id the history is what was recorded: the recorder puts it between the instructions (which are of
one request only) and the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from pydantic import Field

from rlagent.router.conversation import Conversation, Message, digest
from rlagent.router.dialects.ask import Ask
from rlagent.router.dialects.body import Body, ignored, read_body, read_retry_count, read_template_args, refuse
from rlagent.router.dialects.responses_items import read_items
from rlagent.router.dialects.responses_tools import read_tools
from rlagent.router.errors import invalid
from rlagent.router.grammar import Grammar, forced_call, is_forced, json_answer
from rlagent.router.sampling import Asked
from rlagent.types import Call

_REFUSED: Final = {
    "background": "answers are not kept for later; leave it out",
    "conversation": "the history is the agent's; send it as input, or use previous_response_id",
    "prompt": "there are no stored prompts; send instructions and input",
    "context_management": "the agent compacts its own history; leave it out",
    "moderation": "nothing is moderated; leave it out",
}
_LOGPROBS: Final = "message.output_text.logprobs"


class Request(Body):
    """The fields that have an effect."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=10, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse(content: bytes, headers: Mapping[str, str]) -> Ask:
    """A request's body as an Ask. ApiError names the field and what to do."""
    body = read_body(Request, content)
    _check(body)
    sent = [Message(role="user", content=body.input)] if isinstance(body.input, str) else read_items(body.input or [])
    lead = [Message(role="system", content=body.instructions)] if body.instructions else []
    tools, left_out = read_tools(body.tools or [])
    return Ask(
        dialect="responses",
        id_prefix="resp_",
        model=body.model,
        conversation=Conversation(
            messages=(*lead, *sent), tools=tools, template_args=read_template_args(body.chat_template_kwargs)
        ),
        previous=body.previous_response_id,
        num_lead=len(lead),
        asked=Asked(temperature=body.temperature, top_p=body.top_p, max_tokens=body.max_output_tokens),
        grammar=_grammar(body, tools),
        tools=bool(tools) and body.tool_choice != "none",
        stream=bool(body.stream),
        logprobs=_LOGPROBS in (body.include or []),
        echo=_echo(body),
        ignored=ignored(body) | ({"tools": left_out} if left_out else {}),
        body_digest=digest(content),
        retry_count=read_retry_count(headers),
    )


def asked_of(call: Call) -> Ask:
    """What is known of a recorded call's request: enough to write its answer again."""
    noted = orjson.loads(call.client)
    return Ask(
        dialect=call.dialect,
        model=call.model,
        conversation=Conversation(messages=()),
        asked=Asked(),
        logprobs=noted["logprobs"],
        echo=noted.get("echo", {}),
    )


def _check(body: Request) -> None:
    refuse(body, _REFUSED)
    if not body.input and body.previous_response_id is None:
        raise invalid("input is missing: give text or a list of items", "input")
    if body.truncation not in (None, "disabled"):
        raise invalid(
            "truncation = 'auto' is not supported: a recorded prompt is never cut; leave it out", "truncation"
        )
    if body.top_logprobs:
        raise invalid(
            f"top_logprobs is not supported: only the sampled token's logprob is kept; use include = ['{_LOGPROBS}']",
            "top_logprobs",
        )
    if body.parallel_tool_calls is False and not is_forced(body.tool_choice):
        raise invalid(
            "parallel_tool_calls = false cannot be enforced; say so in the prompt, or force one call",
            "parallel_tool_calls",
        )


def _grammar(body: Request, tools: tuple[Mapping[str, Any], ...]) -> Grammar | None:
    choice = body.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise invalid("tool_choice is not {'type': 'function', 'name': ...}", "tool_choice")
        return forced_call(tools, str(choice.get("name")))
    if choice == "required":
        return forced_call(tools, None)
    if choice not in (None, "auto", "none"):
        raise invalid(f"tool_choice is {choice!r}; use 'auto', 'none', 'required' or a function", "tool_choice")
    form = (body.text or {}).get("format") or {}
    if not isinstance(form, dict):
        raise invalid("text.format is not an object with a type", "text")
    match form.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return json_answer({"type": "object"}, "text.format")
        case "json_schema":
            return json_answer(form.get("schema"), "text.format.schema")
    raise invalid(f"text.format is of type {form.get('type')!r}; use text, json_object or json_schema", "text")


def _echo(body: Request) -> dict[str, Any]:
    """What a response says of its request."""
    extra = body.model_extra or {}
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": extra.get("metadata") or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": extra.get("reasoning") or {"effort": None, "summary": None},
        "store": extra.get("store") is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or []],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": extra.get("user"),
    }
