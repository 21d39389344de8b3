"""Calls of tools in each format are found, or explained to the policy."""

import json
import pickle
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.extras import TABLE
from custom.tiny_model import build_tokenizer
from data.chat import Answer
from extras.tools.parsers import FunctionCall, ParsedAnswer, ToolCall, ToolParser, parse_answer
from extras.tools.tests.test_tools import BOTH, play

ROME, F = ToolCall("weather", {"city": "Rome"}), ToolCall("f", {})
XML = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
HARMONY = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
PROGRAM = "if a < b:\n\n    print('</p>')"
IN_TEXT = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
RUN = ToolCall("f", {"code": PROGRAM})
THOUGHT = '<|channel|>analysis<|message|>Call {"city": "Oslo"}?<|end|><|start|>assistant'


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls", "errors"),
    [
        ("hermes", "No call.", "No call.", [], []),
        ("hermes", 'Hm.\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>', "Hm.", [ROME], []),
        ("hermes", IN_TEXT, "", [ToolCall("f", {"a": 1})], []),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>' * 2, "", [F] * 2, []),
        ("hermes", "<tool_call>{'name'}</tool_call> so", "so", [], ["a call is not valid JSON"]),
        ("hermes", '<tool_call>{"name": "f"}', "", [], ["</tool_call> is missing"]),
        ("hermes", '<tool_call>[1<tool_call>{"name": "f"}</tool_call>', "", [F], ["is missing"]),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', "", [], ['needs a "name"']),
        ("hermes", '<tool_call>"f"</tool_call>', "", [], ['needs a "name"']),
        ("llama3", "No call.", "No call.", [], []),
        ("llama3", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME], []),
        ("llama3", 'So: <|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "So:", [ROME], []),
        ("llama3", '{"name": "f"}; {"name": "f"}', "", [F] * 2, []),
        ("llama3", '{"name": "f"', "", [], ["not valid JSON"]),
        ("llama3", '{"name": "f"} then', "", [F], ["not valid JSON"]),
        ("llama3", "{1, 2} is a set", "{1, 2} is a set", [], []),
        ("llama3", "<|python_tag|>", "", [], ["not valid JSON"]),
        ("plain", "weather(Rome) it is", "", [], ["must be a line of its own"]),
        ("plain", "It is f(x) here", "It is f(x) here", [], []),
        ("plain", "So:\nslow(0.5)", "So:", [ToolCall("slow", {"seconds": 0.5})], []),
        ("plain", "slow(0.5", "", [], ["the call of slow must be a line of its own that ends in )"]),
        ("plain", 'weather("Rome", 3)', "", [ToolCall("weather", {"city": "Rome", "days": 3})], []),
        ("plain", 'weather({"city": "Rome"})', "", [ROME], []),
        ("plain", "weather(Rome)", "", [], ["write the call as weather(city, days, unit, tags)"]),
        ("plain", "unknown(3)", "", [ToolCall("unknown", {})], []),
        ("plain", "slow((1+2)*3)", "", [ToolCall("slow", {"seconds": "(1+2)*3"})], []),
        ("qwen3_coder", "No call.", "No call.", [], []),
        ("qwen3_coder", f"So:\n<tool_call>\n{XML}\n</tool_call>", "So:", [ROME], []),
        ("qwen3_coder", f"{XML} and {XML}", "and", [ROME] * 2, []),
        ("qwen3_coder", f"<tool_call>\n{XML}\n{XML}\n</tool_call>\nDone.", "Done.", [ROME] * 2, []),
        ("qwen3_coder", f"<function=f><parameter=code>\n{PROGRAM}\n</parameter></function>", "", [RUN], []),
        ("qwen3_coder", "<function=f></function>", "", [F], []),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1", "", [], ["the call of f is not closed"]),
        ("qwen3_coder", '<function=f>{"a": 1}</function>', "", [], ["write each argument of f as <parameter=NAME>"]),
        ("qwen3_coder", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", [], ["a call is"]),
        ("glm", "No call.", "No call.", [], []),
        ("glm", f"So: {GLM}\n{GLM} Done.", "So: \n Done.", [ROME] * 2, []),
        ("glm", "<tool_call>f</tool_call>", "", [F], []),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>", "", [], ["</tool_call> is missing"]),
        ("glm", '<tool_call>{"name": "f"}</tool_call>', "", [], ["a call is the function's name"]),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key></tool_call>", "", [], ["a call is the function's name"]),
        ("gpt-oss", "No call.", "No call.", [], []),
        ("gpt-oss", "<|channel|>final<|message|>Hot.<|return|>", "Hot.", [], []),
        ("gpt-oss", THOUGHT + HARMONY, "", [ROME], []),
        ("gpt-oss", f"<|channel|>commentary<|message|>I.<|end|><|start|>assistant{HARMONY}", "I.", [ROME], []),
        ("gpt-oss", f"{HARMONY}<|start|>assistant{HARMONY}", "", [ROME] * 2, []),
        ("gpt-oss", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}', "", [ROME], []),
        ("gpt-oss", HARMONY.replace('"}', ""), "", [], ["the arguments of weather are no JSON object"]),
        ("gpt-oss", HARMONY.replace("functions.weather", "python"), "", [], ["there is no python"]),
        ("gpt-oss", "<|channel|>commentary to=functions.weather ", "", [], ["the call of functions.weather is cut"]),
    ],
)
def test_calls_are_found_or_explained(form, answer, text, calls, errors):
    parser = ToolParser.get_tool_parser(form)
    parsed = parser.parse(answer, BOTH)
    assert (parsed.text, parsed.calls) == (text, calls)
    assert len(parsed.errors) == len(errors) and all(map(str.__contains__, parsed.errors, errors))
    assert parser.parse(parser.write("slow", {"seconds": 1}), BOTH).calls == [ToolCall("slow", {"seconds": 1})]


EXAMPLE = f"Write:\n<tool_call>\n{XML}\n</tool_call>\nlike that"  # documentation, as an argument


def hermes(value: str) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>'


def xml(value: str, more: str = "") -> str:
    return f"<tool_call>\n<function=f>\n<parameter=b>\n{value}\n</parameter>\n{more}</function>\n</tool_call>"


def glm(value: str) -> str:
    return f"<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


def harmony(value: str) -> str:
    return f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{value}<|call|>"


@pytest.mark.parametrize(
    ("form", "answer", "arguments"),
    [
        ("hermes", hermes('{"b": "one\ntwo"}'), {"b": "one\ntwo"}),
        *(("hermes", hermes(value), {}) for value in ("null", '""', '"null"', '"{}"')),
        ("llama3", '{"name": "f", "parameters": {"b": "<|python_tag|>"}}', {"b": "<|python_tag|>"}),
        ("llama3", '{"name": "f", "parameters": null}', {}),
        *(("gpt-oss", harmony(value), {}) for value in ("", "null", "{}")),
        *(("qwen3_coder", xml(tag), {"b": tag}) for tag in ("x </tool_call>", "x </function> y", "</think>", EXAMPLE)),
        *(("qwen3_coder", xml(tag), {"b": tag}) for tag in ("</parameter> y", "a <parameter=x> b", "\n\n", "")),
        ("qwen3_coder", xml("x </parameter> y", "<parameter=c>\n1\n</parameter>"), {"b": "x </parameter> y", "c": "1"}),
        ("qwen3_coder", xml("x <parameter=a> y", "<parameter=c>1</parameter>"), {"b": "x <parameter=a> y", "c": "1"}),
        *(("glm", glm(tag), {"b": tag}) for tag in ("x </tool_call> y", "</arg_value> y", "<think>", GLM, "\nx\n", "")),
    ],
)
def test_tags_that_no_format_would_write_and_line_feeds_are_text_and_null_is_no_argument(form, answer, arguments):
    parser = ToolParser.get_tool_parser(form)
    for said, times in ((answer, 1), (answer + "\n" + answer, 2)) if form != "llama3" else ((answer, 1),):
        assert parse_answer(parser, said, {}) == ParsedAnswer("", [ToolCall("f", arguments)] * times)


PROPERTIES = {
    "days": {"type": "integer"}, "go": {"type": "boolean"}, "xs": {"type": "array"}, "note": {"type": "string"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "some": {"type": "string", "nullable": True},
    "wrong": {"type": "integer"}, "loose": {"type": "int"}, "any": {}, "odd": True, "junk": {"type": [{"a": 1}]},
}  # fmt: skip


@pytest.mark.parametrize("form", ["qwen3_coder", "glm"])
def test_texts_between_tags_are_what_the_schema_says_and_texts_where_it_says_nothing(form):
    texts = {"days": "3", "go": "True", "xs": "[1, null]", "limit": "7", "note": "3", "some": "None", "any": "3"}
    texts |= {"odd": "3", "junk": "3", "wrong": "three", "loose": "3", "unknown": "3"}
    typed = {"days": 3, "go": True, "xs": [1, None], "limit": 7, "some": None}
    parser = ToolParser.get_tool_parser(form)
    schemas = {"f": {"function": {"parameters": {"properties": PROPERTIES}}}}
    for given_schemas, expected in ((schemas, texts | typed), ({"f": {"function": {"name": "f"}}}, texts), ({}, texts)):
        assert parser.parse(parser.write("f", texts), given_schemas).calls == [ToolCall("f", expected)]


# Any arguments

TAGS = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>", "<|channel|>", "<|message|>", "<|call|>",
    "<|start|>", "<think>", "</think>", "\n", '"', "\\", "{", "}", ")", '{"name": "f", "arguments": {}}', "null",
    "\\u003c", XML, GLM, HARMONY, "f(1)",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(TAGS) | st.text(max_size=4), max_size=6).map("".join)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSON = st.recursive(SCALARS, lambda each: st.lists(each, max_size=3) | st.dictionaries(TEXTS, each, max_size=3))
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "key-2", "ключ"]), JSON, max_size=3)
DRAFT = "I write <tool_call> <function=f0><parameter=a> or f0(1)?</think>"  # begun by the prompt, or not
THOUGHTS = [DRAFT, f"<think>{DRAFT}", "<think></think>"]
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@settings(deadline=None, max_examples=250)
@pytest.mark.parametrize("form", TABLE["format"])
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=2), thought=st.sampled_from(["", *THOUGHTS]))
def test_any_arguments_that_a_format_writes_are_read_as_they_were(form, calls, thought):
    """Whatever tags a text has, it is read as that text, also behind a thought and behind another call."""
    kinds = [{key: TYPES.get(type(value), "null") for key, value in arguments.items()} for arguments in calls]
    schemas = {
        f"f{number}": {"function": {"parameters": {"properties": {key: {"type": kind} for key, kind in each.items()}}}}
        for number, each in enumerate(kinds)
    }
    parser = ToolParser.get_tool_parser(form)
    answer = thought + "\n".join(map(parser.write, schemas, calls))
    parsed = parse_answer(parser, answer, schemas)
    assert parsed == ParsedAnswer(thought, [*map(ToolCall, schemas, calls)])


# What was sampled


class Brackets(ToolParser):
    """Calls as Mistral's models write them."""

    def parse(self, answer, schemas):
        text, _, calls = answer.partition("[TOOL_CALLS]")
        return ParsedAnswer(text, [ToolCall(call["name"], call["arguments"]) for call in json.loads(calls or "[]")])


class OfIds(ToolParser):
    """A parser in verl's form, which looks for the token of a mark."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        mark = self.tokenizer.convert_tokens_to_ids("[CALL]")
        place = responses_ids.index(mark) if mark in responses_ids else len(responses_ids)
        text = self.tokenizer.decode(responses_ids[place + 1 :], skip_special_tokens=True)
        return self.tokenizer.decode(responses_ids[:place]), [FunctionCall("add", text)] if text else []


TOOL_TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
HARMONY_MARKS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>"]
ADD = '{"name": "add", "arguments": {"a": 3}}'


def test_a_parser_in_verls_form_gets_the_ids_themselves_and_a_copy_of_an_answer_is_its_text():
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["[CALL]"], special_tokens=True)
    spelt = [*map(tokenizer.convert_tokens_to_ids, "[CALL]7"), tokenizer.eos_token_id]  # no mark, but its characters
    thought = Answer([*tokenizer.encode("<think>hm</think>"), *spelt], tokenizer, stopped=True)
    assert parse_answer(OfIds(tokenizer), thought, {}) == ParsedAnswer("<think>hm</think>\n\n[CALL]7")
    answer = Answer(spelt, tokenizer, stopped=True)
    assert parse_answer(OfIds(tokenizer), answer, {}) == ParsedAnswer("[CALL]7")
    called = Answer(tokenizer.encode('[CALL]{"a": 1}<|end|>'), tokenizer, stopped=True)
    assert parse_answer(OfIds(tokenizer), called, {}) == ParsedAnswer("", [ToolCall("add", {"a": 1})])
    assert pickle.loads(pickle.dumps(answer)) == "[CALL]7" and type(deepcopy(answer)) is str


SPECIALS = {  # format: (special tokens, an answer)
    "gpt-oss": (HARMONY_MARKS, THOUGHT + HARMONY.replace("weather", "add").replace('"city": "Rome"', '"a": 3')),
    "llama3": (["<|python_tag|>"], f'So: <|python_tag|>{ADD.replace("arguments", "parameters")}'),
    "hermes": (TOOL_TAGS, f"<think><tool_call>{ADD}</tool_call></think><tool_call>{ADD}</tool_call>"),
    "qwen3_coder": (TOOL_TAGS, "<tool_call><function=add><parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"),
    "glm": ([*TOOL_TAGS, "<arg_key>"], "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value></tool_call>"),
    "brackets": (["[TOOL_CALLS]"], f"So: [TOOL_CALLS][{ADD}]"),
    "of ids": (["[CALL]", "<think>", "</think>"], '<think>[CALL]{"a": 4}</think>[CALL]{"a": 3}'),
}  # fmt: skip


@pytest.mark.parametrize("form", SPECIALS)
def test_calls_are_found_where_the_marks_of_a_format_are_special_tokens(form, write, monkeypatch):
    monkeypatch.setitem(ToolParser.registry, "brackets", Brackets)
    monkeypatch.setitem(ToolParser.registry, "of ids", OfIds)
    marks, said = SPECIALS[form]
    tokenizer, answers = build_tokenizer(), iter([said, "7"])
    tokenizer.add_tokens(marks, special_tokens=True)
    tools = write("adding.py", "def add(a: int) -> int:\n    'Adds 4.'\n    return a + 4\n")
    keys = [f"function_tool_path={tools}", f"format={form}"]
    batch = play(tokenizer, lambda text, times: next(answers), *keys, prompt=[{"role": "user", "content": "3+4=?"}])
    assert batch.failure.tolist() == [None]
    assert (batch.tool_call_counts.tolist(), batch.tool_failures.tolist()) == ([1], [{}])
    told = tokenizer.decode(batch.responses[0][batch.response_mask[0] == 0])
    assert "<|tool|>7<|end|><|assistant|>" in told
