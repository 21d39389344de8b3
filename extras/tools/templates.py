"""Fits tools to chat templates: how prompts describe them, and what stands behind an answer that calls some."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.chat import ANSWER, QUESTION, START, ChatFormat, render, special_tokens
from data.types import Message
from extras.tools.parsers import ToolParser


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


def behind_calls(chat: ChatFormat, messages: list[Message], calls: Sequence[Any]) -> tuple[str, str] | None:
    """Returns what stands behind an answer, and the end of its turn there, for templates that take a result only behind
    a call of its tool: with such a call before each; None: the template takes them nowhere."""
    return _behind(chat, messages, names_of_results(messages, calls))


def _behind(chat: ChatFormat, messages: list[Message], names: list[str]) -> tuple[str, str] | None:
    """Returns the text behind calls of the tools of these names, and the token that ends a turn there, as a text."""
    with suppress(ValueError, TypeError, TemplateError):
        answer, told = turn_of_results(messages, names)
        text = chat.text_behind(answer, told)
        alone = chat.render([*START, answer], generation_prompt=False).partition(ANSWER)[2]
        marks = special_tokens(chat.tokenizer).finditer(text)
        if ends := [mark for mark in marks if alone.startswith(text[: mark.end()])]:
            return text[ends[-1].start() :], ends[-1][0]
    if len(names) > 1:  # gpt-oss's template has one call in a message
        cut = [place for place, message in enumerate(messages) if message["role"] == "tool"][1]
        first, rest = _behind(chat, messages[:cut], names[:1]), _behind(chat, messages[cut:], names[1:])
        if first and rest:
            opening = chat.render(START, True).removeprefix(chat.render(START, False))
            return first[0].removesuffix(opening) + rest[0].removeprefix(rest[1]), first[1]
    return None


def names_of_results(messages: list[Message], calls: Sequence[Any]) -> list[str]:
    """Returns the names of the tools whose results are in `messages`, as these say or the calls do."""
    names = {call.get("id", place): call.get("function", call)["name"] for place, call in enumerate(calls)}
    results = enumerate(message for message in messages if message["role"] == "tool")
    return [each.get("name") or names.get(each.get("tool_call_id") or place, "tool") for place, each in results]


def turn_of_results(messages: list[Message], names: list[str]) -> tuple[Message, list[Message]]:
    """Returns an assistant's message that calls the tools of these names, and the messages with their results behind
    it; the ANSWER is in the last call's arguments."""
    results = [message for message in messages if message["role"] == "tool"]
    ids = [result.get("tool_call_id") or f"{place:09}" for place, result in enumerate(results)]  # Mistral's have 9
    each_id = iter(ids)
    told = [each | {"tool_call_id": next(each_id)} if each["role"] == "tool" else each for each in messages]
    functions = [{"name": name, "arguments": {}} for name in names]
    functions[-1]["arguments"] = {ANSWER: 0}
    calls = [{"id": one, "type": "function", "function": each} for one, each in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": "", "tool_calls": calls}, told
