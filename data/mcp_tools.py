"""Tools of MCP servers (modelcontextprotocol.io), by its Python package; mcp 2, which vLLM brings along.

A yaml entry in verl's form stands for the tools of some servers:

    - config: {type: mcp}
      mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [add]}

and servers.json holds {"mcpServers": {NAME: {"url": …} or {"command": …, "args": […], "env": {…}}}}, as other clients
have it. Every call connects anew: a server of the second kind is started for each, so what is slow to start or has a
state is better served at a url.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from configs.errors import first_line
from configs.paths import find_path
from data.tools import BaseTool, ToolResponse

SECONDS = 30  # to connect and list the tools
KEYS = {"mcp_servers_config_path", "tool_selected_list"}


class McpTool(BaseTool):
    """A tool of an MCP server; `server` is its entry of mcpServers."""

    def __init__(self, server: Mapping[str, Any], schema: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        super().__init__(config, schema)
        self.server = server

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        async with client_of(self.server) as client:
            result = await client.call_tool(self.name, parameters)
        parts = [block.text if block.type == "text" else f"({block.type})" for block in result.content]
        if result.is_error:
            raise RuntimeError("\n".join(parts))
        return ToolResponse(text="\n".join(parts)), 0.0, {}


def mcp_tools(entry: Mapping[str, Any], where: str) -> Iterator[McpTool]:
    """The tools that a yaml entry, found at `where`, stands for.

    Raises:
        ValueError: a key, the file of servers or a selected tool is not as it must be, or a server does not answer.
    """
    settings = entry.get("mcp") or {}
    if not isinstance(settings, dict) or not settings.get("mcp_servers_config_path") or settings.keys() - KEYS:
        raise ValueError(
            f"{where}.mcp is {settings!r}; it must have mcp_servers_config_path and may have tool_selected_list."
        )
    wanted = settings.get("tool_selected_list")
    found = []
    for name, server in servers_of(settings["mcp_servers_config_path"]).items():
        found += [(server, schema) for schema in listed(name, server, where)]
    names = [schema["function"]["name"] for _, schema in found]
    if strangers := sorted(set(wanted or ()) - set(names)):
        raise ValueError(f"{where}.mcp.tool_selected_list has {strangers}; the servers have {', '.join(names)}.")
    for name, (server, schema) in zip(names, found, strict=True):
        if wanted is None or name in wanted:
            yield McpTool(server, schema, entry.get("config") or {})


def servers_of(path: str) -> dict[str, dict[str, Any]]:
    """The servers that a file names. Raises ValueError, FileNotFoundError for a file that cannot be used."""
    try:
        content = json.loads(Path(find_path(path)).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is not JSON: {first_line(error)}.") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f'{path} must hold {{"mcpServers": {{NAME: {{…}}}}}}, with one server or more.')
    for name, server in servers.items():
        if not isinstance(server, dict) or ("url" in server) == ("command" in server):
            raise ValueError(f"{path}: mcpServers.{name} is {server!r}; it must have a url, or a command.")
    return servers


def listed(name: str, server: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The schemas of a server's tools, in OpenAI's function format. Raises ValueError if it does not answer."""

    async def tools() -> list[Any]:
        async with asyncio.timeout(SECONDS), client_of(server) as client:
            return (await client.list_tools()).tools

    try:
        with ThreadPoolExecutor(1) as thread:  # in this one a loop may run already
            found = thread.submit(asyncio.run, tools()).result()
    except ImportError as error:
        raise ValueError(f"{where}: tools of MCP servers need the package mcp: pip install 'mcp>=2,<3'.") from error
    except (OSError, RuntimeError, ExceptionGroup, mcp_errors()) as error:
        raise ValueError(
            f"{where}: the MCP server {name} does not answer ({first_line(error)}): {server!r}."
        ) from error
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in found
    ]


def innermost(error: Exception) -> Exception:
    """The first of what an ExceptionGroup holds, however deep."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def mcp_errors() -> type[Exception]:
    from mcp import MCPError

    return MCPError


def client_of(server: Mapping[str, Any]) -> Any:
    """A client that connects to `server` as a context manager."""
    from mcp import Client, StdioServerParameters

    if "url" in server:
        return Client(server["url"])
    return Client(StdioServerParameters(command=server["command"], args=server.get("args", []), env=server.get("env")))
