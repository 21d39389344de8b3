"""Calls as lines name(argument)."""

import pytest

from data.tool_parsers import ToolCall, ToolParser
from tests.test_tools import BOTH, ROME


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
def test_calls_are_found_or_explained(answer, text, calls, errors):
    parsed = ToolParser.get_tool_parser("plain").parse(answer, BOTH)
    assert (parsed.text, parsed.calls) == (text, calls)
    assert len(parsed.errors) == len(errors) and all(map(str.__contains__, parsed.errors, errors))
