"""The tools of a response's request: functions in their flat form, and namespaces of them.

A function of a namespace is `namespace.name` to the policy: no function's own name has a dot. Tools that the vendor would run are left
out of the prompt, so that the policy never asks for them; they are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlagent.router.conversation import ToolCall
from rlagent.router.errors import invalid

Json = Mapping[str, Any]
# Beginnings of their types; some are dated. What the agent would run in the vendor's own form (a shell, apply_patch, ...) is refused.
_VENDOR_RUN: Final = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
_FIELDS: Final = ("description", "parameters")


def read_tools(found: Sequence[Json]) -> tuple[tuple[Json, ...], list[Json]]:
    """The functions in chat's form, which templates expect, and the tools that are left out. ApiError names the tool.

    `strict` is left out: without a grammar it says nothing.
    """
    functions: list[Json] = []
    left_out: list[Json] = []
    for index, tool in enumerate(found):
        where = f"tools.{index}"
        match tool.get("type"):
            case "function":
                functions.append(_function(tool, where))
            case "namespace":
                functions += _members(tool, where)
            case str(kind) if kind.startswith(_VENDOR_RUN):
                left_out.append(tool)
            case kind:
                raise invalid(f"{where} is of type {kind!r}, which the router cannot run; use a function", "tools")
    return tuple(functions), left_out


def namespaces(tools: Sequence[Json]) -> frozenset[str]:
    """The names of the namespaces among a request's tools."""
    return frozenset(str(tool["name"]) for tool in tools if tool.get("type") == "namespace")


def call_names(call: ToolCall, known: frozenset[str]) -> dict[str, str]:
    """How a call's function is named in an answer."""
    space, dot, name = call.name.partition(".")
    return {"name": name, "namespace": space} if dot and space in known else {"name": call.name}


def joined_name(name: str, namespace: object) -> str:
    """The policy's name of a function that is sent back."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def _members(tool: Json, where: str) -> list[Json]:
    name, members = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(members, list):
        raise invalid(f"{where} is not {{'type': 'namespace', 'name', 'tools': [...]}}", "tools")
    inner = ((member, f"{where}.tools.{number}") for number, member in enumerate(members))
    return [_function(member, at, name) for member, at in inner if _is_function(member, at)]


def _is_function(member: object, where: str) -> bool:
    if not isinstance(member, dict):
        raise invalid(f"{where} is not a tool", "tools")
    return member.get("type") == "function"


def _function(tool: Json, where: str, namespace: str = "") -> Json:
    name = tool.get("name")
    if not isinstance(name, str):
        raise invalid(f"{where} is not {{'type': 'function', 'name', 'parameters'}}", "tools")
    given = {field: tool[field] for field in _FIELDS if tool.get(field) is not None}
    return {"type": "function", "function": {"name": joined_name(name, namespace), **given}}
