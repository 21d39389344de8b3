"""Finds and reads calls of tools in an answer, and explains malformed ones to the policy.

`parse_answer` reads what was sampled, special tokens included, by a parser, which never raises, whatever the text is.
`ToolParser.get_tool_parser(name)` finds one;
`@ToolParser.register("mine")` above a subclass adds one of yours (actor_rollout_ref.model.external_lib names its file).
"""

import asyncio
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, ClassVar

from configs.errors import did_you_mean
from configs.extras import find, present

Schemas = Mapping[str, Mapping[str, Any]]  # the schemas of the tools that there are, by name
THOUGHT_TAG = re.compile(r"</?think>")
MARKED = "thought-0417"  # stands for such a tag while it is looked for in arguments
JSON = json.JSONDecoder(strict=False)  # models write line feeds into texts
SPACE = re.compile(r"\s*")


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


class Answer(str):
    """An answer as text without special tokens, which knows the tokens that were sampled.

    Args:
        stopped: whether the last token ended it, which says nothing then if it is a special one.
        cut: how many characters at the end, of a stop string and behind it, are no part of the answer.
    """

    def __new__(cls, token_ids: list[int], tokenizer: Any, stopped: bool, cut: int = 0) -> "Answer":
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        answer = super().__new__(cls, text[: len(text) - cut])
        answer.token_ids, answer.tokenizer, answer.stopped, answer.cut = token_ids, tokenizer, stopped, cut
        return answer

    def __reduce__(self) -> tuple[Any, ...]:  # copies, and what is sent elsewhere, are the text alone
        return str, (str(self),)

    @property
    def sampled(self) -> str:
        """Returns the text with its special tokens, but for the one that ended it."""
        text = self.tokenizer.decode(self.token_ids)
        return text[: len(text) - self.cut].removesuffix(self.ending)

    @property
    def ending(self) -> str:
        """Returns the special token that ended the answer, or ""."""
        last = self.token_ids[-1:]
        is_special = self.stopped and not self.tokenizer.decode(last, skip_special_tokens=True)
        return self.tokenizer.decode(last) if is_special else ""

    def ids_without(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Returns the tokens but for those of these spans of `sampled`."""
        ids = [*self.token_ids]
        if self.cut:
            spans = [*spans, (len(self.sampled), len(self.sampled) + self.cut)]
        for span in reversed(spans):
            start, end = (
                bisect_left(range(len(ids)), edge, key=lambda count: len(self.tokenizer.decode(ids[:count])))
                for edge in span
            )
            del ids[start:end]
        return ids


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
        marks_text: whether the format has marks for text and thoughts, too, which are not shown.
    """

    registry: ClassVar[dict[str, type["ToolParser"]]] = {}
    marks_text: ClassVar[bool] = False

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
        """Reads an answer's text, which has the special tokens in it, but for the one that ended it, and no thoughts.

        Calls of tools that do not exist, or with wrong arguments, are calls nevertheless.
        """
        return self.parse_ids(self.tokenizer.encode(answer, add_special_tokens=False), schemas)

    def parse_ids(self, ids: list[int], schemas: Schemas) -> ParsedAnswer:
        """Reads an answer's tokens by verl's coroutine."""
        tools = [[*schemas.values()]] if "tools" in signature(self.extract_tool_calls).parameters else []
        with ThreadPoolExecutor(1) as thread:  # a loop may run in this thread already
            text, calls = thread.submit(asyncio.run, self.extract_tool_calls(ids, *tools)).result()
        parsed = ParsedAnswer(text)
        for call in calls:
            add_json_call(parsed, json.dumps({"name": call.name, "arguments": call.arguments}), "arguments")
        return parsed

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """Reads an answer's tokens, for an agent loop in verl's form: the text around the calls, and the calls."""
        schemas = {tool["function"]["name"]: tool for tool in tools or () if isinstance(tool, Mapping)}
        parsed = parse_answer(self, Answer(responses_ids, self.tokenizer, stopped=True), schemas)
        return parsed.text, [FunctionCall(call.name, json.dumps(call.arguments)) for call in parsed.calls]

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Writes a call as an answer does: for demonstrations."""
        raise NotImplementedError(f"{type(self).__name__} defines no write(name, arguments)")

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Tells a policy of tools and of how they are called, for prompts whose chat template does not.

        "": this format has no layout for it.
        """
        return ""


def parse_answer(parser: ToolParser, answer: str, schemas: Schemas) -> ParsedAnswer:
    """Reads an answer as it was sampled. What it thinks is text, as calls in there are plans."""
    sampled = answer.sampled if isinstance(answer, Answer) else answer
    spans = thoughts_in(sampled, lambda text: parser.parse(text, schemas).calls)
    if isinstance(answer, Answer) and type(parser).parse is ToolParser.parse:
        parsed = parser.parse_ids(answer.ids_without(spans), schemas)
        parsed = replace(parsed, text=parsed.text.removesuffix(answer.ending))
    else:
        edges = [0, *(edge for span in spans for edge in span), len(sampled)]
        pieces = (sampled[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
        parsed = parser.parse("".join(pieces), schemas)
    thoughts = "".join(sampled[start:end] for start, end in spans)
    return replace(parsed, text="\n\n".join(filter(None, (thoughts, parsed.text))))


def thoughts_in(text: str, calls_in: Callable[[str], Sequence[ToolCall]]) -> list[tuple[int, int]]:
    """Finds the spans of an answer in which it thinks; its prompt may have begun the first. A tag in an argument is
    text."""
    spans, start = list[tuple[int, int]](), None

    def is_in_argument(tag: re.Match[str]) -> bool:
        before = text[spans[-1][1] if spans else 0 : tag.start()]
        calls = calls_in(before + MARKED + text[tag.end() :]) if before.strip() else ()
        return any(MARKED in repr(call.arguments) for call in calls)

    for tag in THOUGHT_TAG.finditer(text):
        begins = tag[0] == "<think>"
        if start is None and (begins or not spans) and not is_in_argument(tag):
            start = tag.start() if begins else 0
        if start is not None and not begins:
            spans.append((start, tag.end()))
            start = None
    return spans if start is None else [*spans, (start, len(text))]


@ToolParser.register("hermes")
class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write calls; any number of them."""

    BLOCK = re.compile(r"<tool_call>(.*?)(?P<close></tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
    CLOSE = re.compile(r"\s*(?P<close></tool_call>)")

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        text, parsed, end = "", ParsedAnswer(""), 0
        while block := self.BLOCK.search(answer, end):
            text, start = text + answer[end : block.start()], block.start(1)
            tag = self.CLOSE.match(answer, end_of_json(answer, start)) or block  # one within the JSON closes nothing
            end = tag.end("close")
            if tag["close"]:
                add_json_call(parsed, answer[start : tag.start("close")], "arguments")
            else:
                parsed.errors.append("a call is not closed: </tool_call> is missing")
        return replace(parsed, text=(text + answer[end:]).strip())

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
    name, arguments = (call.get("name"), call.get(key)) if isinstance(call, dict) else (None, None)
    arguments = read_arguments(arguments)
    if isinstance(name, str) and isinstance(arguments, dict):
        parsed.calls.append(ToolCall(name, arguments))
    else:
        parsed.errors.append(f'a call needs a "name", a text, and "{key}", an object')


def read_arguments(arguments: Any) -> Any:
    """Reads the arguments of a call, which some models write as JSON in a text; null and "" are none."""
    if isinstance(arguments, str):
        return {} if arguments.strip() in ("", "null") else read_json(arguments)
    return {} if arguments is None else arguments


def json_lines(schemas: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)


def read_json(text: str) -> Any:
    """Reads `text` as JSON; None if it is none, or null."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def end_of_json(text: str, start: int = 0) -> int:
    """Finds where the JSON that begins at `start` ends: there, if none does."""
    try:
        return JSON.raw_decode(text, SPACE.match(text, start).end())[1]
    except (ValueError, RecursionError):
        return start
