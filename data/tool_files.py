"""Files of tools: verl's yaml of tool classes, and Python files of plain functions."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml

from configs.errors import first_line
from configs.paths import find_path
from data.import_utils import load_extern_object, load_module, split_object
from data.mcp_tools import mcp_tools
from data.tools import BaseTool, FunctionTool

ENTRY_KEYS = {"class_name", "function", "config", "tool_schema", "name", "description", "parameters", "mcp"}
VERLS_CLASSES = {  # where verl had them: here
    "verl.tools.gsm8k_tool.Gsm8kTool": "workers.tools.gsm8k.Gsm8kTool",
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": "workers.interactions.gsm8k.Gsm8kInteraction",
}


def load_tools(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, BaseTool]:
    """All tools of a yaml and of a file of functions, by name, in the order of the files; None: no such file.

    The yaml has a list `tools` of {class_name, config, tool_schema}: a class by its dotted name or as file.py:Class;
    tool_schema may be left out where the class has one, or written flat as name, description and parameters. Instead of
    class_name, `function` names a plain function in the same ways. Of a file of functions, those marked with
    `@function_tool` are tools; if none is, all its public functions are.

    Raises:
        ValueError, FileNotFoundError, RuntimeError: a file, class or schema that cannot be used, or a name that comes
            twice; names file, key and remedy.
    """
    found = [*(tools_of_yaml(tool_config_path) if tool_config_path else [])]
    found += tools_of_functions(function_tool_path) if function_tool_path else []
    tools: dict[str, BaseTool] = {}
    for tool in found:
        if tool.name in tools:
            files = " and ".join(filter(None, (tool_config_path, function_tool_path)))
            raise ValueError(f"{files}: two tools are called {tool.name!r}; a call would mean either. Rename one.")
        tools[tool.name] = tool
    return tools


def tools_of_yaml(path: str) -> Iterator[BaseTool]:
    for number, entry in enumerate(read_entries(path, "tools")):
        where = f"{path}: tools[{number}]"
        if strangers := sorted(entry.keys() - ENTRY_KEYS):
            raise ValueError(f"{where} has the keys {strangers}; it may have {', '.join(sorted(ENTRY_KEYS))}.")
        config = entry.get("config") or {}
        kind = config.get("type", "native")
        if kind not in ("native", "mcp"):
            raise ValueError(f"{where}.config.type is {kind!r}; it must be native or mcp.")
        yield from mcp_tools(entry, where) if kind == "mcp" else [build_tool(entry, config, where)]


def build_tool(entry: Mapping[str, Any], config: Mapping[str, Any], where: str) -> BaseTool:
    schema = entry.get("tool_schema")
    if schema is None and "name" in entry:
        flat = {key: entry[key] for key in ("name", "description", "parameters") if key in entry}
        schema = {"type": "function", "function": flat}
    if "function" in entry:
        function = load_named(entry["function"], f"{where}.function")
        if not isinstance(function, FunctionType | FunctionTool):
            raise ValueError(f"{where}.function is {entry['function']}, which is no function.")
        plain = function.function if isinstance(function, FunctionTool) else function
        return FunctionTool(plain, entry.get("name", function.name if plain is not function else None))
    found = load_named(entry.get("class_name"), f"{where}.class_name")
    if not isinstance(found, type) or not issubclass(found, BaseTool):
        raise ValueError(f"{where}.class_name is {entry['class_name']}; it must be a subclass of data.tools.BaseTool.")
    try:
        return found(config=config, tool_schema=schema)
    except (ValueError, AssertionError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{where} ({entry['class_name']}): {type(error).__name__}: {error}") from error


def tools_of_functions(path: str) -> list[FunctionTool]:
    """The functions marked with `@function_tool`; if there are none, all public ones that the file itself defines."""
    module = load_module(path)
    marked = [value for value in vars(module).values() if isinstance(value, FunctionTool)]
    public = [
        value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    if not marked and not public:
        raise ValueError(
            f"{path} (actor_rollout_ref.rollout.multi_turn.function_tool_path) defines no function: write one with "
            "type hints and a docstring, and mark it with @function_tool (from data.tools) if there are others."
        )
    return marked or [FunctionTool(function) for function in public]


def read_entries(path: str, key: str) -> list[dict[str, Any]]:
    """The list under the one top `key` of a yaml file.

    Raises:
        FileNotFoundError, ValueError: no such file, no yaml, or no list of mappings there.
    """
    file = find_path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: there is no file {file.absolute()} (the working directory is {Path.cwd()}).")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is not yaml: {first_line(error)}.") from error
    match content:
        case {**top} if [*top] == [key] and isinstance(top[key], list) and top[key]:
            entries = top[key]
        case _:
            raise ValueError(
                f"{path} must hold one key, {key!r}, with a list of mappings below it; it holds {content!r}."
            )
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("config", {}), dict | None):
            raise ValueError(f"{path}: {key}[{number}] is {entry!r}; it must be a mapping, and so must its config.")
    return entries


def load_named(text: Any, where: str) -> Any:
    """The object that `text` names, as a.b.Name or file.py:Name.

    Raises:
        ValueError: it names none; begins with `where`.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where} is {text!r}; it must name an object, as package.module.Name or file.py:Name.")
    text = VERLS_CLASSES.get(text, text)
    path, name = split_object(text)
    if name is None:
        path, _, name = text.rpartition(".")
    if not path or not name:
        raise ValueError(f"{where} is {text!r}; it must name an object, as package.module.Name or file.py:Name.")
    try:
        return load_extern_object(path, name)
    except (FileNotFoundError, ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"{where} is {text!r}: {error}") from error
