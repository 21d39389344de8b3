"""Reads calls of tools as Llama 3, Qwen3-Coder, GLM-4.5 and gpt-oss write them, and in as few characters as can be."""

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


class Qwen3CoderParser(ToolParser):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, as Qwen3-Coder writes calls.

    Any number of them, also without <tool_call>. A value is the text between its tags, less a line break at each end.
    """

    BLOCK = re.compile(r"(?:<tool_call>\s*)?<function=(.*?)>(.*?)(</function>|\Z)(?:\s*</tool_call>)?", re.DOTALL)
    PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        parsed = ParsedAnswer(self.BLOCK.sub("", answer).strip())
        for name, content, end in self.BLOCK.findall(answer):
            rest = self.PARAMETER.sub("", content).strip()
            if not end:
                parsed.errors.append(f"the call of {name.strip()} is not closed: </function> is missing")
            elif rest:
                parsed.errors.append(f"write each argument of {name.strip()} as <parameter=NAME>value</parameter>")
            else:
                parsed.calls.append(ToolCall(name.strip(), dict(self.PARAMETER.findall(content))))
        if "<tool_call>" in parsed.text:
            parsed.errors.append("a call is <tool_call><function=NAME>…</function></tool_call>")
        return parsed

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        parameters = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


class GLMParser(ToolParser):
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>value</arg_value>` for each argument, `</tool_call>`,
    as GLM-4.5 writes calls; any number of them."""

    BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
    ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>\n?(.*?)\n?</arg_value>", re.DOTALL)

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        parsed = ParsedAnswer(self.BLOCK.sub("", answer).strip())
        for content, end in self.BLOCK.findall(answer):
            name = self.ARGUMENT.sub("", content).strip()
            if not end:
                parsed.errors.append("a call is not closed: </tool_call> is missing")
            elif re.fullmatch(r"[\w.-]+", name):
                arguments = {key.strip(): value for key, value in self.ARGUMENT.findall(content)}
                parsed.calls.append(ToolCall(name, arguments))
            else:
                parsed.errors.append(
                    "a call is the function's name, and <arg_key>NAME</arg_key><arg_value>value</arg_value> for each "
                    "argument"
                )
        return parsed

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        lines = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"


class HarmonyParser(ToolParser):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`, as gpt-oss writes calls.

    An answer is a list of messages. What stands in the channel analysis is thought: neither text nor a call, unless it
    is addressed to a function.
    """

    MESSAGE = re.compile(
        r"(.*?)<\|message\|>(.*?)(<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>|<\|channel\|>)|\Z)", re.DOTALL
    )
    RECIPIENT = re.compile(r"\bto=([^\s<]+)")

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        text, parsed = [], ParsedAnswer("")
        for header, content, _ in self.MESSAGE.findall(answer):
            text.append(self._before_marks(header))
            if recipient := self.RECIPIENT.search(header):
                self._add(parsed, recipient[1], content)
            elif "<|channel|>analysis" not in header:
                text.append(content.strip())
        rest = self.MESSAGE.sub("", answer)
        if recipient := self.RECIPIENT.search(rest.partition("<|")[2]):
            parsed.errors.append(f"the call of {recipient[1]} is cut: <|message|> and its arguments are missing")
        text.append(self._before_marks(rest))
        return ParsedAnswer("\n".join(filter(None, text)), parsed.calls, parsed.errors)

    def _before_marks(self, text: str) -> str:
        """Returns the text before the first special token: of a header that begins in mid-message it is the role's."""
        before = text.partition("<|")[0].strip()
        return "" if before == "assistant" or self.RECIPIENT.match(before) else before

    def _add(self, parsed: ParsedAnswer, recipient: str, content: str) -> None:
        name, arguments = recipient.removeprefix("functions."), read_json(content)
        if name == recipient:
            parsed.errors.append(f"there is no {recipient}: a call is addressed to=functions.NAME")
        elif isinstance(arguments, dict):
            parsed.calls.append(ToolCall(name, arguments))
        else:
            parsed.errors.append(f"the arguments of {name} are no JSON object")

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        content = json.dumps(arguments, ensure_ascii=False)
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{content}<|call|>"


def as_text(value: Any) -> str:
    """Writes an argument as the formats of tags do: a text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
