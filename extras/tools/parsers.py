"""Finds and reads calls of tools in an answer, explains malformed ones to the policy, and fits tools to templates.

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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, ClassVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.errors import did_you_mean
from configs.extras import present
from configs.import_utils import find
from data.chat import ANSWER, QUESTION, START, Answer, ChatFormat, render, special_tokens
from data.types import Message

Schemas = Mapping[str, Mapping[str, Any]]  # the schemas of the tools that there are, by name
THOUGHT_TAGS = re.compile("</?think>"), re.compile("<think>")  # before a thought has ended, and behind that
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
        known = [*present("format"), *ToolParser.registry]
        if name not in known:
            remedy = f"one of yours stands under @ToolParser.register({name!r}) in a file of model.external_lib"
            known = f"{did_you_mean(name, known)} There are {', '.join(known)}"
            raise ValueError(f"Unknown tool parser: {name!r}.{known}; {remedy}.")
        parser = ToolParser.registry.get(name) or find("format", name)
        if (parser.parse, parser.extract_tool_calls) == (ToolParser.parse, ToolParser.extract_tool_calls):
            raise ValueError(f"the tool parser {name!r}, {parser.__name__}, defines no parse(answer, schemas).")
        return parser(tokenizer) if "tokenizer" in signature(parser).parameters else parser()

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        """Reads an answer's text, which has the special tokens in it, but for the one that ended it, and no thoughts.

        Calls of tools that do not exist, or with wrong arguments, are calls nevertheless.
        """
        ids = (
            answer.token_ids if isinstance(answer, Answer) else self.tokenizer.encode(answer, add_special_tokens=False)
        )
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
    """Reads an answer as it was sampled. What it thinks is text, in which calls are plans; its prompt may have begun a
    thought, and a tag in an argument neither begins nor ends one."""
    sampled = answer.sampled if isinstance(answer, Answer) else answer
    thoughts, rest, end = "", sampled, 0
    while tag := THOUGHT_TAGS[bool(thoughts)].search(rest, end):
        before, behind, end = rest[: tag.start()], rest[tag.end() :], tag.end()
        calls = parser.parse(before + MARKED + behind, schemas).calls if before.strip() else ()
        if any(MARKED in repr(call.arguments) for call in calls):
            continue
        if tag[0] == "<think>":
            thought, close, behind = behind.partition("</think>")
            thoughts, rest, end = thoughts + tag[0] + thought + close, before + behind, len(before)
        else:
            thoughts, rest, end = before + tag[0], behind, 0
    reads_ids = isinstance(answer, Answer) and type(parser).parse is ToolParser.parse  # verl's form
    if reads_ids:
        ids, tail = answer.token_ids, rest + answer.ending
        start = bisect_left(range(len(ids)), -len(tail), key=lambda at: -len(answer.tokenizer.decode(ids[at:])))
        end = Answer(ids[start:], answer.tokenizer, answer.stopped)
        rest = end if end.sampled == rest else tail
    parsed = parser.parse(rest, schemas)
    text = parsed.text.removesuffix(answer.ending) if reads_ids else parsed.text
    return replace(parsed, text="\n\n".join(filter(None, (thoughts, text))))


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write calls; any number of them."""

    CALL, END = re.compile("<tool_call>"), re.compile(r"</tool_call>|(?=<tool_call>)|\Z")

    def parse(self, answer: str, schemas: Schemas) -> ParsedAnswer:
        text, parsed, end = "", ParsedAnswer(""), 0
        while call := self.CALL.search(answer, end):
            text += answer[end : call.start()]
            last = self.END.search(answer, end_of_json(answer, call.end()))  # a tag within the JSON ends nothing
            if last[0]:
                add_json_call(parsed, answer[call.end() : last.start()], "arguments")
            else:
                parsed.errors.append("a call is not closed: </tool_call> is missing")
            end = last.end()
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


# Chat templates: how prompts describe tools, and what stands behind an answer that calls some


def tool_kwargs(
    schemas: list[dict[str, Any]], parser: ToolParser, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Returns the arguments of `encode_prompt` that describe tools: schemas for a template that knows of tools, else
    as `tool_text` in the parser's layout, where the template writes system messages; calls likewise."""
    if not schemas:
        return {}
    text = "" if shows_tools(tokenizer) else parser.describe(schemas)
    if not text or not shows_system(tokenizer):
        return {"tools": schemas}
    writes = type(parser).write is not ToolParser.write and "tool_calls" not in str(tokenizer.chat_template)
    return {"tools": schemas, "tool_text": text} | ({"write_call": parser.write} if writes else {})


def shows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    return "tools" in str(tokenizer.chat_template)


def shows_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    messages = [{"role": "system", "content": ANSWER}, {"role": "user", "content": QUESTION}]
    try:
        return ANSWER in render(messages, tokenizer, generation_prompt=True)
    except (TemplateError, ValueError):  # refuses them, as Gemma's, or leaves them out
        return False


def behind_calls(
    chat: ChatFormat, messages: list[Message], calls: Sequence[Any], names: Sequence[str] = ()
) -> tuple[str, str] | None:
    """Returns what stands behind an answer, and the end of its turn there, for templates that take a result only behind
    a call of its tool: with such a call before each, by its name; None: the template takes them nowhere."""
    names = names or names_of_results(messages, calls)
    with suppress(ValueError, TypeError, TemplateError):
        answer, results = turn_of_results(messages, names)
        text = chat.text_behind(answer, results)
        alone = chat.render([*START, answer], generation_prompt=False).partition(ANSWER)[2]
        marks = special_tokens(chat.tokenizer).finditer(text)
        if ends := [mark for mark in marks if alone.startswith(text[: mark.end()])]:
            return text[ends[-1].start() :], ends[-1][0]
    if len(names) > 1:  # gpt-oss's template has one call in a message
        cut = [index for index, message in enumerate(messages) if message["role"] == "tool"][1]
        first = behind_calls(chat, messages[:cut], calls, names[:1])
        rest = behind_calls(chat, messages[cut:], calls, names[1:])
        if first and rest:
            opening = chat.render(START, True).removeprefix(chat.render(START, False))
            return first[0].removesuffix(opening) + rest[0].removeprefix(rest[1]), first[1]
    return None


def names_of_results(messages: list[Message], calls: Sequence[Any]) -> list[str]:
    """Returns the names of the tools whose results are in `messages`, as these say or the calls do."""
    names = {call.get("id", index): call.get("function", call)["name"] for index, call in enumerate(calls)}
    results = enumerate(message for message in messages if message["role"] == "tool")
    return [each.get("name") or names.get(each.get("tool_call_id") or index, "tool") for index, each in results]


def turn_of_results(messages: list[Message], names: Sequence[str]) -> tuple[Message, list[Message]]:
    """Returns an assistant's message that calls the tools of these names, and the messages with their results behind
    it; the ANSWER is in the last call's arguments."""
    results = [message for message in messages if message["role"] == "tool"]
    ids = [result.get("tool_call_id") or f"{index:09}" for index, result in enumerate(results)]  # Mistral's have 9
    each_id = iter(ids)
    with_ids = [each | {"tool_call_id": next(each_id)} if each["role"] == "tool" else each for each in messages]
    functions = [{"name": name, "arguments": {}} for name in names]
    functions[-1]["arguments"] = {ANSWER: 0}
    calls = [{"id": one, "type": "function", "function": each} for one, each in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": "", "tool_calls": calls}, with_ids
