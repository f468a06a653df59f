"""Tools for agents: Python functions and MCP servers, as schemas for a model and as calls that answer it."""

from rlagent.envs.tools.function_tool import function_tool
from rlagent.envs.tools.mcp_tools import mcp_tools
from rlagent.envs.tools.tool import Tool, ToolError, parsed_arguments
from rlagent.envs.tools.toolbox import Toolbox

__all__ = ["Tool", "ToolError", "Toolbox", "function_tool", "mcp_tools", "parsed_arguments"]
