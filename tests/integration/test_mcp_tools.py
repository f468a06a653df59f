"""The tools of a real MCP server, over stdio and streamable HTTP."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlagent.envs.tools import Toolbox, mcp_tools
from rlagent.errors import ConfigError

SERVER = Path(__file__).parents[1] / "support" / "mcp_parcels.py"


async def check(tools: Toolbox, depot: str) -> None:
    by_name = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
    assert by_name["depot_of"]["description"] == "The depot that holds an order."
    assert by_name["depot_of"]["parameters"]["required"] == ["order"]
    assert await tools.call("depot_of", '{"order": 41}') == await tools.call("depot_of", ' {"order":41} ')
    answer = await tools.call("depot_of", '{"order": 41}')
    assert (answer.text, answer.ok) == (depot, True)
    for arguments in ('{"order": 42}', '{"order": "x"}', "{}", "[1]", "{"):
        assert not (await tools.call("depot_of", arguments)).ok, arguments
    assert "no order 42" in (await tools.call("depot_of", '{"order": 42}')).text


async def test_a_server_over_stdio() -> None:
    command = [sys.executable, str(SERVER), "stdio"]
    async with mcp_tools(command, environ={"DEPOT": "Elm"}) as tools:
        await check(Toolbox(tools), "Elm")
        assert [tool.name for tool in tools] == ["depot_of", "sizes"]


@pytest.mark.slow
async def test_tools_are_chosen_and_prefixed() -> None:
    command = [sys.executable, str(SERVER), "stdio"]
    async with mcp_tools(command, only=["sizes"], prefix="shop_") as tools:
        answer = await Toolbox(tools).call("shop_sizes", "")
        assert answer.ok
        assert "1" in answer.text
    with pytest.raises(ConfigError, match="no tool 'lose'; it has depot_of, sizes"):
        async with mcp_tools(command, only=["lose"]):
            raise AssertionError("it has no such tool")
    with pytest.raises(KeyError, match="the rollout's own"):
        async with mcp_tools(command):
            raise KeyError("the rollout's own")


@asynccontextmanager
async def http_server() -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), "http", str(port), stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async for line in process.stderr:
            if b"running on" in line:
                break
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        await process.communicate()


async def test_a_server_over_http() -> None:
    async with http_server() as url, mcp_tools(url) as tools:
        await check(Toolbox(tools), "Kale")
