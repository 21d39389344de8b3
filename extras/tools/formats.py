"""Reads calls of tools as Llama 3, Qwen3-Coder, GLM-4.5 and gpt-oss write them, and in as few characters as can be."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from extras.tools.parsers import (
    ParsedAnswer,
    Schemas,
    ToolCall,
    ToolParser,
    add_json_call,
    end_of_json,
    json_lines,
    read_arguments,
    read_json,
)
from extras.tools.tool_classes import as_one_of, types_of


class Llama3Parser(ToolParser):
    """`{"name": …, "parameters": {…}}` as the whole answer, with or without <|python_tag|> before it, as Llama 3 does.

    Several are separated by semicolons or white space. What follows a <|python_tag|> is a call in any case; without
    one, an answer that begins with a brace and has no "name" in it is text.
    """

    TAG = "<|python_tag|>"

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        text, tag, content = answer.partition(self.TAG)
        begun = answer.lstrip().startswith("{") and '"name"' in answer[: end_of_json(answer)]
        if begun or not tag:  # a tag behind the beginning of a call is one within an argument
            text, tag, content = "", "", answer
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
    parts, start = [], 0
    while rest := text[start:].lstrip("; \n\t\r,"):
        length = end_of_json(rest) or len(rest)
        parts.append(rest[:length])
        start = len(text) - len(rest) + length
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
        names = [*properties_of(schemas, name)]
        value = read_json(content)
        values = read_json(f"[{content}]")
        if isinstance(value, dict) and names and value.keys() <= set(names):
            parsed.calls.append(ToolCall(name, value))
        elif len(names) < 2:  # none: the tool is unknown, or takes nothing
            parsed.calls.append(typed_call(name, {names[0]: content} if names else {}, schemas))
        elif isinstance(values, list) and len(values) <= len(names):
            parsed.calls.append(ToolCall(name, dict(zip(names, values, strict=False))))
        else:
            parsed.errors.append(f"write the call as {name}({', '.join(names)}), at most one JSON value for each")

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        text = "".join(map(as_text, arguments.values()))
        if len(arguments) > 1 or "\n" in text or isinstance(read_json(text), dict):  # no text alone can be these
            text = json.dumps(arguments, ensure_ascii=False)
        return f"{name}({text})"


class TagParser(ToolParser):
    """A format that writes each argument as a text between tags: the tool's schema says what is read from it.

    The tag that ends a value closes none that the value has opened, and behind it comes another argument, or the end of
    the call. `write` gives a value with such tags as JSON without a <.
    """

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        text, parsed, end = "", ParsedAnswer(""), 0
        while call := self.CALL.search(answer, end):
            text, name, end, arguments = text + answer[end : call.start()], call[1].strip(), call.end(), {}
            while (begin := self.ARGUMENT.match(answer, end)) and (last := self._end_of_value(answer, begin.end())):
                arguments[begin[1].strip()] = read_escaped(answer[begin.end() : last.start()])
                end = last.end()
            last = self.CALL_END.search(answer, end)
            if last[0] and name and last.start() == end:
                parsed.calls.append(typed_call(name, arguments, schemas))
            else:
                unclosed = f"the call of {name or '?'} is not closed: {self.CLOSING} is missing"
                parsed.errors.append(self.LAYOUT.format(name) if last[0] else unclosed)
            end = last.end()
        return replace(parsed, text=(text + answer[end:]).strip())

    def _end_of_value(self, answer: str, start: int) -> re.Match[str] | None:
        depth, first = 1, None
        for tag in self.VALUE_TAG.finditer(answer, start):
            depth += 1 if tag[1] else -1
            if not tag[1] and (self.ARGUMENT.match(answer, tag.end()) or self.CALL_END.match(answer, tag.end())):
                if depth == 0:
                    return tag
                first = first or tag
            depth = max(depth, 1)
        is_cut = first and self.CALL.search(answer, start, first.start())  # what follows is another call's
        return None if is_cut else first

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = {key: as_text(value) for key, value in arguments.items()}
        for key, text in texts.items():
            if self.VALUE_TAG.search(text) or read_escaped(text) != text:
                texts[key] = json.dumps(arguments[key], ensure_ascii=False).replace("<", r"\u003c")
        return self.CALL_TEXT.format(name, "".join(map(self.ARGUMENT_TEXT.format, texts, texts.values())))


def read_escaped(text: str) -> str:
    """Returns what a text stands for, if `TagParser.write` has written it as JSON."""
    value = read_json(text) if r"\u003c" in text else text
    return value if isinstance(value, str) else text


class Qwen3CoderParser(TagParser):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, as Qwen3-Coder writes calls.

    Any number of them, also without <tool_call>. A value is the text between its tags, less a line break at each end.
    """

    CALL = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]*)>")
    ARGUMENT = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
    VALUE_TAG = re.compile(r"(<parameter=[^>\n]+>)|\n?</parameter>")
    CALL_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?|(?=(?:<tool_call>\s*)?<function=)|\Z")
    CALL_TEXT = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
    ARGUMENT_TEXT = "<parameter={}>\n{}\n</parameter>\n"
    CLOSING, LAYOUT = "</function>", "write each argument of {} as <parameter=NAME>value</parameter>"

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        parsed = super().parse(answer, schemas)
        if "<tool_call>" in parsed.text:
            parsed.errors.append("a call is <tool_call><function=NAME>…</function></tool_call>")
        return parsed


class GLMParser(TagParser):
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>value</arg_value>` for each argument, `</tool_call>`,
    as GLM-4.5 writes calls; any number of them."""

    CALL = re.compile(r"<tool_call>\s*([\w.-]*)")
    ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
    VALUE_TAG = re.compile(r"(<arg_value>)|</arg_value>")
    CALL_END = re.compile(r"\s*</tool_call>|(?=<tool_call>)|\Z")
    CALL_TEXT, ARGUMENT_TEXT = "<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    CLOSING = "</tool_call>"
    LAYOUT = "a call is the function's name, and <arg_key>NAME</arg_key><arg_value>value</arg_value> for each argument"


class HarmonyParser(ToolParser):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`, as gpt-oss writes calls.

    An answer is a list of messages. What stands in the channel analysis is thought: neither text nor a call, unless it
    is addressed to a function.
    """

    HEADER = re.compile(r"(.*?)<\|message\|>", re.DOTALL)
    END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>|<\|channel\|>)|\Z")
    RECIPIENT = re.compile(r"\bto=([^\s<]+)")
    marks_text = True

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        text, parsed, end = [], ParsedAnswer(""), 0
        while header := self.HEADER.match(answer, end):
            text.append(self._before_marks(header[1]))
            recipient = self.RECIPIENT.search(header[1])
            start = end_of_json(answer, header.end()) if recipient else header.end()  # a mark within it ends nothing
            last = self.END.search(answer, start)
            content, end = answer[header.end() : last.start()], last.end()
            if recipient:
                self._add(parsed, recipient[1], content)
            elif "<|channel|>analysis" not in header[1]:
                text.append(content.strip())
        rest = answer[end:]
        if recipient := self.RECIPIENT.search(rest.partition("<|")[2]):
            parsed.errors.append(f"the call of {recipient[1]} is cut: <|message|> and its arguments are missing")
        text.append(self._before_marks(rest))
        return ParsedAnswer("\n".join(filter(None, text)), parsed.calls, parsed.errors)

    def _before_marks(self, text: str) -> str:
        """Returns the text before the first special token: of a header that begins in mid-message it is the role's."""
        before = text.partition("<|")[0].strip()
        return "" if before == "assistant" or self.RECIPIENT.match(before) else before

    def _add(self, parsed: ParsedAnswer, recipient: str, content: str) -> None:
        name, arguments = recipient.removeprefix("functions."), read_arguments(content)
        if name == recipient:
            parsed.errors.append(f"there is no {recipient}: a call is addressed to=functions.NAME")
        elif isinstance(arguments, dict):
            parsed.calls.append(ToolCall(name, arguments))
        else:
            parsed.errors.append(f"the arguments of {name} are no JSON object")

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        content = json.dumps(arguments, ensure_ascii=False)
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{content}<|call|>"


def properties_of(schemas: Schemas, name: str) -> Mapping[str, Any]:
    """Returns the parameters of a tool as its schema describes them; {} if it describes none."""
    match schemas.get(name):
        case {"function": {"parameters": {"properties": Mapping() as properties}}}:
            return properties
    return {}


def typed_call(name: str, texts: Mapping[str, str], schemas: Schemas) -> ToolCall:
    """Returns a call with arguments that are read from texts as the tool's schema says, if they fit."""
    properties = properties_of(schemas, name)
    return ToolCall(name, {key: read_argument(text, properties.get(key)) for key, text in texts.items()})


def read_argument(text: str, property_schema: Any) -> Any:
    kinds = types_of(property_schema) if isinstance(property_schema, Mapping) else []
    if "null" in kinds and text in ("null", "None"):
        return None
    result = as_one_of(text, [kind for kind in kinds if isinstance(kind, str)])
    return text if result is None else result


def as_text(value: Any) -> str:
    """Writes an argument as the formats of tags do: a text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
