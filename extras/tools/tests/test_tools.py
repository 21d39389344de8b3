"""Tools: schemas from hints and docstrings, files of tools, calls in answers, and what runs them."""

import asyncio
import inspect
import random
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import pytest
from transformers import PreTrainedTokenizerBase

from configs.extras import TABLE
from configs.import_utils import load_module
from configs.schema import MultiTurnConfig
from data.chat import encode_prompt
from data.protocol import DataProto
from data.tools import BaseTool, FunctionTool, ToolResponse, function_tool, schema_of_text
from data.types import Reply, SamplingParams
from extras.tools.conversations import ToolEpisodes, load_tools
from extras.tools.parsers import ToolParser
from extras.tools.tool_episode import ToolEpisode
from extras.tools.toolbox import Toolbox, checked_arguments, truncate
from tests.engines import Playing, Scripted
from tests.runs import compose
from training.environment import assign_agents


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


def load(yaml: str | None, functions: str | None = None) -> dict[str, BaseTool]:
    return load_tools(MultiTurnConfig(tool_config_path=yaml, function_tool_path=functions))


def toolbox(*tools: BaseTool, form: str = "hermes", **settings: Any) -> Toolbox:
    settings = MultiTurnConfig(**settings)
    return Toolbox({tool.name: tool for tool in tools}, ToolParser.get_tool_parser(form), settings)


def respond(box: Toolbox, answer: str) -> Reply:
    return asyncio.run(box.respond(box.parse(answer)))


def called(name: str, **arguments: Any) -> str:
    return ToolParser.get_tool_parser("hermes").write(name, arguments)


def play(
    tokenizer: PreTrainedTokenizerBase,
    answer: Callable[[str, int], str],
    *settings: str,
    prompt: Any = "1+1=?",
    engine: type[Scripted] = Scripted,
    **columns: list,
) -> DataProto:
    """Plays episodes of a prompt, a chat or a text, on an engine that says `answer`; `settings` are multi_turn's."""
    sizes = ["env.id=null", "data.train_files=x.jsonl", "data.max_prompt_length=64", "data.max_response_length=400"]
    keys = [f"actor_rollout_ref.rollout.multi_turn.{setting}" for setting in ("enable=true", *settings)]
    config, count = compose(*sizes, *keys), max(map(len, columns.values()), default=1)
    rows = {"raw_prompt": [prompt], "raw_prompt_ids": [encode_prompt(prompt, tokenizer)], "data_source": ["sums"]}
    rows = {name: column * count for name, column in (rows | {"extra_info": [{}]}).items()}
    rows = assign_agents(DataProto.from_single_dict(rows | columns), config)
    playing = Playing(config, engine(config, tokenizer, answer), None)
    return playing.generate_sequences(rows, SamplingParams(True, 1.0, -1, 1.0, 200), seed=7)


# Schemas


def test_a_schema_from_hints_and_docstring():
    properties = {
        "city": {"type": "string", "description": "where: a name, or a code"},
        "days": {"type": "integer", "description": "how many"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    function = {"name": "weather", "description": "Says the weather of a city.", "parameters": parameters}
    assert WEATHER.tool_schema == {"type": "function", "function": function}
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
    assert described["a"] == {"type": "object", "additionalProperties": {"type": "number"}, "description": "the one"}
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


def tool_of(kind: Any) -> BaseTool:
    """A tool with an argument x of this type, or of one of these."""
    parameters = {"type": "object", "properties": {"x": {"type": kind}}}
    return BaseTool({}, {"type": "function", "function": {"name": "f", "parameters": parameters}})


@pytest.mark.parametrize(
    ("tool", "arguments", "expected"),
    [
        (WEATHER, {"city": "Rome"}, {"city": "Rome"}),
        (WEATHER, {"city": 7, "days": "3"}, {"city": "7", "days": 3}),
        (WEATHER, {"city": "R", "days": 2.0, "tags": None}, {"city": "R", "days": 2, "tags": None}),
        (WEATHER, {"city": "R", "tags": '["a"]'}, {"city": "R", "tags": ["a"]}),
        (WEATHER, {}, "the argument 'city' is missing"),
        (WEATHER, {"town": "Rome"}, "there is no argument 'town'; the arguments are city, days, unit, tags"),
        (WEATHER, {"city": "R", "days": "two"}, "the argument 'days' must be of type integer"),
        (WEATHER, {"city": "R", "days": True}, "the argument 'days' must be of type integer"),
        (WEATHER, {"city": "R", "days": 1.5}, "the argument 'days' must be of type integer"),
        (WEATHER, {"city": "R", "unit": "K"}, "the argument 'unit' must be one of C, F"),
        (WEATHER, {"city": ["R"]}, "the argument 'city' must be of type string"),
        (tool_of(["string", "null"]), {"x": None}, {"x": None}),
        (tool_of(["string", "null"]), {"x": 7}, {"x": "7"}),
        (tool_of(["integer", "string"]), {"x": "7"}, {"x": "7"}),
        (tool_of(["integer", "number"]), {"x": "7"}, {"x": 7}),
        (tool_of(["array", "null"]), {"x": "[1]"}, {"x": [1]}),
        (tool_of(["integer", "null"]), {"x": "seven"}, "the argument 'x' must be of type integer or null"),
        (tool_of(["integer", "boolean"]), {"x": None}, "the argument 'x' must be of type integer or boolean"),
    ],
)
def test_arguments_are_brought_to_the_schema_or_explained(tool, arguments, expected):
    refused = (
        pytest.raises(ValueError, match=f"^{re.escape(expected)}$") if isinstance(expected, str) else nullcontext()
    )
    with refused:
        assert checked_arguments(tool.tool_schema, arguments) == expected


@pytest.mark.parametrize("kind", ["text", ["string", "text"], {"a": 1}])
def test_an_unknown_type_in_a_schema_is_refused(kind):
    with pytest.raises(ValueError, match=r"with types of string, .* and null"):
        tool_of(kind)


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


def test_all_public_functions_are_tools_where_none_is_marked(write):
    file = write("functions.py", FUNCTIONS.format(mark="").replace("def helper(x)", "def _helper(x)"))
    assert [*load(None, file)] == ["double"]


def test_a_file_without_functions_is_refused(write):
    with pytest.raises(ValueError, match=r"function_tool_path=.*defines no function"):
        load(None, write("empty.py", "x = 1"))


# Calls in answers

BOTH = {"weather": WEATHER.tool_schema, "slow": FunctionTool(slow).tool_schema}


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
    box = toolbox(WEATHER, max_parallel_calls=3)
    respond(box, answer.replace("CALL", called("weather", city="Rome")))
    assert box.counts["calls"] == calls and not box.counts["malformed"]


@pytest.mark.parametrize("form", sorted(TABLE["format"]))
def test_a_thousand_mutated_calls_raise_nothing_and_only_good_ones_are_calls(form):
    rng, parser = random.Random(7), ToolParser.get_tool_parser(form)
    seeds = [parser.write("weather", {"city": "Ro\"m}e'", "days": 2}), parser.write("slow", {"seconds": 1}) * 2]
    pieces = ["<tool_call>", "</tool_call>", "<|python_tag|>", '"', "{", "}", "\\", "(", ")", "null", "1e999", "\ud800"]
    pieces += ["[" * 3000, "9" * 5000, "\0", "é", ";", "\n", '"name"', '"arguments":', "NaN"]
    kinds = set()
    for _ in range(1_000):
        text = rng.choice(seeds)
        for _ in range(rng.randint(1, 4)):
            place, end = sorted(rng.choices(range(len(text) + 1), k=2))
            text = text[:place] + rng.choice([*pieces, ""]) + text[end if rng.random() < 0.5 else place :]
        found = parser.parse(text, BOTH)
        assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in found.calls)
        kinds.add((bool(found.calls), bool(found.errors)))
    assert kinds >= {(True, False), (False, True), (False, False)}


def test_an_unknown_format_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"'herms'. Did you mean 'hermes'. There are hermes, (.*, )?plain"):
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
    reply = respond(box, "".join(called("meet", number=number) for number in range(50)))
    assert [message["content"] for message in reply.messages] == [str(number) for number in range(50)]
    assert box.counts == {"calls": 50}


def test_whatever_goes_wrong_is_told_to_the_policy_and_counted(write, capsys):
    of_the_user = load_module(write("mine.py", inspect.getsource(broken))).broken
    box = toolbox(WEATHER, FunctionTool(of_the_user), FunctionTool(slow), max_parallel_calls=5, tool_timeout=0.1)
    answer = called("weather", city="Rome") + called("nothing") + called("weather") + called("broken", x=3)
    reply = respond(box, answer + called("slow", seconds=9) + "<tool_call>{</tool_call>" + called("slow", seconds=0))
    texts = [message["content"] for message in reply.messages]
    assert texts[:3] == [
        "Rome 1 C None",
        "Error: there is no tool 'nothing'; there are weather, broken, slow",
        "Error: the argument 'city' is missing",
    ]
    assert texts[3:5] == ["Error when executing tool: no 3", "Error: no answer in 0.1 seconds"]
    assert texts[5].startswith("Error: a call is not valid JSON") and texts[6].startswith("Error: not run, as only 5")
    failures = ("unknown_tool", "bad_arguments", "raised", "timeout", "malformed", "not_run")
    assert box.counts == {"calls": 7, **dict.fromkeys(failures, 1)}
    assert {message["role"] for message in reply.messages} == {"tool"}
    assert re.search(r"the tool broken raised RuntimeError: no 3 \(.*mine.py:\d+\)", capsys.readouterr().err)


def test_a_blocking_function_that_hangs_is_given_up():
    def hang(x: int) -> str:
        """Hangs."""
        time.sleep(0.5)

    box = toolbox(FunctionTool(hang), tool_timeout=0.1)
    respond(box, called("hang", x=1))
    assert box.counts["timeout"] == 1


def test_results_are_cut_on_the_named_side():
    assert truncate("abcdef", 6, "left") == "abcdef"
    assert truncate("abcdef", 4, "left") == "(truncated)...cdef"
    assert truncate("abcdef", 4, "right") == "abcd...(truncated)"
    assert truncate("abcdef", 4, "middle") == "ab...(truncated)...ef"


@pytest.mark.parametrize(
    ("call", "episode_pays", "earned"),
    [
        (None, [], (0, 0)),  # verl's SandboxFusionTool
        (0.0, ["what it found", "and more"], (0, 0)),  # verl's SearchTool
        ([0.5, 0.25], [1.0, None, "a text"], (0.75, 1)),
        (1, 2.5, (1, 2.5)),
        (0.5, None, (0.5, 0)),
    ],
)
def test_verls_tools_are_made_called_paid_and_released(call, episode_pays, earned):
    """Rewards are numbers, lists or None."""

    class Shout(BaseTool):
        tool_schema = schema_of_text("shout", "Shouts.", "text", "what to shout")

        async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
            self.loudness = kwargs["create_kwargs"]["loudness"]
            return "one", ToolResponse()

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple:
            answer = parameters["text"].upper() + "!" * self.loudness + f" by {instance_id}"
            return ToolResponse(text=ToolResponse(text=answer)), call, None

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            return episode_pays

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            self.loudness = None

    tool, kwargs = Shout(), {"shout": {"create_kwargs": {"loudness": 3}}}
    parser = ToolParser.get_tool_parser("hermes")
    episode = ToolEpisode(row("go"), Toolbox({"shout": tool}, parser, MultiTurnConfig(), kwargs))

    async def conversation() -> tuple[Any, Any]:
        answers = await episode.step(called("shout", text="a")), await episode.finish()
        await episode.close()
        return answers

    first, last = asyncio.run(conversation())
    assert first.messages[0]["content"] == "A!!! by one" and (first.reward, last.reward) == earned
    assert tool.loudness is None  # released


# Episodes


def row(prompt: Any, **info: Any) -> dict[str, Any]:
    return {"raw_prompt_ids": [1, 2], "raw_prompt": prompt, "extra_info": info}


CALC = """
    def calc(expression: str) -> str:
        "Computes."
        return str(eval(expression))
"""


def test_a_row_as_an_episode(write):
    episodes = ToolEpisodes(MultiTurnConfig(enable=True, function_tool_path=write("t.py", CALC), format="plain"))
    episode = episodes(row("12*7=?"))
    assert episode.prompt_ids == [1, 2] and episode.columns["tool_call_counts"] == 0
    reply = asyncio.run(episode.step("calc(12*7)"))
    assert reply.messages == [{"role": "tool", "name": "calc", "content": "84"}] and reply.end_reason is None
    reply = asyncio.run(episode.step("calc(1"))
    counts = {"tool_call_counts": 2, "invalid_actions": 1, "tool_failures": {"malformed": 1}}
    earned = {"tool_rewards": [0.0, 0.0], "turn_scores": [], "success": None}
    assert reply.columns == counts | earned | {"__messages__": episode.messages}
    assert not asyncio.run(episode.step("84")).messages


def test_calls_at_the_limit_of_turns_are_not_run(write):
    for limits in ({"max_assistant_turns": 1}, {"max_assistant_turns": 2}, {"max_user_turns": 1}):
        settings = MultiTurnConfig(enable=True, function_tool_path=write("t.py", CALC), format="plain", **limits)
        episode, replies = ToolEpisodes(settings)(row("?")), []
        while not replies or replies[-1].end_reason is None:
            replies.append(asyncio.run(episode.step("calc(1+1)")))
        assert replies[-1].end_reason == "max_turns" and episode.columns["tool_call_counts"] == len(replies) - 1
        assert len(replies) == limits.get("max_assistant_turns", 2)


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
    [(exits, "SystemExit: 3"), (cancels, "CancelledError: mine"), (gives_up, "TimedOut: at last")],
)
def test_whatever_a_tool_raises_is_an_answer_and_others_go_on(tool, says):
    box = toolbox(FunctionTool(tool), FunctionTool(slow), max_parallel_calls=2)
    reply = respond(box, called(tool.__name__) + called("slow", seconds=0.01))
    assert [message["content"] for message in reply.messages] == [f"Error when executing tool: {says}", "done"]


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

    async def all_at_once() -> list[Reply]:
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
