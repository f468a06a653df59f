"""A set of tools: their schemas for a request, and what a model's calls of them answer.

In the flow: a rollout gives `Toolbox.schemas` to its model and the model's message to `Toolbox.answer`. Invariant: whatever a
model writes is answered, each call with one message that says what was wrong; only a tool's own bug raises.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlagent.envs.tools.function_tool import function_tool
from rlagent.envs.tools.tool import Tool, ToolError
from rlagent.errors import ConfigError

_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What a call gave: text for the model, and whether the tool could do what was asked."""

    text: str
    ok: bool


class Toolbox:
    """Tools by name; plain and async functions with types are made into tools. timeout_s bounds each call of an async one."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]], *, timeout_s: float = _TIMEOUT_S) -> None:
        made = [tool if isinstance(tool, Tool) else function_tool(tool) for tool in tools]
        self._tools = {tool.name: tool for tool in made}
        self._timeout_s = timeout_s
        if len(self._tools) != len(made):
            raise ConfigError(f"tools are named {[tool.name for tool in made]}; give each a name of its own")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The `tools` of a chat completion request."""
        return [tool.schema for tool in self._tools.values()]

    async def call(self, name: str, arguments: str) -> ToolAnswer:
        """Run a tool on the arguments that a model wrote (JSON text)."""
        tool = self._tools.get(name)
        if tool is None:
            return ToolAnswer(text=f"Error: there is no tool {name!r}; there are {', '.join(self._tools)}", ok=False)
        try:
            async with asyncio.timeout(self._timeout_s):
                return ToolAnswer(text=await tool.call(arguments), ok=True)
        except ToolError as error:
            return ToolAnswer(text=f"Error: {error}", ok=False)
        except TimeoutError:
            return ToolAnswer(text=f"Error: {name} took longer than {self._timeout_s:g} s", ok=False)

    async def answer(self, calls: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        """The tool messages that answer an assistant message's `tool_calls`, one after the other, in their order."""
        messages = []
        for call in calls or ():
            function = call.get("function") or {"name": call.get("type", ""), "arguments": ""}
            given = await self.call(function["name"], function["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": given.text})
        return messages
