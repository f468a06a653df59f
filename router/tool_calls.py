"""The written forms of tool calls, read: from what stands between a family's markers to names and argument texts.

In the flow: parse.py finds the markers and asks here. Invariant: an argument's JSON is handed on as it was written, never
parsed and written again; None where anything is not the form, since a call is not guessed, and where it is nested so deep
that it could not come back.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from rlagent.router.json_body import text_too_deep

Tools = Sequence[Mapping[str, Any]]


class ReadCall(NamedTuple):
    """A call as it was written. `own_id`: the id that the model gave it, in families that do (Mistral)."""

    name: str
    arguments: str  # their JSON text
    own_id: str = ""


Calls = list[ReadCall]
ReadCalls = Callable[[str, Tools], Calls | None]

_decoder: Final = json.JSONDecoder()
_ARGUMENT: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_DEEPSEEK_CALL: Final = re.compile(r"\s*<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED: Final = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)
_MISTRAL_NAME: Final = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
OWN_ID: Final = re.compile("[0-9A-Za-z]{9}")  # Mistral's


def parse_tool_call(text: str) -> ReadCall | None:
    """What was written as {"name": ..., "arguments": {...}}; None if it is not that."""
    found = _members(text.strip())
    if found is None or "name" not in found:
        return None
    name = json.loads(found["name"])
    arguments = found.get("arguments", found.get("parameters", "{}"))
    if not isinstance(name, str) or not name or not arguments.startswith("{") or text_too_deep(arguments):
        return None
    own_id = json.loads(found.get("id", '""'))
    return ReadCall(name, arguments, own_id if isinstance(own_id, str) and OWN_ID.fullmatch(own_id) else "")


def one_json(text: str, _tools: Tools) -> Calls | None:
    """Hermes and Qwen: one JSON object."""
    call = parse_tool_call(text)
    return None if call is None else [call]


def llama_calls(text: str, _tools: Tools) -> Calls | None:
    """Llama 3: JSON objects, apart by semicolons; or the built-in tools' `name.call(key="value")`."""
    calls: Calls = []
    at, text = 0, text.strip()
    if not text.startswith("{"):
        builtin = _builtin_call(text)
        return None if builtin is None else [builtin]
    while at < len(text):
        end = _json_end(text, at)
        call = None if end is None else parse_tool_call(text[at:end])
        if end is None or call is None:
            return None
        calls.append(call)
        at = _skip_space(text, end)
        if at < len(text):
            if text[at] != ";":
                return None
            at = _skip_space(text, at + 1)
    return calls or None


def _builtin_call(text: str) -> ReadCall | None:
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "call":
            return None
        if call.args or not isinstance(call.func.value, ast.Name):
            return None
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
        if len(given) != len(call.keywords):
            return None
        return _call(call.func.value.id, json.dumps(given, ensure_ascii=False))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def deepseek_calls(text: str, _tools: Tools) -> Calls | None:
    """DeepSeek V3 and R1 (`function<sep>name`, fenced arguments) and V3.1 (`name<sep>arguments`)."""
    calls: Calls = []
    at = 0
    while found := _DEEPSEEK_CALL.match(text, at):
        kind, separator, rest = found[1].partition("<｜tool▁sep｜>")
        fenced = _FENCED.fullmatch(rest)
        name, arguments = (fenced[1], fenced[2]) if fenced else (kind, rest)
        call = _call(name, arguments) if separator else None
        if call is None:
            return None
        calls.append(call)
        at = found.end()
    return calls if calls and not text[at:].strip() else None


def glm_call(text: str, tools: Tools) -> Calls | None:
    """GLM 4.5: a name, then pairs of key and value. A value is JSON, or text where the tool's schema says string."""
    name, at = text.partition("<arg_key>")[0], 0
    at = len(name)
    name = name.strip()
    if not name or "\n" in name or "{" in name:
        return None
    properties = _properties(name, tools)
    members: dict[str, str] = {}
    while found := _ARGUMENT.match(text, at):
        key, value = found[1].strip(), found[2]
        if key in members:
            return None
        members[key] = _glm_value(value, properties.get(key))
        at = found.end()
    if text[at:].strip():
        return None
    written = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items())
    return object_call(name, "{" + ", ".join(written) + "}")


def _glm_value(value: str, schema: object) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind != "string" and _is_json(value):
        return value.strip()
    return json.dumps(value, ensure_ascii=False)


def mistral_calls(text: str, _tools: Tools) -> Calls | None:
    """Mistral: a JSON array of calls; or, in later tokenizers, a name and its arguments for each marker."""
    if text.lstrip().startswith("["):
        return _array(text.strip())
    calls: Calls = []
    for piece in text.split("[TOOL_CALLS]"):
        found = _MISTRAL_NAME.match(piece)
        call = None if found is None else _call(found[1], piece[found.end() :])
        if found is None or call is None:
            return None
        calls.append(call._replace(own_id=found[2] if found[2] and OWN_ID.fullmatch(found[2]) else ""))
    return calls


def _array(text: str) -> Calls | None:
    calls: Calls = []
    at = _skip_space(text, 1)
    while (end := _json_end(text, at)) is not None:
        call = parse_tool_call(text[at:end])
        if call is None:
            return None
        calls.append(call)
        at = _skip_space(text, end)
        if text[at : at + 1] != ",":
            break
        at = _skip_space(text, at + 1)
    return calls if calls and text[at:] == "]" else None


def _call(name: str, arguments: str) -> ReadCall | None:
    name, arguments = name.strip(), arguments.strip()
    is_object = arguments.startswith("{") and _json_end(arguments, 0) == len(arguments) and not text_too_deep(arguments)
    return ReadCall(name, arguments) if name and is_object else None


def object_call(name: str, arguments: str) -> Calls | None:
    """A call whose name and arguments stand apart (harmony)."""
    call = _call(name, arguments)
    return None if call is None else [call]


def _properties(name: str, tools: Tools) -> Mapping[str, object]:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_end(text: str, at: int) -> int | None:
    try:
        return _decoder.raw_decode(text, at)[1]
    except (ValueError, IndexError, RecursionError):
        return None


def _members(text: str) -> dict[str, str] | None:
    """The members of a JSON object, each value's text as it stands; None for anything else, or a name given twice."""
    found: dict[str, str] = {}
    if not text.startswith("{"):
        return None
    at = _skip_space(text, 1)
    try:
        while True:
            name, at = _decoder.raw_decode(text, at)
            at = _skip_space(text, at)
            if not isinstance(name, str) or name in found or text[at] != ":":
                return None
            start = _skip_space(text, at + 1)
            _, end = _decoder.raw_decode(text, start)
            found[name] = text[start:end]
            at = _skip_space(text, end)
            if text[at] == "}":
                return found if at + 1 == len(text) else None
            if text[at] != ",":
                return None
            at = _skip_space(text, at + 1)
    except (ValueError, IndexError, RecursionError):
        return None


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
