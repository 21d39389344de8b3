"""Files of tools, the tools that are shipped, and a run with the calculator."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from configs.schema import MultiTurnConfig
from custom.tiny_model import build_tokenizer
from data.chat import encode_prompt
from data.files import dump_jsonl
from data.protocol import DataProto
from data.tool_parsers import ToolParser
from data.types import SamplingParams
from examples.arithmetic import compute_score
from examples.calculator_task import demonstrations, make_rows
from extras.report.transcripts import sample_rows
from extras.tools.calculator import as_text, calculate
from extras.tools.search import Index
from extras.tools.tests.test_tools import FUNCTIONS, called, load, respond, toolbox
from extras.tools.toolbox import Toolbox
from extras.try_reward.__main__ import read_views, score_rows
from tests.engines import Playing, Scripted
from tests.runs import compose
from training.environment import assign_agents
from training.reward import add_scores
from training.reward_function import FunctionReward

CALCULATOR = "{class_name: extras.tools.calculator.Calculator}"
NAMED = "{class_name: data.tools.BaseTool, name: f,"
GUIDES = """
    tools:
      - name: add
        description: Adds.
        {runs}
        parameters:
          - {{name: a, type: number, description: The first.}}
          - {{name: b, type: number, required: false}}
"""


@pytest.mark.parametrize("runs", ["function: {folder}/plain.py:add", "class_name: {folder}/plain.py:Add"])
def test_a_yaml_may_list_parameters_as_guides_do(write, tmp_path, runs):
    write(
        "plain.py",
        """
        from data.tools import BaseTool, ToolResponse
        def add(a, b=1): return a + b
        class Add(BaseTool):
            async def execute(self, instance_id, parameters, **kwargs):
                return ToolResponse(text=str(add(**parameters))), 0.0, {}
        """,
    )
    tools = load(write("tools.yaml", GUIDES.format(runs=runs.format(folder=tmp_path))), None)
    properties = {"a": {"type": "number", "description": "The first."}, "b": {"type": "number"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    described = {"name": "add", "description": "Adds.", "parameters": parameters}
    assert tools["add"].tool_schema["function"] == described
    assert respond(toolbox(*tools.values()), called("add", a=2)).messages[0]["content"] == "3"


def test_a_yaml_describes_a_function_in_other_words(write, tmp_path):
    write("functions.py", FUNCTIONS.format(mark="@function_tool"))
    yaml = write("t.yaml", f"tools: [{{function: {tmp_path}/functions.py:double, description: D}}]")
    [tool] = load(yaml, None).values()
    assert (tool.name, tool.tool_schema.function.description) == ("double", "D")
    assert [*tool.tool_schema["function"]["parameters"]["properties"]] == ["x"], "from its hints"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools: [", "this is not yaml"),
        ("- 1", "must hold one key, 'tools', with a list"),
        ("tools: []", "must hold one key, 'tools', with a list"),
        ("tools: [1]", r"tools\[0\] is 1; it must be a mapping"),
        ("tools: [{class_name: a.b.C, clas: 1}]", r"tools\[0\] has the keys \['clas'\]; it may have class_name"),
        ("tools: [{name: f, parameters: []}]", r"tools\[0\] runs nothing: set `function: file.py:name`, or `class_"),
        (f"tools: [{NAMED} parameters: [{{type: string}}]}}]", r"parameters has {'type': 'string'}: .* with a name"),
        ("tools: [{class_name: C}]", r"tools\[0\].class_name is 'C'; it must name an object"),
        ("tools: [{class_name: no.such.Class}]", r"tools\[0\].class_name is 'no.such.Class': "),
        ("tools: [{class_name: data.tools.Nothing}]", r"tools\[0\].class_name .* has no 'Nothing'; it has .*BaseTool"),
        (
            "tools: [{class_name: data.tools.ToolResponse}]",
            "it must be a subclass of extras.tools.tool_classes.BaseTool",
        ),
        ("tools: [{class_name: data.tools.BaseTool}]", "has no schema: give tool_schema in the yaml"),
        ("tools: [{class_name: data.tools.BaseTool, config: {type: soap}}]", "config.type is 'soap'; it must be nativ"),
        ("tools: [{config: {type: mcp}}]", r"tools\[0\].mcp is {}; it must have mcp_servers_config_path"),
        ("tools: [{class_name: data.tools.BaseTool, tool_schema: {type: function}}]", "not in OpenAI's format"),
        (f"tools: [{NAMED} parameters: {{type: list}}}}]", "must have type: object"),
        (f"tools: [{NAMED} parameters: {{type: object, required: [x]}}}}]", r"required names \['x'\], which prop"),
        (
            f"tools: [{NAMED} parameters: {{type: object, properties: {{x: text}}}}}}]",
            "x is text; it must be a mapping",
        ),
        ("tools: [{class_name: extras.tools.search.Search}]", "config.corpus is not set"),
        (f"tools: [{CALCULATOR}, {CALCULATOR}]", "two tools are called 'calculator': rename one"),
    ],
)
def test_a_yaml_that_cannot_be_used_says_where_and_why(write, text, words):
    file = write("tools.yaml", text)
    with pytest.raises(ValueError, match=f"(?s)^{re.escape(file)}.*{words}"):
        load(file, None)


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
    told = f"calc({expression})<|end|><|tool|>{product}<|end|><|assistant|>{product}<|end|>"
    assert tokenizer.decode(response[attended]) == told
    assert tokenizer.decode(response[mask], skip_special_tokens=True) == f"calc({expression}){product}"
    assert (batch.tool_call_counts[0], batch.non_tensor_batch["__num_turns__"][0]) == (1, 2)
    assert batch.token_level_scores.sum() == batch.token_level_scores[0, mask.nonzero()[-1]] == 1
    file, facts = write("1.jsonl", ""), {"num_turns": 4, "tool_call_counts": 1, "tool_rewards": [0.0]}
    dump_jsonl(file, sample_rows(batch, tokenizer, step=1))
    [view] = read_views(file, needs_response=True)
    assert view["responses"] == f"calc({expression})\n{product}" and view["extra_info"].items() >= facts.items()
    assert score_rows([view], FunctionReward(compute_score))[0].score == 1, "a dump is scored again"


def test_few_demonstrations_of_the_calculator_task_call_and_none_is_of_a_held_out_question():
    shown = [row["messages"] for row in demonstrations(1000, 0)]
    held_out = {row["prompt"][0]["content"] for row in make_rows("val", 0, 200)}
    assert not {messages[0]["content"] for messages in shown} & held_out
    assert 100 < sum(len(messages) == 4 for messages in shown) < 200


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
    entry = f"{{class_name: extras.tools.search.Search, config: {{corpus: {corpus}, top_k: 1}}}}"
    yaml = write("t.yaml", f"tools: [{entry}]")
    box = toolbox(*load(yaml, None).values())
    assert respond(box, called("search", query="norway")).messages[0]["content"] == "[1] Oslo\nCapital of Norway."
    assert respond(box, called("search", query="paris")).messages[0]["content"] == "Nothing was found."


def test_verls_gsm8k_tool_pays_for_progress_alone(write):
    yaml = write("t.yaml", "tools: [{class_name: extras.tools.gsm8k.Gsm8kTool}]")
    [tool] = load(yaml, None).values()
    kwargs = {tool.name: {"create_kwargs": {"ground_truth": "18"}}}
    box = Toolbox({tool.name: tool}, ToolParser.get_tool_parser("hermes"), MultiTurnConfig(), kwargs)
    assert [respond(box, called(tool.name, answer=answer)).reward for answer in ("17", "18", "18")] == [-0.05, 0, -0.05]
    assert asyncio.run(box.finish()) == 1.0


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
    entry = f"{{config: {{type: mcp}}, mcp: {{mcp_servers_config_path: {folder}/servers.json{more}}}}}"
    (folder / "tools.yaml").write_text(f"tools: [{entry}]")
    return str(folder / "tools.yaml")


def test_the_tools_of_an_mcp_server_are_listed_and_called(tmp_path: Path):
    pytest.importorskip("mcp.client.client")  # of mcp 2
    (tmp_path / "sums.py").write_text(MCP_SERVER)
    server = {"command": sys.executable, "args": [str(tmp_path / "sums.py")]}
    tools = load(mcp_yaml(tmp_path, server), None)
    assert [*tools] == ["add", "fail"] and tools["add"].tool_schema.function.description == "Adds two numbers."
    assert tools["add"].tool_schema["function"]["parameters"]["required"] == ["a", "b"]
    response, reward, _ = asyncio.run(tools["add"].execute("one", {"a": 1, "b": 2}))
    assert (response.text, reward) == ("3", 0.0)
    with pytest.raises(RuntimeError, match="fail"):
        asyncio.run(tools["fail"].execute("one", {"why": "so"}))
    with pytest.raises(ValueError, match=r"tool_selected_list has \['gone'\]; the servers have add, fail"):
        load(mcp_yaml(tmp_path, server, ", tool_selected_list: [gone]"), None)


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
        load(mcp_yaml(tmp_path, server), None)
