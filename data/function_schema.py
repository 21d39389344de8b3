"""The schema of a tool, read off a Python function: its type hints and its docstring."""

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
SUPPORTED = "str, int, float, bool, list, dict, list[…], dict[str, …], Literal[…], Optional[…] and X | None"
SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$")
ARGUMENT = re.compile(r"^\s*(?::param\s+)?(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def function_schema(function: Callable, name: str | None = None) -> dict[str, Any]:
    """OpenAI's function schema: types from the hints, required where there is no default, texts from the docstring.

    The docstring's first paragraph says what the tool is for; lines `argument: …` below `Args:`, or `:param argument:
    …`, describe the arguments.

    Raises:
        ValueError: no docstring, a parameter without a hint or with one that JSON has no type for; says the remedy.
    """
    place = f"the tool {function.__name__} ({inspect.getsourcefile(function)})"
    description, texts = read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"{place} has no docstring: its first sentence is what tells the policy what the tool is for.")
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ValueError(f"{place} has type hints that cannot be read ({error}): import what they name.") from error
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        where = f"{place}, parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"{where}: *args, **kwargs and positional-only ones cannot be called by name: spell it out."
            )
        if parameter.name not in hints:
            raise ValueError(f"{where} has no type hint: give it one of {SUPPORTED}.")
        described = hint_schema(hints[parameter.name], where)
        if parameter.name in texts:
            described["description"] = texts[parameter.name]
        properties[parameter.name] = described
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": name or function.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


def hint_schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON type of a type hint.

    Raises:
        ValueError: it has none; begins with `where`.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if origin is Literal and len(kinds := {type(value) for value in inner}) == 1 and kinds <= SIMPLE.keys():
        return {"type": SIMPLE[kinds.pop()], "enum": list(inner)}
    if origin in (Union, types.UnionType) and len(others := [part for part in inner if part is not type(None)]) == 1:
        return {**hint_schema(others[0], where), "nullable": True}
    if origin is list:
        return {"type": "array", "items": hint_schema(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": hint_schema(inner[1], where)}
    raise ValueError(f"{where} has the type hint {hint}, which no JSON type stands for: use one of {SUPPORTED}.")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph on one line, and the texts of the arguments (Google's or Sphinx's way)."""
    summary = text.split("\n\n", 1)[0]
    if SECTION.match(summary.split("\n", 1)[0]) or summary.startswith(":param"):
        summary = ""
    texts: dict[str, str] = {}
    section, latest, indent = None, None, 0
    for line in text.split("\n"):
        depth = len(line) - len(line.lstrip())
        if heading := SECTION.match(line):
            section, latest = heading[1], None
        elif line.lstrip().startswith(":param") or (
            section in ("Args", "Arguments", "Parameters") and (latest is None or depth <= indent)
        ):
            found = ARGUMENT.match(line)
            latest, indent = (found[1], depth) if found else (latest, indent)
            texts |= {found[1]: found[2].strip()} if found else {}
        elif latest is not None and line.strip() and not line.lstrip().startswith(":"):
            texts[latest] = f"{texts[latest]} {line.strip()}".strip()
        else:
            latest = None if not line.strip() else latest
    return " ".join(summary.split()), texts
