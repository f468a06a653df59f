"""What an agent asks of the form of an answer: a JSON schema that the engine's grammar holds the output to.

In the flow: a dialect makes it, the recorder asks the engines whether they have grammars, and the engine gets it as
`json_schema`. Invariant: logprobs under a grammar are those of a masked policy, so such a choice is never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rlagent.router.errors import ApiError, invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """`schema` is JSON text. `is_call`: the output is one tool call's {"name", "arguments"}, without any tag."""

    schema: str
    is_call: bool = False


def json_answer(schema: object, field: str) -> Grammar:
    """An answer that is a JSON document of a schema."""
    if not isinstance(schema, dict):
        raise invalid(f"{field} needs a JSON schema (an object)", field.partition(".")[0])
    return Grammar(schema=_text(schema))


def forced_call(tools: Sequence[Mapping[str, Any]], name: str | None, field: str = "tool_choice") -> Grammar:
    """An answer that is one call of a tool: of `name`, or of any. Tools are in OpenAI's chat form."""
    functions = [tool["function"] for tool in tools]
    chosen = [function for function in functions if name is None or function["name"] == name]
    if not chosen:
        names = ", ".join(function["name"] for function in functions) or "none"
        raise invalid(f"{field} forces {name or 'a call'}, which is not among the tools ({names})", field)
    kinds = [_call(function) for function in chosen]
    return Grammar(schema=_text(kinds[0] if len(kinds) == 1 else {"anyOf": kinds}), is_call=True)


def is_forced(tool_choice: object) -> bool:
    """Whether OpenAI's tool_choice forces a call."""
    return tool_choice == "required" or isinstance(tool_choice, dict)


def no_grammar() -> ApiError:
    """What to answer where an engine has no grammars."""
    return invalid(
        "this asks for an answer of a given form (response_format, a forced tool_choice), and the engine has no grammars: ask "
        "for the form in the prompt, or serve with SGLang",
        "response_format",
        "no_grammar",
    )


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _text(schema: object) -> str:
    return orjson.dumps(schema).decode()
