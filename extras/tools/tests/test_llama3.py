"""Calls of tools as Llama 3 writes them."""

import pytest

from data.tool_parsers import ToolCall, ToolParser

ROME = ToolCall("weather", {"city": "Rome"})


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
def test_calls_are_found_or_explained(answer, text, calls, errors):
    parser = ToolParser.get_tool_parser("llama3")
    parsed = parser.parse(answer, {})
    assert (parsed.text, parsed.calls) == (text, calls)
    assert len(parsed.errors) == len(errors) and all(map(str.__contains__, parsed.errors, errors))
    assert parser.parse(parser.write("weather", {"city": "Rome"}), {}).calls == [ROME]
