"""A chat model of LangChain with a tool, in a virtual environment of its own, which need not hold this repository's.

    python -m venv /tmp/langchain && /tmp/langchain/bin/pip install -c constraints.txt -r requirements-agents.txt
    python main.py … actor_rollout_ref.rollout.agent.program="/tmp/langchain/bin/python examples/langchain_agent.py"

OPENAI_BASE_URL and OPENAI_API_KEY lead it to the policy. Its last line is the reward.
"""

import json
import math
import re
import sys

try:
    from langchain_openai import ChatOpenAI
except ImportError as error:
    remedy = "pip install -c constraints.txt -r requirements-agents.txt"
    sys.exit(f"this agent needs the package langchain-openai: {remedy} ({error})")


def calc(expression: str) -> str:
    """Multiplies whole numbers, e.g. 12*34."""
    return str(math.prod(map(int, re.findall(r"\d+", expression))))


task = json.loads(sys.stdin.readline())
model, messages = ChatOpenAI(model="policy").bind_tools([calc]), task["messages"]
for _ in range(2):
    answer = model.invoke(messages)
    messages.append(answer)
    for call in answer.tool_calls:
        result = calc(call["args"].get("expression", ""))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if not answer.tool_calls:
        break
print(float(answer.text.strip() == task["reward_model"]["ground_truth"]))
