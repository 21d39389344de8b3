"""A loop of OpenAI's client with two tools, calc and submit, that knows nothing of this repository.

    python -m scripts.multiturn --task calculator_tool actor_rollout_ref.rollout.multi_turn.enable=false \
        actor_rollout_ref.rollout.multi_turn.tool_config_path=null \
        actor_rollout_ref.rollout.agent.program=examples/openai_agent.py:play

calls the function in threads, 64 at once. It says no reward: the run's scores what the policy has said.
"""

import json
import math
import re

try:
    from openai import OpenAI
except ImportError as error:
    raise ImportError(
        f"this agent needs the package openai: pip install -c constraints.txt -r requirements-agents.txt ({error})"
    ) from error

CLIENT = OpenAI(api_key="of each task")  # one for all, as each has a pool of connections


def calc(expression: str) -> str:
    """Multiplies whole numbers, e.g. 12*34."""
    return str(math.prod(map(int, re.findall(r"\d+", expression))))


def submit(expression: str) -> str:
    """Submits the final answer."""
    return "submitted"


TOOLS = {function.__name__: function for function in (calc, submit)}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
SCHEMAS = [
    {"type": "function", "function": {"name": name, "description": tool.__doc__, "parameters": PARAMETERS}}
    for name, tool in TOOLS.items()
]


def run(name: str, arguments: str) -> str:
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError):
        return f"there is no {name}, or not with these arguments"


def play(base_url: str, api_key: str, messages: list[dict]) -> None:
    """Asks until the policy submits or calls nothing, at most twice."""
    client, messages = CLIENT.with_options(base_url=base_url, api_key=api_key), [*messages]
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS).choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or []:
            result = run(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if messages[-1] is answer or messages[-1]["content"] == "submitted":
            return
