"""Calls of tools as Llama 3 writes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.tool_parsers import ParsedAnswer, Schemas, ToolParser, add_json_call, json_lines


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
