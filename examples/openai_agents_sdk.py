"""An agent of the OpenAI Agents SDK: its Runner keeps the conversation and runs the tools.

    python -m scripts.multiturn --task calculator_tool actor_rollout_ref.rollout.multi_turn.enable=false \
        actor_rollout_ref.rollout.multi_turn.tool_config_path=null \
        actor_rollout_ref.rollout.agent.program=examples/openai_agents_sdk.py:play

Needs the package openai-agents (requirements-agents.txt). It says its reward itself.
"""

import math
import re
from typing import Any

from openai import AsyncOpenAI

try:
    from agents import Agent, AgentsException, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
except ImportError as error:
    raise ImportError(
        "this agent needs the package openai-agents: pip install -c constraints.txt -r requirements-agents.txt "
        f"({error})"
    ) from error

CLIENT = AsyncOpenAI(api_key="of each task")  # one for all, as each has a pool of connections
SETTINGS = RunConfig(tracing_disabled=True)  # else it sends what was said to api.openai.com


@function_tool
def calc(expression: str) -> str:
    """Multiplies whole numbers.

    Args:
        expression: the product, e.g. 12*34.
    """
    return str(math.prod(map(int, re.findall(r"\d+", expression))))


async def play(base_url: str, api_key: str, messages: list[dict], reward_model: dict[str, Any]) -> float:
    """Returns 1 if the final answer is the right number, else 0."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    agent = Agent("calculator", model=OpenAIChatCompletionsModel("policy", client), tools=[calc])
    try:
        result = await Runner.run(agent, messages, max_turns=2, run_config=SETTINGS)
    except AgentsException:  # no final answer, or a call of what is no tool
        return 0.0
    return float(result.final_output.strip() == reward_model["ground_truth"])
