"""Tools: schemas from hints and docstrings, files of tools, calls in answers, and what runs them."""

import asyncio
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from configs.schema import MultiTurnConfig, ScoringConfig
from custom.tiny_model import build_tokenizer
from data.chat import encode_prompt
from data.files import dump_jsonl
from data.protocol import DataProto
from data.tool_parsers import ToolCall, ToolParser
from data.tools import BaseTool, FunctionTool, ToolResponse, checked_arguments, function_tool
from data.types import SamplingParams
from examples.arithmetic import compute_score
from examples.calculator_task import demonstrations, make_rows
from extras.report.transcripts import sample_rows
from extras.tools.calculator import as_text, calculate
from extras.tools.files import load_tools
from extras.tools.sandbox import PythonSandbox
from extras.tools.search import Index
from extras.try_reward.__main__ import read_views, score_rows
from extras.verl.compat import OpenAIFunctionParametersSchema, OpenAIFunctionSchema, OpenAIFunctionToolSchema
from tests.engines import Playing, Scripted
from tests.runs import compose
from training.environment import assign_agents
from training.reward import add_scores
from training.reward_function import FunctionReward
from workers.agents import user_code
from workers.agents.conversation import ToolEpisode, ToolEpisodes
from workers.agents.toolbox import Toolbox, ToolReplies, truncate


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """Says the weather
    of a city.

    It is made up.

    Args:
        city: where: a name,
            or a code
        days (int): how many
    """
    return f"{city} {days} {unit} {tags}"


WEATHER = FunctionTool(weather)


async def slow(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "done"


def broken(x: int) -> int:
    """Fails."""
    raise RuntimeError(f"no {x}")


def toolbox(*tools: BaseTool, form: str = "hermes", **settings: Any) -> Toolbox:
    settings = MultiTurnConfig(**settings)
    return Toolbox({tool.name: tool for tool in tools}, ToolParser.get_tool_parser(form), settings)


def respond(box: Toolbox, answer: str) -> ToolReplies:
    return asyncio.run(box.respond(box.parse(answer)))


def called(name: str, **arguments: Any) -> str:
    return ToolParser.get_tool_parser("hermes").write(name, arguments)


# Schemas


def test_a_schema_from_hints_and_docstring():
    assert WEATHER.tool_schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where: a name, or a code"},
                    "days": {"type": "integer", "description": "how many"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
                },
                "required": ["city"],
            },
        },
    }
    assert WEATHER("Rome") == "Rome 1 C None"  # it is still the function


def test_sphinx_arguments_and_another_name():
    @function_tool(name="other")
    def mine(a: dict[str, float], b: bool):
        """Does it.

        :param a: the one
        :param b: the other
        """

    tool = mine.function_tool
    assert tool.name == "other"
    described = tool.tool_schema["function"]["parameters"]["properties"]
    assert described["a"] == {
        "type": "object",
        "additionalProperties": {"type": "number"},
        "description": "the one",
    }
    assert described["b"]["description"] == "the other"


def no_docstring(x: int): ...


def no_hint(x):
    """Does."""


def bytes_hint(x: bytes):
    """Does."""


def stars(*x: int):
    """Does."""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_docstring, "no docstring"),
        (no_hint, "parameter x has no type hint: give it one of str"),
        (bytes_hint, "no JSON type stands for: use one of str"),
        (stars, "spell it out"),
    ],
)
def test_a_function_that_no_schema_describes_is_refused_with_the_remedy(function, words):
    with pytest.raises(ValueError, match=f"{function.__name__} .*test_tools.py.*{words}"):
        FunctionTool(function)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"city": "Rome"}, {"city": "Rome"}),
        ({"city": 7, "days": "3"}, {"city": "7", "days": 3}),
        ({"city": "R", "days": 2.0, "tags": None}, {"city": "R", "days": 2, "tags": None}),
        ({"city": "R", "tags": '["a"]'}, {"city": "R", "tags": ["a"]}),
        ({}, "the argument 'city' is missing"),
        ({"town": "Rome"}, "there is no argument 'town'; the arguments are city, days, unit, tags"),
        ({"city": "R", "days": "two"}, "the argument 'days' must be of type integer"),
        ({"city": "R", "days": True}, "the argument 'days' must be of type integer"),
        ({"city": "R", "days": 1.5}, "the argument 'days' must be of type integer"),
        ({"city": "R", "unit": "K"}, "the argument 'unit' must be one of C, F"),
        ({"city": ["R"]}, "the argument 'city' must be of type string"),
    ],
)
def test_arguments_are_brought_to_the_schema_or_explained(arguments, found):
    if isinstance(found, dict):
        assert checked_arguments(WEATHER.tool_schema, arguments) == found
    else:
        with pytest.raises(ValueError, match=f"^{re.escape(found)}$"):
            checked_arguments(WEATHER.tool_schema, arguments)


@pytest.mark.parametrize(
    ("kinds", "value", "found"),
    [
        (["string", "null"], None, None),
        (["string", "null"], 7, "7"),
        (["integer", "string"], "7", "7"),
        (["integer", "number"], "7", 7),
        (["array", "null"], "[1]", [1]),
        (["integer", "null"], "seven", "the argument 'x' must be of type integer or null"),
        (["integer", "boolean"], None, "the argument 'x' must be of type integer or boolean"),
    ],
)
def test_an_argument_may_have_one_of_several_types(kinds, value, found):
    parameters = {"type": "object", "properties": {"x": {"type": kinds}}}
    schema = BaseTool({}, {"type": "function", "function": {"name": "f", "parameters": parameters}}).tool_schema
    if isinstance(found, str) and found.startswith("the argument"):
        with pytest.raises(ValueError, match=f"^{found}$"):
            checked_arguments(schema, {"x": value})
    else:
        assert checked_arguments(schema, {"x": value}) == {"x": found}


@pytest.mark.parametrize("kind", ["text", ["string", "text"], {"a": 1}])
def test_an_unknown_type_in_a_schema_is_refused(kind):
    parameters = {"type": "object", "properties": {"x": {"type": kind}}}
    with pytest.raises(ValueError, match=r"with one or several of the types string, .* and null"):
        BaseTool({}, {"type": "function", "function": {"name": "f", "parameters": parameters}})


def test_verls_schema_classes_are_read_by_attribute_and_by_key():
    parameters = OpenAIFunctionParametersSchema(type="object", properties={"x": {"type": "string"}}, required=["x"])
    function = OpenAIFunctionSchema(name="f", description="Does.", parameters=parameters)
    schema = OpenAIFunctionToolSchema(type="function", function=function)
    assert schema.function.parameters.properties.x.type == "string"
    assert OpenAIFunctionToolSchema.model_validate(schema.model_dump(exclude_unset=True)) == schema
    assert BaseTool({}, schema).name == "f"
    schema.model_dump()["function"]["name"] = "other"  # of a dict of its own
    assert schema["function"]["name"] == "f"
    with pytest.raises(AttributeError, match="the schema has no 'nam'"):
        schema.nam  # noqa: B018


def test_a_tool_answers_by_text_alone():
    assert ToolResponse(text="a").is_text_only() and ToolResponse().is_empty()
    with pytest.raises(ValueError, match="the policy reads text"):
        ToolResponse(image=[1])


# Files

FUNCTIONS = """
    from data.tools import function_tool
    import os

    def helper(x):
        return x

    {mark}
    def double(x: int) -> int:
        "Doubles a number."
        return 2 * x
"""
CALCULATOR = "{class_name: extras.tools.calculator.Calculator}"
VERLS_TOOL = """
    from data.tools import BaseTool, ToolResponse

    class Shout(BaseTool):
        async def create(self, instance_id=None, **kwargs):
            self.loudness = kwargs["create_kwargs"].get("loudness", 1)
            return "one", ToolResponse()

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text=parameters["text"].upper() + "!" * self.loudness), 0.5, {}

        async def calc_reward(self, instance_id, **kwargs):
            return 2.0

        async def release(self, instance_id, **kwargs):
            self.loudness = None
"""
SHOUT = """
    tools:
      - class_name: "{place}/shout.py:Shout"
        config: {{type: native}}
        tool_schema:
          type: function
          function:
            name: shout
            description: Shouts.
            parameters: {{type: object, properties: {{text: {{type: string}}}}, required: [text]}}
"""


def test_tools_of_both_files(write, tmp_path):
    write("shout.py", VERLS_TOOL)
    yaml = write("tools.yaml", SHOUT.format(place=tmp_path))
    tools = load_tools(yaml, write("functions.py", FUNCTIONS.format(mark="@function_tool")))
    assert [*tools] == ["shout", "double"]
    box = toolbox(*tools.values())
    assert respond(box, called("shout", text="hey")).messages[0]["content"] == "HEY!"
    assert respond(box, called("double", x=4)).messages[0]["content"] == "8"


def test_all_public_functions_are_tools_where_none_is_marked(write):
    file = write("functions.py", FUNCTIONS.format(mark="").replace("def helper(x)", "def _helper(x)"))
    assert [*load_tools(None, file)] == ["double"]


def test_a_yaml_may_be_flat_and_name_functions(write, tmp_path):
    write("functions.py", FUNCTIONS.format(mark=""))
    write("shout.py", VERLS_TOOL)
    yaml = write(
        "tools.yaml",
        f"""
        tools:
          - function: {tmp_path}/functions.py:double
            name: twice
          - class_name: {tmp_path}/shout.py:Shout
            name: cry
            description: Cries.
            parameters: {{type: object, properties: {{text: {{type: string}}}}}}
        """,
    )
    assert [*load_tools(yaml, None)] == ["twice", "cry"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools: [", "this is not yaml"),
        ("- 1", "must hold one key, 'tools', with a list"),
        ("tools: []", "must hold one key, 'tools', with a list"),
        ("tools: [1]", r"tools\[0\] is 1; it must be a mapping"),
        ("tools: [{class_name: a.b.C, clas: 1}]", r"tools\[0\] has the keys \['clas'\]; it may have class_name"),
        ("tools: [{config: {}}]", r"tools\[0\].class_name is None; it must name an object"),
        ("tools: [{class_name: C}]", r"tools\[0\].class_name is 'C'; it must name an object"),
        ("tools: [{class_name: no.such.Class}]", r"tools\[0\].class_name is 'no.such.Class': "),
        ("tools: [{class_name: data.tools.Nothing}]", r"tools\[0\].class_name .* has no 'Nothing'; it has .*BaseTool"),
        ("tools: [{class_name: data.tools.ToolResponse}]", "it must be a subclass of data.tools.BaseTool"),
        ("tools: [{class_name: data.tools.BaseTool}]", "has no schema: give tool_schema in the yaml"),
        (
            "tools: [{class_name: data.tools.BaseTool, config: {type: soap}}]",
            "config.type is 'soap'; it must be native",
        ),
        ("tools: [{config: {type: mcp}}]", r"tools\[0\].mcp is {}; it must have mcp_servers_config_path"),
        (
            "tools: [{class_name: data.tools.BaseTool, tool_schema: {type: function}}]",
            "not in OpenAI's function format",
        ),
        ("tools: [{class_name: data.tools.BaseTool, name: f, parameters: {type: list}}]", "must have type: object"),
        (
            "tools: [{class_name: data.tools.BaseTool, name: f, parameters: {type: object, required: [x]}}]",
            r"required names \['x'\], which properties does not",
        ),
        (
            "tools: [{class_name: data.tools.BaseTool, name: f, parameters: {type: object, properties: {x: text}}}]",
            "properties.x is text; it must be a mapping",
        ),
        ("tools: [{class_name: extras.tools.search.Search}]", "config.corpus is not set"),
        (
            "tools: [{class_name: extras.tools.sandbox.PythonSandbox, config: {second: 3}}]",
            r"config has the keys \['second'\]; it may have name, seconds, memory_mb, output_chars",
        ),
        (
            f"tools: [{CALCULATOR}, {CALCULATOR}]",
            "two tools are called 'calculator'; .* Rename one",
        ),
    ],
)
def test_a_yaml_that_cannot_be_used_says_where_and_why(write, text, words):
    file = write("tools.yaml", text)
    with pytest.raises(ValueError, match=f"(?s)^{re.escape(file)}.*{words}"):
        load_tools(file, None)


def test_files_that_are_not_there_or_hold_nothing(write):
    with pytest.raises(FileNotFoundError, match=r"no\.yaml: there is no file"):
        load_tools("no.yaml", None)
    with pytest.raises(ValueError, match="defines no function: write one"):
        load_tools(None, write("empty.py", "x = 1"))


# Calls in answers

BOTH = {"weather": WEATHER.tool_schema, "slow": FunctionTool(slow).tool_schema}
ROME, WEATHER_1 = ToolCall("weather", {"city": "Rome"}), ToolCall("weather", {"city": 1})


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls", "errors"),
    [
        ("hermes", "No call.", "No call.", [], []),
        ("hermes", 'Hm.\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>', "Hm.", [ROME], []),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1}"}</tool_call>', "", [WEATHER_1], []),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>' * 2, "", [ToolCall("f", {})] * 2, []),
        ("hermes", "<tool_call>{'name'}</tool_call> so", "so", [], ["a call is not valid JSON"]),
        ("hermes", '<tool_call>{"name": "f"}', "", [], ["</tool_call> is missing"]),
        ("hermes", '<tool_call>[1<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", {})], ["is missing"]),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', "", [], ['needs a "name"']),
        ("hermes", '<tool_call>"f"</tool_call>', "", [], ['needs a "name"']),
        ("llama3", "No call.", "No call.", [], []),
        ("llama3", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME], []),
        ("llama3", 'So: <|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "So:", [ROME], []),
        ("llama3", '{"name": "f"}; {"name": "f"}', "", [ToolCall("f", {})] * 2, []),
        ("llama3", '{"name": "f"', "", [], ["not valid JSON"]),
        ("llama3", '{"name": "f"} then', "", [ToolCall("f", {})], ["not valid JSON"]),
        ("llama3", "{1, 2} is a set", "{1, 2} is a set", [], []),
        ("llama3", "<|python_tag|>", "", [], ["not valid JSON"]),
        ("plain", "weather(Rome) it is", "", [], ["must be a line of its own"]),
        ("plain", "It is f(x) here", "It is f(x) here", [], []),
        ("plain", "So:\nslow(0.5)", "So:", [ToolCall("slow", {"seconds": "0.5"})], []),
        ("plain", "slow(0.5", "", [], ["the call of slow must be a line of its own that ends in )"]),
        ("plain", 'weather("Rome", 3)', "", [ToolCall("weather", {"city": "Rome", "days": 3})], []),
        ("plain", 'weather({"city": "Rome"})', "", [ROME], []),
        ("plain", "weather(Rome)", "", [], ["write the call as weather(city, days, unit, tags)"]),
        ("plain", "unknown(3)", "", [ToolCall("unknown", {})], []),
        ("plain", "slow((1+2)*3)", "", [ToolCall("slow", {"seconds": "(1+2)*3"})], []),
    ],
)  # fmt: skip
def test_calls_are_found_or_explained(form, answer, text, calls, errors):
    found = ToolParser.get_tool_parser(form).parse(answer, BOTH)
    assert (found.text, found.calls) == (text, calls)
    assert len(found.errors) == len(errors) and all(map(str.__contains__, found.errors, errors))


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("<think>CALL</think>CALL", 1),
        ("CALL</think>\nCALL CALL", 2),  # the prompt has begun the thought
        ("CALL<think>CALL</think>CALL", 2),
        ("CALL<think>CALL", 1),  # cut
        ("CALL", 1),
    ],
)
def test_calls_in_thoughts_are_not_run(answer, calls):
    replies = respond(toolbox(WEATHER, max_parallel_calls=3), answer.replace("CALL", called("weather", city="Rome")))
    assert replies.counts["calls"] == calls and not replies.counts["malformed"]


@pytest.mark.parametrize("form", ToolParser.registry)
def test_what_a_parser_writes_it_reads(form):
    parser = ToolParser.get_tool_parser(form)
    for name, arguments in (("weather", {"city": "Rome", "days": 2}), ("slow", {"seconds": "1"})):
        assert parser.parse(parser.write(name, arguments), BOTH).calls == [ToolCall(name, arguments)]


@pytest.mark.parametrize("form", ToolParser.registry)
def test_ten_thousand_mutated_calls_raise_nothing_and_only_good_ones_are_calls(form):
    rng, parser = random.Random(7), ToolParser.get_tool_parser(form)
    seeds = [parser.write("weather", {"city": "Ro\"m}e'", "days": 2}), parser.write("slow", {"seconds": 1}) * 2]
    pieces = ["<tool_call>", "</tool_call>", "<|python_tag|>", '"', "{", "}", "\\", "(", ")", "null", "1e999", "\ud800"]
    pieces += ["[" * 3000, "9" * 5000, "\0", "é", ";", "\n", '"name"', '"arguments":', "NaN"]
    kinds = set()
    for _ in range(10_000 // len(ToolParser.registry) + 1):
        text = rng.choice(seeds)
        for _ in range(rng.randint(1, 4)):
            place, end = sorted(rng.choices(range(len(text) + 1), k=2))
            text = text[:place] + rng.choice([*pieces, ""]) + text[end if rng.random() < 0.5 else place :]
        found = parser.parse(text, BOTH)
        assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in found.calls)
        kinds.add((bool(found.calls), bool(found.errors)))
    assert kinds >= {(True, False), (False, True), (False, False)}


def test_an_unknown_format_is_refused_with_those_that_there_are():
    with pytest.raises(
        ValueError, match=r"Unknown tool parser: 'herms'. Did you mean 'hermes'. There are hermes, llama3"
    ):
        ToolParser.get_tool_parser("herms")


# What runs them


def test_parallel_calls_run_side_by_side_and_answer_in_order():
    waiting, everybody = [], asyncio.Event()

    async def meet(number: int) -> int:
        """Waits for all the others."""
        waiting.append(number)
        if len(waiting) == 50:
            everybody.set()
        await everybody.wait()
        return number

    box = toolbox(FunctionTool(meet), max_parallel_calls=50)
    replies = respond(box, "".join(called("meet", number=number) for number in range(50)))
    assert [message["content"] for message in replies.messages] == [str(number) for number in range(50)]
    assert replies.counts == {"calls": 50}


def test_whatever_goes_wrong_is_told_to_the_policy_and_counted(capsys):
    box = toolbox(WEATHER, FunctionTool(broken), FunctionTool(slow), max_parallel_calls=5, tool_timeout=0.1)
    answer = called("weather", city="Rome") + called("nothing") + called("weather") + called("broken", x=3)
    replies = respond(box, answer + called("slow", seconds=9) + "<tool_call>{</tool_call>" + called("slow", seconds=0))
    texts = [message["content"] for message in replies.messages]
    assert texts[:3] == [
        "Rome 1 C None",
        "Error: there is no tool 'nothing'; there are weather, broken, slow",
        "Error: the argument 'city' is missing",
    ]
    assert texts[3:5] == ["Error when executing tool: no 3", "Error: no answer in 0.1 seconds"]
    assert texts[5].startswith("Error: a call is not valid JSON") and texts[6].startswith("Error: not run, as only 5")
    failures = ("unknown_tool", "bad_arguments", "raised", "timeout", "malformed", "not_run")
    assert replies.counts == {"calls": 7, **dict.fromkeys(failures, 1)}
    assert {message["role"] for message in replies.messages} == {"tool"}
    assert re.search(r"the tool broken raised RuntimeError: no 3 \(.*test_tools.py:\d+\)", capsys.readouterr().err)


def test_a_blocking_function_that_hangs_is_given_up():
    def hang(x: int) -> str:
        """Hangs."""
        time.sleep(20)

    assert respond(toolbox(FunctionTool(hang), tool_timeout=0.1), called("hang", x=1)).counts["timeout"] == 1


def test_results_are_cut_on_the_named_side():
    assert truncate("abcdef", 6, "left") == "abcdef"
    assert truncate("abcdef", 4, "left") == "(truncated)...cdef"
    assert truncate("abcdef", 4, "right") == "abcd...(truncated)"
    assert truncate("abcdef", 4, "middle") == "ab...(truncated)...ef"


def test_the_lifecycle_of_verls_tools(write, tmp_path):
    write("shout.py", VERLS_TOOL)
    [tool] = load_tools(write("tools.yaml", SHOUT.format(place=tmp_path)), None).values()
    parser, kwargs = ToolParser.get_tool_parser("hermes"), {"shout": {"create_kwargs": {"loudness": 3}}}
    episode = ToolEpisode(
        row("go"), Toolbox({"shout": tool}, parser, MultiTurnConfig(), kwargs), None, MultiTurnConfig()
    )

    async def conversation() -> tuple[Any, Any]:
        first = await episode.step(called("shout", text="a"))
        last = await episode.step("bye")
        await episode.close()
        return first, last

    first, last = asyncio.run(conversation())
    assert first.messages[0]["content"] == "A!!!" and first.reward == 0.5
    assert last.reward == 2.0  # of calc_reward
    assert tool.loudness is None  # released


@pytest.mark.parametrize(
    ("call", "whole", "earned"),
    [
        (None, [], (0, 0)),  # verl's SandboxFusionTool
        (0.0, ["what it found", "and more"], (0, 0)),  # verl's SearchTool
        ([0.5, 0.25], [1.0, None, "a text"], (0.75, 1)),
        (1, 2.5, (1, 2.5)),
        (0.5, None, (0.5, 0)),
    ],
)
def test_rewards_of_tools_are_numbers_lists_or_none(call, whole, earned):
    class Paying(BaseTool):
        tool_schema = WEATHER.tool_schema

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple:
            return ToolResponse(text=ToolResponse(text="sunny")), call, None

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            return whole

    async def conversation() -> tuple[Any, Any]:
        episode = ToolEpisode(row("go"), toolbox(Paying()), None, MultiTurnConfig())
        return await episode.step(called("weather", city="Rome")), await episode.step("bye")

    first, last = asyncio.run(conversation())
    assert first.messages[0]["content"] == "sunny" and (first.reward, last.reward) == earned


# Episodes


def row(prompt: Any, **info: Any) -> dict[str, Any]:
    return {"raw_prompt_ids": [1, 2], "raw_prompt": prompt, "extra_info": info}


CALC = "tools: [{class_name: extras.tools.calculator.Calculator, config: {name: calc}}]"


def test_a_row_as_an_episode(write):
    episodes = ToolEpisodes(MultiTurnConfig(enable=True, tool_config_path=write("t.yaml", CALC), format="plain"))
    episode = episodes(row("12*7=?"))
    assert episode.prompt_ids == [1, 2] and episode.columns["tool_call_counts"] == 0
    reply = asyncio.run(episode.step("calc(12*7)"))
    assert reply.messages == [{"role": "tool", "name": "calc", "content": "84"}] and reply.end_reason is None
    reply = asyncio.run(episode.step("calc(1"))
    assert reply.columns == {
        "tool_call_counts": 2,
        "invalid_actions": 1,
        "tool_failures": {"malformed": 1},
        "tool_rewards": [0.0, 0.0],
        "turn_scores": [],
        "success": None,
        "__messages__": episode.messages,
    }
    assert not asyncio.run(episode.step("84")).messages


def test_calls_at_the_limit_of_turns_are_not_run(write):
    for limits in ({"max_assistant_turns": 1}, {"max_assistant_turns": 2}, {"max_user_turns": 1}):
        settings = MultiTurnConfig(enable=True, tool_config_path=write("t.yaml", CALC), format="plain", **limits)
        episode, replies = ToolEpisodes(settings)(row("?")), []
        while not replies or replies[-1].end_reason is None:
            replies.append(asyncio.run(episode.step("calc(1+1)")))
        assert replies[-1].end_reason == "max_turns" and episode.columns["tool_call_counts"] == len(replies) - 1
        assert len(replies) == limits.get("max_assistant_turns", 2)


def test_rows_with_tools_are_played_by_the_loop_and_scored_by_the_reward_function(write):
    """The call, its result and the answer are one response, of which the result is nobody's."""
    tokenizer, question = build_tokenizer(), make_rows("train", 0, 1)[0]
    config = compose(name="calculator_tool")
    product = question["reward_model"]["ground_truth"]
    expression = question["prompt"][0]["content"].removesuffix("=?")

    def answer(text: str, asked: int) -> str:
        return product if "calc(" in text else f"calc({expression})"

    prompts = {"raw_prompt": [question["prompt"]], "raw_prompt_ids": [encode_prompt(question["prompt"], tokenizer)]}
    columns = {name: [question[name]] for name in ("reward_model", "extra_info", "data_source")}
    rows = assign_agents(DataProto.from_single_dict(prompts | columns), config)
    sampling = SamplingParams.from_config(config.actor_rollout_ref.rollout, 48)
    batch = Playing(config, Scripted(config, tokenizer, answer), None).generate_sequences(rows, sampling, 0)
    batch = add_scores(batch, FunctionReward(compute_score), tokenizer)
    [response], [mask] = batch.batch["responses"], batch.batch["response_mask"].bool()
    [attended] = batch.batch["attention_mask"][:, -48:].bool()
    assert (
        tokenizer.decode(response[attended])
        == f"calc({expression})<|end|><|tool|>{product}<|end|><|assistant|>{product}<|end|>"
    )
    assert tokenizer.decode(response[mask], skip_special_tokens=True) == f"calc({expression}){product}"
    assert (batch.tool_call_counts[0], batch.non_tensor_batch["__num_turns__"][0]) == (1, 2)
    assert (
        batch.batch["token_level_scores"].sum() == 1 and batch.batch["token_level_scores"][0, mask.nonzero()[-1]] == 1
    )
    file, facts = write("1.jsonl", ""), {"num_turns": 4, "tool_call_counts": 1, "tool_rewards": [0.0]}
    dump_jsonl(file, sample_rows(batch, tokenizer, step=1))
    [view] = read_views(file, needs_response=True)
    assert view["responses"] == f"calc({expression}){product}" and view["extra_info"].items() >= facts.items()
    assert score_rows([view], FunctionReward(compute_score), ScoringConfig())[0].score == 1, "a dump is scored again"


def test_questions_of_the_calculator_task_are_not_shared_and_few_demonstrations_call():
    train, val = make_rows("train", 0, 500), make_rows("val", 0, 200)
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in (train, val)]
    assert list(map(len, asked)) == [500, 200] and not asked[0] & asked[1]
    for row in train:
        assert str(eval(row["prompt"][0]["content"].removesuffix("=?"))) == row["reward_model"]["ground_truth"]
    shown = demonstrations(1000, 0)
    calls = [row["messages"] for row in shown if len(row["messages"]) == 4]
    assert 100 < len(calls) < 200 and not {row["messages"][0]["content"] for row in shown} & asked[1]
    for question, call, result, answer in calls:
        assert call["content"] == f"calc({question['content'].removesuffix('=?')})"
        assert answer["content"] == result["content"] == str(calculate(call["content"][5:-1]))


# The shipped tools


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*7", "84"), ("(1+2)/4", "0.75"), ("2**10", "1024"), ("7//2 - -1", "4"), ("sqrt(2)", "1.414213562"),
     ("1/3*3", "1"), ("max(1, 2.5)", "2.5"), ("0.1+0.2", "0.3"), ("2^3", "8")],
)  # fmt: skip
def test_the_calculator_computes(expression, value):
    assert as_text(calculate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1/0", "9**9**9", "__import__('os')", "x", "1;2", "(" * 150, "'a'*9", "10**31", "True", "(-1)**0.5",
     "1e308*10", "sqrt(-1)", "[1]", "max()", "f(x=1)", "1" * 201, "1.0.real", "lambda: 1", "2**-1000"],
)  # fmt: skip
def test_the_calculator_refuses(expression):
    with pytest.raises(ValueError):
        calculate(expression)


def test_the_sandbox_shows_what_a_program_prints_and_how_it_ended():
    tool = PythonSandbox({"seconds": 60, "output_chars": 40})

    def shown(code: str) -> str:
        return asyncio.run(tool.execute("", {"code": code}))[0].text

    assert shown("print(6 * 7)") == "42" and shown("x = 1") == "(no output)"
    assert shown("1/0").endswith("…\nr: division by zero")
    assert shown("print('a' * 99)") == "a" * 20 + "\n…\n" + "a" * 19
    assert shown("import os; os.abort()").startswith("Ended by signal SIG")
    tool.limits["seconds"] = 0.5
    assert shown("while True: pass") == "Ended: it took more than 0.5 seconds."


def test_search_ranks_by_hand_made_scores():
    index = Index(["the cat sat", "the dog sat down", "a bird"])
    rarity = {1: 0.9808292530117263, 2: 0.4700036292457356}  # log(1 + (3 - n + 0.5) / (n + 0.5)), of n documents
    length = 0.25 + 0.75 * 3 / 3
    assert index.scores("cat")[0] == pytest.approx(rarity[1] * 2.2 / (1 + 1.2 * length))
    assert index.best("sat cat", 3) == [0, 1] and index.best("sat", 1) == [0] and index.best("whale", 3) == []
    assert index.scores("sat")[0] == pytest.approx(rarity[2] * 2.2 / (1 + 1.2 * length))


def test_search_over_a_file(write):
    documents = [{"title": "Rome", "text": "Capital of Italy."}, {"title": "Oslo", "text": "Capital of Norway."}]
    corpus = write("corpus.jsonl", "\n".join(map(json.dumps, documents)))
    yaml = write(
        "t.yaml", f"tools: [{{class_name: extras.tools.search.Search, config: {{corpus: {corpus}, top_k: 1}}}}]"
    )
    box = toolbox(*load_tools(yaml, None).values())
    assert respond(box, called("search", query="norway")).messages[0]["content"] == "[1] Oslo\nCapital of Norway."
    assert respond(box, called("search", query="paris")).messages[0]["content"] == "Nothing was found."


def test_verls_gsm8k_tool_pays_for_progress_alone(write):
    yaml = write("t.yaml", "tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool}]")
    [tool] = load_tools(yaml, None).values()
    kwargs = {tool.name: {"create_kwargs": {"ground_truth": "18"}}}
    box = Toolbox({tool.name: tool}, ToolParser.get_tool_parser("hermes"), MultiTurnConfig(), kwargs)
    rewards = [respond(box, called(tool.name, answer=answer)).rewards for answer in ("17", "18", "18")]
    assert rewards == [[-0.05], [0.0], [-0.05]]
    assert asyncio.run(box.finish()) == {tool.name: 1.0}


MCP_SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)

server.run("stdio")
'''


def mcp_yaml(folder: Path, server: dict, more: str = "") -> str:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"sums": server}}))
    path = folder / "tools.yaml"
    path.write_text(
        f"tools: [{{config: {{type: mcp}}, mcp: {{mcp_servers_config_path: {folder}/servers.json{more}}}}}]"
    )
    return str(path)


def test_the_tools_of_an_mcp_server_are_listed_and_called(tmp_path: Path):
    pytest.importorskip("mcp.client.client")  # of mcp 2
    (tmp_path / "sums.py").write_text(MCP_SERVER)
    server = {"command": sys.executable, "args": [str(tmp_path / "sums.py")]}
    tools = load_tools(mcp_yaml(tmp_path, server), None)
    assert [*tools] == ["add", "fail"] and tools["add"].tool_schema.function.description == "Adds two numbers."
    assert tools["add"].tool_schema["function"]["parameters"]["required"] == ["a", "b"]
    response, reward, _ = asyncio.run(tools["add"].execute("one", {"a": 1, "b": 2}))
    assert (response.text, reward) == ("3", 0.0)
    with pytest.raises(RuntimeError, match="fail"):
        asyncio.run(tools["fail"].execute("one", {"why": "so"}))
    with pytest.raises(ValueError, match=r"tool_selected_list has \['gone'\]; the servers have add, fail"):
        load_tools(mcp_yaml(tmp_path, server, ", tool_selected_list: [gone]"), None)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"command": "/no/such/server"}, r"the MCP server sums does not answer \(.*No such file"),
        ({"url": "http://127.0.0.1:1/mcp"}, r"the MCP server sums does not answer \("),
        ({}, "it must have a url, or a command"),
    ],
)
def test_a_server_that_is_not_there_is_named(tmp_path: Path, server: dict, said: str):
    pytest.importorskip("mcp.client.client")  # of mcp 2
    with pytest.raises(ValueError, match=said):
        load_tools(mcp_yaml(tmp_path, server), None)


# Tools that misbehave


async def exits() -> str:
    """Exits."""
    sys.exit(3)


async def cancels() -> str:
    """Cancels."""
    raise asyncio.CancelledError("mine")


class TimedOut(BaseException):
    """No Exception, as those of some packages that end calls."""


async def gives_up() -> str:
    """Gives up."""
    raise TimedOut("at last")


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (exits, "SystemExit: 3"),
        (cancels, "CancelledError: mine"),
        (gives_up, "TimedOut: at last"),
        (broken, "no 1"),
    ],
)
def test_whatever_a_tool_raises_is_an_answer_and_others_go_on(tool, says):
    box = toolbox(FunctionTool(tool), FunctionTool(slow), max_parallel_calls=2)
    calls = called(tool.__name__, **({"x": 1} if tool is broken else {})) + called("slow", seconds=0.01)
    replies = respond(box, calls)
    assert [message["content"] for message in replies.messages] == [f"Error when executing tool: {says}", "done"]


async def blocks(seconds: float) -> str:
    """Waits without an await."""
    time.sleep(seconds)
    return "woke up"


def test_an_async_tool_that_blocks_stops_no_other_and_is_moved_to_a_thread(monkeypatch, capsys):
    monkeypatch.setattr(user_code, "LONGEST_STEP", 0.1)
    blocking, waiting = FunctionTool(blocks), FunctionTool(slow)
    box = toolbox(blocking, waiting, max_parallel_calls=2, tool_timeout=0.6)
    texts = [message["content"] for message in respond(box, called("blocks", seconds=1.5)).messages]
    assert texts == ["Error: no answer in 0.6 seconds"] and blocking.blocks and not waiting.blocks
    assert "blocks keeps its event loop for more than 0.1 seconds without an await" in capsys.readouterr().err
    both = respond(box, called("blocks", seconds=0.3) + called("slow", seconds=0.05))
    assert [message["content"] for message in both.messages] == ["woke up", "done"]


def test_calls_of_a_tool_side_by_side_have_a_limit_and_waiting_has_no_deadline():
    running, most = [], []

    def busy(number: int) -> str:
        """Works."""
        running.append(number)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(number)
        return "done"

    tool = FunctionTool(busy)
    tool.max_concurrent = 3
    boxes = [toolbox(tool, tool_timeout=0.2) for _ in range(40)]

    async def all_at_once() -> list[ToolReplies]:
        calls = (box.respond(box.parse(called("busy", number=place))) for place, box in enumerate(boxes))
        return await asyncio.gather(*calls)

    replies = asyncio.run(all_at_once())
    assert max(most) <= 3 and {reply.messages[0]["content"] for reply in replies} == {"done"}


@pytest.mark.parametrize("text", [5, ["a"], "half \udc80"])
def test_a_tools_text_that_cannot_be_encoded_is_named(text):
    class Odd(FunctionTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple:
            return ToolResponse(text=text), 0.0, {}

    with pytest.raises(ValueError, match=r"the tool weather says .*(no text|cannot be encoded)"):
        respond(toolbox(Odd(weather)), called("weather", city="Rome"))
