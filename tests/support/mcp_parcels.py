"""A small real MCP server: `python mcp_parcels.py stdio`, or `http PORT`."""

import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("parcels")


@server.tool()
def depot_of(order: int) -> str:
    """The depot that holds an order."""
    if order != 41:
        raise ToolError(f"no order {order}")
    return os.environ.get("DEPOT", "Kale")


@server.tool()
def sizes() -> list[int]:
    """All sizes."""
    return [1, 2]


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
