"""Calls of tools in the formats that only some models need."""

import pytest

from data.tool_parsers import ToolCall, ToolParser
from tests.test_tools import BOTH, ROME


@pytest.mark.parametrize(
    ("answer", "text", "calls", "errors"),
    [
        ("No call.", "No call.", [], []),
        ('{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME], []),
        ('So: <|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "So:", [ROME], []),
        ('{"name": "f"}; {"name": "f"}', "", [ToolCall("f", {})] * 2, []),
        ('{"name": "f"', "", [], ["not valid JSON"]),
        ('{"name": "f"} then', "", [ToolCall("f", {})], ["not valid JSON"]),
        ("{1, 2} is a set", "{1, 2} is a set", [], []),
        ("<|python_tag|>", "", [], ["not valid JSON"]),
    ],
)
def test_calls_of_llama_3_are_found_or_explained(answer, text, calls, errors):
    parser = ToolParser.get_tool_parser("llama3")
    parsed = parser.parse(answer, {})
    assert (parsed.text, parsed.calls) == (text, calls)
    assert len(parsed.errors) == len(errors) and all(map(str.__contains__, parsed.errors, errors))
    assert parser.parse(parser.write("weather", {"city": "Rome"}), {}).calls == [ROME]


@pytest.mark.parametrize(
    ("answer", "text", "calls", "errors"),
    [
        ("weather(Rome) it is", "", [], ["must be a line of its own"]),
        ("It is f(x) here", "It is f(x) here", [], []),
        ("So:\nslow(0.5)", "So:", [ToolCall("slow", {"seconds": "0.5"})], []),
        ("slow(0.5", "", [], ["the call of slow must be a line of its own that ends in )"]),
        ('weather("Rome", 3)', "", [ToolCall("weather", {"city": "Rome", "days": 3})], []),
        ('weather({"city": "Rome"})', "", [ROME], []),
        ("weather(Rome)", "", [], ["write the call as weather(city, days, unit, tags)"]),
        ("unknown(3)", "", [ToolCall("unknown", {})], []),
        ("slow((1+2)*3)", "", [ToolCall("slow", {"seconds": "(1+2)*3"})], []),
    ],
)
def test_plain_calls_are_found_or_explained(answer, text, calls, errors):
    parsed = ToolParser.get_tool_parser("plain").parse(answer, BOTH)
    assert (parsed.text, parsed.calls) == (text, calls)
    assert len(parsed.errors) == len(errors) and all(map(str.__contains__, parsed.errors, errors))
