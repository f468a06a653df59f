"""The tools of an MCP server, over stdio or streamable HTTP (extra `mcp`).

In the flow: a rollout enters `mcp_tools(...)` and puts what it gives into a `Toolbox`. Invariant: the server's process ends with it.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rlagent.envs.tools.tool import Tool, ToolError, parsed_arguments
from rlagent.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client


@asynccontextmanager
async def mcp_tools(
    server: str | Sequence[str], *, environ: Mapping[str, str] | None = None, only: Sequence[str] | None = None,
    prefix: str = "", timeout_s: float = 60.0,
) -> AsyncIterator[list[Tool]]:  # fmt: skip
    """The tools of a server: a URL (streamable HTTP), or the command line of one that speaks over stdio.

    environ is added to the little that a command inherits. only: the tools to take, in this order; default all. prefix stands before
    their names. ConfigError when `mcp` is not installed or a tool of `only` is not there; what the connection raises else.
    """
    try:
        from mcp import Client, StdioServerParameters
    except ModuleNotFoundError as error:
        raise ConfigError("the package mcp is not installed: pip install 'rlagent-rl[mcp]'") from error
    where = (
        server
        if isinstance(server, str)
        else StdioServerParameters(command=server[0], args=list(server[1:]), env=dict(environ or {}))
    )
    try:
        async with Client(where, read_timeout_seconds=timeout_s) as client:
            found = {tool.name: tool for tool in await _listed(client)}
            missing = [name for name in only or () if name not in found]
            if missing:
                raise ConfigError(f"the MCP server has no tool {missing[0]!r}; it has {', '.join(found)}")
            yield [
                Tool(
                    name=f"{prefix}{name}", description=found[name].description or "",
                    parameters=found[name].input_schema, call=_caller(client, name),
                )
                for name in only or found
            ]  # fmt: skip
    except BaseExceptionGroup as group:  # the client's task groups wrap whatever passes them, the rollout's own too
        raise _only(group) from None


def _only(error: BaseException) -> BaseException:
    """What stands alone in groups in groups."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _listed(client: "Client") -> list[Any]:
    """All pages of the server's list."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _caller(client: "Client", name: str) -> Any:
    from mcp import MCPError

    async def call(arguments: str) -> str:
        given = parsed_arguments(name, arguments)
        try:
            result = await client.call_tool(name, given)
        except MCPError as error:
            raise ToolError(f"{name}: {error}") from error
        text = "\n".join(_text(block) for block in result.content)
        if result.is_error:
            raise ToolError(text)
        return text or json.dumps(result.structured_content or {})

    return call


def _text(block: Any) -> str:
    """A block of a result as text; what is none is named."""
    return str(block.text) if block.type == "text" else f"[{block.type}]"
