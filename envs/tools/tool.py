"""What a tool is: a schema, and a call from JSON text to text."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlagent.errors import RlagentError


class ToolError(RlagentError):
    """What a tool tells the model instead of a result: wrong arguments, something that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool: `parameters` is the JSON schema of its arguments; `call` takes them as JSON text. ToolError is for the model to read."""

    name: str
    description: str
    parameters: dict[str, Any]
    call: Callable[[str], Awaitable[str]]

    @property
    def schema(self) -> dict[str, Any]:
        """As chat completions take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def parsed_arguments(name: str, arguments: str) -> dict[str, Any]:
    """A call's arguments, JSON text as the model wrote it. ToolError for what is no JSON object."""
    try:
        given = json.loads(arguments.strip() or "{}")
    except ValueError as error:
        raise ToolError(f"{name}: the arguments are not JSON") from error
    if not isinstance(given, dict):
        raise ToolError(f"{name}: the arguments are not a JSON object")
    return given
