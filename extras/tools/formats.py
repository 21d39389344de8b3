"""Calls of tools as Llama 3 writes them, and in as few characters as there can be."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.tool_parsers import ParsedAnswer, Schemas, ToolCall, ToolParser, add_json_call, json_lines, read_json


class Llama3Parser(ToolParser):
    """`{"name": …, "parameters": {…}}` as the whole answer, with or without <|python_tag|> before it, as Llama 3 does.

    Several are separated by semicolons or white space. What follows a <|python_tag|> is a call in any case; without
    one, an answer that begins with a brace and has no "name" in it is text.
    """

    TAG = "<|python_tag|>"

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        text, tag, content = answer.partition(self.TAG)
        if not tag:
            text, content = "", answer
        content = content.strip()
        if not tag and not (content.startswith("{") and '"name"' in content):
            return ParsedAnswer(answer.strip())
        parsed = ParsedAnswer(text.strip())
        for part in json_objects(content):
            add_json_call(parsed, part, "parameters")
        return parsed

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        call = '{"name": the function\'s name, "parameters": {a parameter\'s name: its value}}'
        return (
            f"You may call the functions below. A call is a whole answer, in the form {call}, without variables.\n\n"
            f"{json_lines(schemas)}"
        )


def json_objects(text: str) -> list[str]:
    """The JSON objects of `text`, one after another; what is none ends the list, as its last part."""
    parts, place = [], 0
    decoder = json.JSONDecoder()
    while rest := text[place:].lstrip("; \n\t\r,"):
        try:
            _, length = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return [*parts, rest]
        parts.append(rest[:length])
        place = len(text) - len(rest) + length
    return parts or [""]


class PlainParser(ToolParser):
    """`name(argument)` on a line of its own: a call in as few characters as there can be, for small models.

    A tool with one parameter is given what stands between the parentheses, as it stands: `calc(12*7)`. One with more is
    given JSON values in the order of its parameters, `move(3, "north")`, or an object, `move({"steps": 3})`.
    """

    CALL = re.compile(r"\s*([A-Za-z_][\w-]*)\((.*)\)\s*")
    BEGUN = re.compile(r"\s*([A-Za-z_][\w-]*)\(")

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        text, parsed = [], ParsedAnswer("")
        for line in answer.split("\n"):
            start = self.BEGUN.match(line)
            if call := self.CALL.fullmatch(line):
                self._add(parsed, call[1], call[2], schemas)
            elif start and start[1] in schemas:
                parsed.errors.append(f"the call of {start[1]} must be a line of its own that ends in )")
            else:
                text.append(line)
        return ParsedAnswer("\n".join(text).strip(), parsed.calls, parsed.errors)

    def _add(self, parsed: ParsedAnswer, name: str, content: str, schemas: Schemas) -> None:
        names = [*schemas[name]["function"]["parameters"]["properties"]] if name in schemas else []
        value = read_json(content)
        values = read_json(f"[{content}]")
        if isinstance(value, dict) and names and value.keys() <= set(names):
            parsed.calls.append(ToolCall(name, value))
        elif len(names) < 2:  # none: the tool is unknown, or takes nothing
            parsed.calls.append(ToolCall(name, {names[0]: content} if names else {}))
        elif isinstance(values, list) and len(values) <= len(names):
            parsed.calls.append(ToolCall(name, dict(zip(names, values, strict=False))))
        else:
            parsed.errors.append(f"write the call as {name}({', '.join(names)}), at most one JSON value for each")

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        values = list(arguments.values())
        if len(values) == 1:
            return f"{name}({values[0]})"
        return f"{name}({json.dumps(arguments, ensure_ascii=False) if values else ''})"
