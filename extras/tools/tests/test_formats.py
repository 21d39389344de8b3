"""Calls of tools in the formats that only some models need."""

import pytest

from data.tool_parsers import ToolCall, ToolParser
from extras.tools.tests.test_tools import BOTH, ROME
from extras.tools.toolbox import checked_arguments


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


NESTED = {"city": "Rome", "tags": ["a", {"b": [1, None]}], "days": 3}
XML = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
HARMONY = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
THOUGHT = '<|channel|>analysis<|message|>Call {"city": "Oslo"}?<|end|><|start|>assistant'


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls", "errors"),
    [
        ("qwen3_coder", "No call.", "No call.", [], []),
        ("qwen3_coder", f"So:\n<tool_call>\n{XML}\n</tool_call>", "So:", [ROME], []),
        ("qwen3_coder", f"{XML} and {XML}", "and", [ROME] * 2, []),
        ("qwen3_coder", f"<tool_call>\n{XML}\n{XML}\n</tool_call>\nDone.", "Done.", [ROME] * 2, []),
        (
            "qwen3_coder",
            "<function=slow><parameter=code>\nif a < b:\n\n    print('</p>')\n</parameter></function>",
            "",
            [ToolCall("slow", {"code": "if a < b:\n\n    print('</p>')"})],
            [],
        ),
        ("qwen3_coder", "<function=f></function>", "", [ToolCall("f", {})], []),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1", "", [], ["the call of f is not closed"]),
        ("qwen3_coder", '<function=f>{"a": 1}</function>', "", [], ["write each argument of f as <parameter=NAME>"]),
        (
            "qwen3_coder",
            '<tool_call>{"name": "f"}</tool_call>',
            '<tool_call>{"name": "f"}</tool_call>',
            [],
            ["a call is"],
        ),
        ("glm", "No call.", "No call.", [], []),
        ("glm", f"So: {GLM}\n{GLM} Done.", "So: \n Done.", [ROME] * 2, []),
        ("glm", "<tool_call>f</tool_call>", "", [ToolCall("f", {})], []),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>", "", [], ["</tool_call> is missing"]),
        ("glm", '<tool_call>{"name": "f"}</tool_call>', "", [], ["a call is the function's name"]),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key></tool_call>", "", [], ["a call is the function's name"]),
        ("gpt-oss", "No call.", "No call.", [], []),
        ("gpt-oss", "<|channel|>final<|message|>Hot.<|return|>", "Hot.", [], []),
        ("gpt-oss", THOUGHT + HARMONY, "", [ROME], []),
        (
            "gpt-oss",
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY}",
            "I look.",
            [ROME],
            [],
        ),
        ("gpt-oss", f"{HARMONY}<|start|>assistant{HARMONY}", "", [ROME] * 2, []),
        (
            "gpt-oss",
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}',
            "",
            [ROME],
            [],
        ),
        ("gpt-oss", HARMONY.replace('"}', ""), "", [], ["the arguments of weather are no JSON object"]),
        ("gpt-oss", HARMONY.replace("functions.weather", "python"), "", [], ["there is no python"]),
        ("gpt-oss", "<|channel|>commentary to=functions.weather ", "", [], ["the call of functions.weather is cut"]),
    ],
)
def test_calls_of_other_models_are_found_or_explained(form, answer, text, calls, errors):
    parsed = ToolParser.get_tool_parser(form).parse(answer, BOTH)
    assert (parsed.text, parsed.calls) == (text, calls)
    assert len(parsed.errors) == len(errors) and all(map(str.__contains__, parsed.errors, errors))


@pytest.mark.parametrize("form", ["qwen3_coder", "glm", "gpt-oss"])
def test_what_a_parser_writes_it_reads_and_nested_values_become_what_the_schema_says(form):
    parser = ToolParser.get_tool_parser(form)
    written = "\n".join(parser.write(name, arguments) for name, arguments in [("weather", NESTED), ("f", {})])
    first, second = parser.parse(written, BOTH).calls
    assert checked_arguments(BOTH["weather"], first.arguments) == NESTED and second == ToolCall("f", {})
