"""Finds and reads calls of tools in an answer's text, and explains malformed ones to the policy.

A parser never raises, whatever the text is. `ToolParser.get_tool_parser(name)` finds one;
`@ToolParser.register("mine")` above a subclass adds one of yours (actor_rollout_ref.model.external_lib names its file).
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, ClassVar

from configs.errors import did_you_mean
from configs.extras import find, present

Schemas = Mapping[str, Mapping[str, Any]]  # the schemas of the tools that there are, by name


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedAnswer:
    """The parts of an answer: `text` around the calls, the calls in order, a sentence for each malformed one."""

    text: str
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FunctionCall:
    """A call as parsers in verl's form find it; `arguments` is JSON."""

    name: str
    arguments: str


class ToolParser:
    """A way to write calls of tools into a text: a subclass defines `parse`, or verl's coroutine
    `extract_tool_calls(ids)`, or (ids, tools), which returns the text around the calls and a list of FunctionCall.

    Attributes:
        tokenizer: the policy's, where there is one.
    """

    registry: ClassVar[dict[str, type["ToolParser"]]] = {}

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    @staticmethod
    def register(name: str) -> Callable[[type["ToolParser"]], type["ToolParser"]]:
        def add(parser: type["ToolParser"]) -> type["ToolParser"]:
            ToolParser.registry[name] = parser
            return parser

        return add

    @staticmethod
    def get_tool_parser(name: str, tokenizer: Any = None) -> "ToolParser":
        """Raises ValueError if no parser has that name, or it cannot parse; lists those that there are."""
        known = [*ToolParser.registry, *present("format")]
        if name not in known:
            own = f"one of yours stands under @ToolParser.register({name!r}) in a file of model.external_lib"
            known = f"{did_you_mean(name, known)} There are {', '.join(known)}"
            raise ValueError(f"Unknown tool parser: {name!r}.{known}; {own}.")
        parser = ToolParser.registry.get(name) or find("format", name)
        if (parser.parse, parser.extract_tool_calls) == (ToolParser.parse, ToolParser.extract_tool_calls):
            raise ValueError(f"the tool parser {name!r}, {parser.__name__}, defines no parse(answer, schemas).")
        return parser(tokenizer) if "tokenizer" in signature(parser).parameters else parser()

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        """Reads an answer. Calls of tools that do not exist, or with wrong arguments, are calls nevertheless."""
        ids = self.tokenizer.encode(answer, add_special_tokens=False)
        tools = [[*schemas.values()]] if "tools" in signature(self.extract_tool_calls).parameters else []
        with ThreadPoolExecutor(1) as thread:  # a loop may run in this thread already
            text, calls = thread.submit(asyncio.run, self.extract_tool_calls(ids, *tools)).result()
        parsed = ParsedAnswer(text)
        for call in calls:
            add_json_call(parsed, json.dumps({"name": call.name, "arguments": call.arguments}), "arguments")
        return parsed

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """Reads an answer's tokens, for an agent loop in verl's form: the text around the calls, and the calls."""
        parsed = self.parse(self.tokenizer.decode(responses_ids), {})
        return parsed.text, [FunctionCall(call.name, json.dumps(call.arguments)) for call in parsed.calls]

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Writes a call as an answer does: for demonstrations."""
        raise NotImplementedError(f"{type(self).__name__} defines no write(name, arguments)")

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Tells a policy of tools and of how they are called, for prompts whose chat template does not.

        "": this format has no layout for it.
        """
        return ""


@ToolParser.register("hermes")
class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write calls; any number of them."""

    BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        parsed = ParsedAnswer(self.BLOCK.sub("", answer).strip())
        for content, end in self.BLOCK.findall(answer):
            if end:
                add_json_call(parsed, content, "arguments")
            else:
                parsed.errors.append("a call is not closed: </tool_call> is missing")
        return parsed

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        content = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{content}\n</tool_call>"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        call = '{"name": <the function\'s name>, "arguments": <a JSON object>}'
        return (
            "# Tools\n\nYou may call functions. Their signatures, one a line:\n"
            f"<tools>\n{json_lines(schemas)}\n</tools>\n\n"
            f"Write each call as a JSON object between <tool_call> and </tool_call>:\n<tool_call>\n{call}\n</tool_call>"
        )


def add_json_call(parsed: ParsedAnswer, content: str, key: str) -> None:
    """Adds the call that the JSON `content` is, its arguments under `key`, or what is wrong with it."""
    call = read_json(content)
    if call is None:
        parsed.errors.append(f'a call is not valid JSON: write {{"name": …, "{key}": {{…}}}}')
        return
    name, arguments = (call.get("name"), call.get(key, {})) if isinstance(call, dict) else (None, {})
    if isinstance(arguments, str):  # some models write the arguments as JSON in a text
        arguments = read_json(arguments)
    if isinstance(name, str) and isinstance(arguments, dict):
        parsed.calls.append(ToolCall(name, arguments))
    else:
        parsed.errors.append(f'a call needs a "name", a text, and "{key}", an object')


def json_lines(schemas: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)


def read_json(text: str) -> Any:
    """Reads `text` as JSON; None if it is none, or null."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
