"""The agents of examples/, each with the real package, where it is installed (requirements-agents.txt)."""

import pytest

from configs.paths import ROOT
from custom.tiny_model import build_tokenizer
from data.chat import encode_prompt
from data.protocol import DataProto
from data.types import SamplingParams
from examples.calculator_task import make_rows
from tests.engines import Scripted
from tests.forked import python
from tests.runs import compose
from training.environment import assign_agents
from workers.agent_loop import AgentLoop

TOKENIZER = build_tokenizer()
ROWS = make_rows("val", seed=0, count=3)
CALLS_ONE_TOOL = ["calc({question})", "{answer}"]
OWN_REWARDS = [1.0, 1.0, 0.0]
PROGRAMS = {  # the package, the program, what the policy says in turn, and the rewards that the program returns
    "openai": ("openai", "examples/openai_agent.py:play", ["calc({question})", "submit({answer})"], None),
    "sdk": ("agents", "examples/openai_agents_sdk.py:play", CALLS_ONE_TOOL, OWN_REWARDS),
    "langchain": ("langchain_openai", "python examples/langchain_agent.py", CALLS_ONE_TOOL, OWN_REWARDS),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_agent_calls_the_calculator_and_repeats_what_it_says(name):
    package, program, sayings, rewards = PROGRAMS[name]
    pytest.importorskip(package)
    config = compose(f"actor_rollout_ref.rollout.agent.program='{program}'", name="calculator_tool")
    truths = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in ROWS}
    wrong = ROWS[2]["prompt"][0]["content"]  # is guessed

    def say(text: str, times: int) -> str:
        question = text.partition("?")[0] + "?"
        saying = "12" if question == wrong else sayings["<|tool|>" in text]
        return saying.format(question=question.removesuffix("=?"), answer=truths[question])

    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    columns["raw_prompt"] = columns.pop("prompt")
    columns["raw_prompt_ids"] = [encode_prompt(prompt, TOKENIZER) for prompt in columns["raw_prompt"]]
    loop = AgentLoop(config, TOKENIZER, Scripted(config, TOKENIZER, say), None)
    sampling = SamplingParams(True, 1.0, -1, 1.0, 16, stop_token_ids=(TOKENIZER.eos_token_id,))
    prompts = assign_agents(DataProto.from_single_dict(columns), config)
    batch = loop.generate_sequences(prompts, sampling, seed=7, first_row=0)
    assert batch.failure.tolist() == [None] * 3 and batch.end_reason.tolist() == ["terminated"] * 3
    assert batch.non_tensor_batch["__reward_score__"].tolist() == (rewards or [None] * 3)
    for row, text in zip(ROWS, TOKENIZER.batch_decode(batch.responses, skip_special_tokens=True), strict=True):
        question = row["prompt"][0]["content"]
        parts = [saying.format(question=question[:-2], answer=truths[question]) for saying in sayings]
        assert text == ("12" if question == wrong else f"{parts[0]}<|tool|>{truths[question]}{parts[1]}")


@pytest.mark.parametrize(
    ("name", "package"), zip(PROGRAMS, ("openai", "openai-agents", "langchain-openai"), strict=True)
)
def test_without_its_package_an_agent_says_what_to_install(name, package):
    module, program, *_ = PROGRAMS[name]
    file = program.removeprefix("python ").partition(":")[0]
    ran = python("-c", f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path('{ROOT}/{file}')")
    assert f"needs the package {package}: pip install -c constraints.txt -r requirements-agents.txt" in ran.stderr
