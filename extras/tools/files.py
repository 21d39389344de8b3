"""Reads verl's yaml of tools: classes, functions, and MCP servers (modelcontextprotocol.io; package mcp 2).

    - config: {type: mcp}
      mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [add]}

servers.json holds {"mcpServers": {NAME: {"url": …} or {"command": …, "args": […], "env": {…}}}}. Every call connects
anew, and starts a server of the second kind: what is slow to start or has a state is better served at a url.
"""

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml

from configs.errors import first_line
from configs.import_utils import load_named
from configs.paths import find_path
from extras.tools.tool_classes import TOOL_MARK, BaseTool, FunctionTool, ToolResponse

FLAT_KEYS = ("name", "description", "parameters")
OF_LIST = ("name", "required")  # of a parameter in a list; the rest is its JSON Schema
ENTRY_KEYS = {"class_name", "function", "config", "tool_schema", "mcp", *FLAT_KEYS}
MCP_SECONDS = 30  # to connect and list the tools
MCP_KEYS = {"mcp_servers_config_path", "tool_selected_list"}


def tools_of_yaml(path: str) -> Iterator[BaseTool]:
    """Yields the tools of a yaml with a list `tools` of {class_name, config, tool_schema}.

    A class is named as a.b.Class or file.py:Class; tool_schema may be left out where the class has one, or be written
    flat as name, description and parameters, the last as JSON Schema or as a list of {name, type, description}. Instead
    of class_name, `function` names a plain function, whose hints and docstring give what is not written.
    """
    for where, entry in read_entries(path, "tools", ENTRY_KEYS):
        kind = (entry.get("config") or {}).get("type", "native")
        if kind not in ("native", "mcp"):
            raise ValueError(f"{where}.config.type is {kind!r}; it must be native or mcp.")
        yield from mcp_tools(entry, where) if kind == "mcp" else [build_tool(entry, where)]


def build_tool(entry: Mapping[str, Any], where: str) -> BaseTool:
    if not {"function", "class_name"} & entry.keys():
        raise ValueError(f"{where} runs nothing: set `function: file.py:name`, or `class_name` to a BaseTool's.")
    flat = {key: entry[key] for key in FLAT_KEYS if key in entry}
    if isinstance(parameters := flat.get("parameters"), list):
        flat["parameters"] = schema_of_list(parameters, f"{where}.parameters")
    schema = entry.get("tool_schema") or ({"type": "function", "function": flat} if flat else None)
    if "function" in entry:
        function = load_named(entry["function"], f"{where}.function")
        if not isinstance(function, FunctionType):
            raise ValueError(f"{where}.function is {entry['function']}, which is no function.")
        if not entry.get("tool_schema") and "parameters" not in flat:
            tool = vars(function).get(TOOL_MARK) or FunctionTool(function)
            schema = {"type": "function", "function": tool.tool_schema["function"] | flat}
        return FunctionTool(function, schema=schema)
    cls = load_class(entry, where, BaseTool)
    with naming_entry(entry, where):
        return cls(config=entry.get("config") or {}, tool_schema=schema)


def schema_of_list(parameters: list[Any], where: str) -> dict[str, Any]:
    """Returns the JSON Schema of parameters with a name each, which are required unless `required` is false."""
    if wrong := [item for item in parameters if not isinstance(item, Mapping) or "name" not in item]:
        raise ValueError(f"{where} has {wrong[0]!r}: a parameter is a mapping with a name.")
    properties = {item["name"]: {key: item[key] for key in item if key not in OF_LIST} for item in parameters}
    required = [item["name"] for item in parameters if item.get("required", True)]
    return {"type": "object", "properties": properties, "required": required}


def read_entries(path: str, key: str, allowed: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each entry of the list under the one top `key` of a yaml file, after its place in words."""
    file = find_path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: there is no file {file.absolute()}.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is not yaml: {first_line(error)}.") from error
    entries = content.get(key) if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} must hold one key, {key!r}, with a list of mappings; it holds {content!r}.")
    for number, entry in enumerate(entries):
        where = f"{path}: {key}[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("config", {}), dict | None):
            raise ValueError(f"{where} is {entry!r}; it must be a mapping, and so must its config.")
        if strangers := sorted(entry.keys() - set(allowed)):
            raise ValueError(f"{where} has the keys {strangers}; it may have {', '.join(sorted(allowed))}.")
        yield where, entry


def load_class(entry: Mapping[str, Any], where: str, base: type) -> type:
    """Returns the class that an entry's class_name names; raises ValueError unless it is one of `base`."""
    cls = load_named(entry.get("class_name"), f"{where}.class_name")
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise ValueError(
            f"{where}.class_name is {entry['class_name']}; it must be a subclass of {base.__module__}.{base.__name__}."
        )
    return cls


@contextmanager
def naming_entry(entry: Mapping[str, Any], where: str) -> Iterator[None]:
    """Raises ValueError, with the entry and its place, if its class refuses its settings in the body."""
    try:
        yield
    except (ValueError, AssertionError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{where} ({entry['class_name']}): {type(error).__name__}: {error}") from error


class McpTool(BaseTool):
    """A tool of an MCP server; `server` is its entry of mcpServers. Subclasses may read results in another way."""

    server: Mapping[str, Any]

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """Returns the text that the policy reads of the parts of a result, and metrics. A hook of verl's."""
        return "\n".join(part.text if part.type == "text" else f"({part.type})" for part in content), {}

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        async with client_of(self.server) as client:
            result = await client.call_tool(self.name, parameters)
        if result.is_error:
            raise RuntimeError(McpTool._parse_tool_result(self, result.content)[0])
        text, metrics = self._parse_tool_result(result.content)
        return ToolResponse(text=text), 0.0, metrics


def mcp_tools(entry: Mapping[str, Any], where: str) -> Iterator[McpTool]:
    """Yields the tools of MCP servers that a yaml entry, found at `where`, stands for."""
    settings = entry.get("mcp") or {}
    if not isinstance(settings, dict) or not settings.get("mcp_servers_config_path") or settings.keys() - MCP_KEYS:
        raise ValueError(
            f"{where}.mcp is {settings!r}; it must have mcp_servers_config_path and may have tool_selected_list."
        )
    cls = load_class(entry, where, McpTool) if "class_name" in entry else McpTool
    try:
        servers = servers_of(settings["mcp_servers_config_path"])
    except FileNotFoundError as error:
        raise ValueError(f"{where}.mcp.mcp_servers_config_path: there is no file {error.filename}.") from error
    tools = []
    for name, server in servers.items():
        for schema in list_schemas(name, server, where):
            tools.append(cls(entry.get("config") or {}, schema))
            tools[-1].server = server
    names = [tool.name for tool in tools]
    selected = names if settings.get("tool_selected_list") is None else settings["tool_selected_list"]
    if strangers := sorted(set(selected) - set(names)):
        raise ValueError(f"{where}.mcp.tool_selected_list has {strangers}; the servers have {', '.join(names)}.")
    yield from (tool for tool in tools if tool.name in selected)


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


def list_schemas(name: str, server: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The schemas of a server's tools, in OpenAI's function format. Raises ValueError if it does not answer."""

    async def tools() -> list[Any]:
        async with asyncio.timeout(MCP_SECONDS), client_of(server) as client:
            return (await client.list_tools()).tools

    try:
        with ThreadPoolExecutor(1) as thread:  # in this one a loop may run already
            listed = thread.submit(asyncio.run, tools()).result()
    except ImportError as error:
        raise ValueError(f"{where}: tools of MCP servers need the package mcp: pip install 'mcp>=2,<3'.") from error
    except (OSError, RuntimeError, ExceptionGroup, mcp_errors()) as error:
        raise ValueError(
            f"{where}: the MCP server {name} does not answer ({first_line(error)}): {server!r}."
        ) from error
    functions = (
        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema} for tool in listed
    )
    return [{"type": "function", "function": function} for function in functions]


def mcp_errors() -> type[Exception]:
    from mcp import MCPError

    return MCPError


def client_of(server: Mapping[str, Any]) -> Any:
    """A client that connects to `server` as a context manager."""
    from mcp import Client, StdioServerParameters

    if "url" in server:
        return Client(server["url"])
    return Client(StdioServerParameters(command=server["command"], args=server.get("args", []), env=server.get("env")))
