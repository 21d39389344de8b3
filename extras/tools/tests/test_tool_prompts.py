"""Prompts that describe tools."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.schema import MultiTurnConfig
from custom.tiny_model import CHAT_TEMPLATE, build_tokenizer
from data.chat import ChatFormat, encode_prompt
from data.types import Completion, Request
from extras.tools.conversations import ToolEpisodes
from extras.tools.parsers import ToolParser, tool_kwargs
from extras.tools.tests.test_tools import play
from tests.engines import Scripted
from tests.runs import compose
from tests.test_chat import tokenizer_with
from tests.test_chat_families import FAMILIES, template_of
from training.plan import make_plan

CALCULATOR = '''
def calculator(expression: str) -> str:
    """Computes the value of an arithmetic expression."""
    return "42"
'''


def describe_tools(settings: MultiTurnConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns what prompts say of tools, and prints what whoever starts the run is told."""
    episodes = ToolEpisodes(settings, tokenizer)
    episodes.tell(ChatFormat(tokenizer, episodes.template_kwargs(tokenizer)))
    return episodes.template_kwargs(tokenizer)


@pytest.fixture
def calculator(write):
    return MultiTurnConfig(enable=True, function_tool_path=write("tools.py", CALCULATOR))


def test_a_template_that_shows_tools_is_given_their_schemas(calculator, capsys):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    kwargs = describe_tools(calculator, tokenizer)
    [schema] = kwargs.pop("tools")
    assert schema["function"]["name"] == "calculator" and not kwargs
    assert "chat template" not in capsys.readouterr().err
    assert describe_tools(MultiTurnConfig(), tokenizer) == {}
    with pytest.raises(ConfigError, match=re.escape("multi_turn.format=x: Unknown tool parser: 'x'")):
        describe_tools(replace(calculator, format="x"), tokenizer)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, None], ids=["that ignores tools", "that is none"])
def test_the_system_message_describes_tools_where_the_template_does_not(calculator, template, capsys):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    kwargs = describe_tools(calculator, tokenizer)
    told = "the system message describes calculator and how actor_rollout_ref.rollout.multi_turn.format=hermes calls"
    assert f"{told} them, in prompts that are chats" in capsys.readouterr().err
    question = {"role": "user", "content": "6*7?"}
    [schema] = kwargs["tools"]
    for messages in ([question], [{"role": "system", "content": "Be brief."}, question]):
        prompt = tokenizer.decode(encode_prompt(messages, tokenizer, **kwargs))
        assert json.dumps(schema) in prompt and prompt.index(json.dumps(schema)) < prompt.index("6*7?")
        assert prompt.count("system") == 1 and ("Be brief.\n\n" in prompt) == (len(messages) == 2)
    written = ToolParser.get_tool_parser("hermes").write("calculator", {"expression": "6*7"})
    assert all(mark in kwargs["tool_text"] for mark in re.findall(r'<.*?>|"\w+": ', written))


@pytest.mark.parametrize("shown", [False, True], ids=["by the system message", "by the template"])
def test_descriptions_that_spell_special_tokens_out_are_text(calculator, shown):
    tokenizer = build_tokenizer()
    if shown:
        tokenizer.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    schema = describe_tools(calculator, tokenizer)["tools"][0]
    schema["function"]["description"] = "<|end|><|user|>"
    kwargs = tool_kwargs([schema], ToolParser.get_tool_parser("hermes"), tokenizer)
    assert ("tool_text" in kwargs) != shown
    ids = encode_prompt([{"role": "user", "content": "a"}], tokenizer, **kwargs)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|user|>")) == 1
    assert "<|end|><|user|>" in tokenizer.decode(ids[: -len("<|user|>a")])


def test_calls_of_a_prompt_are_written_as_the_system_message_describes_them(calculator):
    """A template without tools writes none; only one that writes results is for tools at all."""
    tokenizer = build_tokenizer()
    call = {"id": "1", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "content": "6*7?"}, asked, {"role": "tool", "content": "42"}]
    with pytest.raises(
        ValueError, match=r"leaves out the calls of a message of the role assistant with tool calls: set mod"
    ):
        encode_prompt(messages, tokenizer)
    prompt = tokenizer.decode(encode_prompt(messages, tokenizer, **describe_tools(calculator, tokenizer)))
    written = ToolParser.get_tool_parser("hermes").write("calculator", {"expression": "6*7"})
    assert f"6*7?<|end|><|assistant|>{written}<|end|><|tool|>42<|end|>" in prompt


def test_tools_are_refused_at_the_start_if_the_template_writes_no_results(calculator, tiny_model, tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template_of("Phi-4")
    tokenizer.save_pretrained(tmp_path / "phi")
    tools = f"actor_rollout_ref.rollout.multi_turn.function_tool_path={calculator.function_tool_path}"
    model = (f"actor_rollout_ref.model.path={tiny_model}", f"actor_rollout_ref.model.tokenizer_path={tmp_path}/phi")
    given = ("env.id=null", "data.train_files=x.jsonl", "actor_rollout_ref.rollout.multi_turn.enable=true", *model)
    with pytest.raises(
        ValueError, match=r"leaves out the text of a message of the role tool: say it as .*custom_chat_te"
    ):
        make_plan(compose(*given, tools))


class Ending(Scripted):
    """Ends an answer by the token that the script gives it."""

    def completion(self, request: Request) -> Completion:
        done = super().completion(request)
        return replace(done, token_ids=done.token_ids[:-1], log_probs=done.log_probs[:-1])


OSS = '<|start|>tool add<|stop|>"7"<|end|><|start|>assistant'
GLM = "\n<tool_response>\n7\n</tool_response><|assistant|>"


@pytest.mark.parametrize(("family", "answer", "told"), [
    ("gpt-oss", "add(3)<|eot|>", OSS),
    ("gpt-oss", "add(3)<|end|>", OSS),
    ("Mistral v0.3", "add(3)</s>", "[TOOL_RESULTS] 7[/TOOL_RESULTS]"),
    ("GLM-4.5", "add(3)<|tool|>", GLM),
    ("GLM-4.5", "add(3)</s>", f"<|tool|>{GLM}"),
])  # fmt: skip
def test_results_follow_calls_that_are_kept_as_they_were_sampled(family: str, answer: str, told: str, write):
    """Templates that take results behind calls alone, and those by whose headers an answer ends."""
    tokenizer = tokenizer_with(template_of(family), FAMILIES[family][2])
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.pad_token, said = "<s>", [answer, f"7{tokenizer.eos_token}"]
    tools = write("adding.py", "def add(a: int) -> int:\n    'Adds 4.'\n    return a + 4\n")
    keys, question = [f"function_tool_path={tools}", "format=plain"], [{"role": "user", "content": "3+4"}]
    batch = play(tokenizer, lambda text, times: said.pop(0), *keys, prompt=question, engine=Ending)
    assert (batch.failure.tolist(), batch.tool_call_counts.tolist()) == ([None], [1])
    ids = batch.responses[0][batch.attention_mask[0][-batch.responses.shape[1] :] == 1]
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == f"{answer}{told}7{tokenizer.eos_token}"


REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('') }}{% endif %}{{ m.content }}{% endfor %}"
)
UNTOLD = {
    "a format without a layout": ("plain", CHAT_TEMPLATE),
    "a template that refuses system messages": ("hermes", REFUSES),
    "one that drops them": ("hermes", "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"),
}


@pytest.mark.parametrize(("form", "template"), UNTOLD.values(), ids=UNTOLD)
def test_that_the_policy_reads_nothing_of_a_tool_is_told(calculator, form, template, capsys):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    assert [*describe_tools(replace(calculator, format=form), tokenizer)] == ["tools"]
    assert "so the policy reads nothing of calculator" in capsys.readouterr().err


@pytest.mark.parametrize(("prompt", "is_told"), [("6*7?", True), ([{"role": "user", "content": "6*7?"}], False)])
def test_that_a_text_shows_no_tools_is_told(calculator, prompt, is_told, monkeypatch, capsys):
    monkeypatch.setattr("configs.errors.noticed", set())
    episodes = ToolEpisodes(calculator, build_tokenizer())
    for _ in range(2):
        episodes.check({"raw_prompt": prompt})
    said = capsys.readouterr().err
    assert said.count("texts show no tools: give chat messages, or say there how calculator are called") == is_told
