"""Environments of the package verifiers (0.1.x), which has datasets and rubrics of its own.

    python -m examples.verifiers_env wordle outputs/wordle '{"num_train_examples": 500}'
    python main.py data.train_files=outputs/wordle/train.jsonl data.val_files=outputs/wordle/val.jsonl …

writes the environment's rows to files. One of a single turn is then scored by its rubric, whose parts are logged:

    reward.custom_reward_function.path=examples/verifiers_env.py reward.custom_reward_function.name=rubric

One of several turns, or with tools, plays its rows itself, by the policy's endpoint (docs/agents.md):

    actor_rollout_ref.rollout.agent.program=examples/verifiers_env.py:play
"""

import asyncio
import json
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

try:
    import verifiers as vf
    from openai import AsyncOpenAI
    from verifiers.utils.message_utils import normalize_messages
except ImportError as error:
    raise ImportError(f"verifiers_env needs the package verifiers: pip install 'verifiers<0.2' ({error})") from error


@cache
def environment(made_by: str) -> vf.Environment:
    """Returns the environment of a JSON list: its id, and its arguments."""
    env_id, arguments = json.loads(made_by)
    with patch("signal.signal"):  # it would take Ctrl-C and SIGTERM, which are the run's
        return vf.load_environment(env_id, **arguments)


def write_rows(env_id: str, folder: str, arguments: str = "{}") -> None:
    """Writes train.jsonl and val.jsonl: each row as the environment has it, with its id and arguments."""
    made_by = json.dumps([env_id, json.loads(arguments)])
    env = environment(made_by)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, dataset in {"train": env.get_dataset(), "val": env.get_eval_dataset()}.items():
        rows = [{"prompt": row["prompt"], "data_source": env_id, "made_by": made_by, "input": row} for row in dataset]
        Path(folder, f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


async def rubric(completions, uid, made_by, input):
    """Scores the responses to each prompt together, as rubrics that compare them need it."""
    client = vf.OpenAIChatCompletionsClient(AsyncOpenAI(api_key="none"))  # which nothing asks
    states, groups = [], {}
    for row, completion, *group in zip(input, completions, uid, made_by, strict=True):
        env = environment(group[1])
        state = await env.init_state(row, client, "policy")
        await env.setup_state(state)
        state["completion"] = normalize_messages(completion)
        state["trajectory"] = [{"advantage": None, "reward": None}]
        states.append(state)
        groups.setdefault(tuple(group), []).append(state)
    scorings = [environment(made_by).rubric.score_group(group) for (_, made_by), group in groups.items()]
    await asyncio.gather(*scorings)
    return [{**state["metrics"], "score": state["reward"]} for state in states]


async def play(base_url, api_key, made_by, input):
    """Has the environment play a row, and score it, also one of a policy that says nothing."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        output = await environment(made_by).run_rollout(input, vf.OpenAIChatCompletionsClient(client), "policy", {})
    if output["error"] and output["error"]["error"] != "EmptyModelResponseError":
        raise RuntimeError(output["error"]["error_chain_str"])
    return output["reward"]


if __name__ == "__main__":
    write_rows(*sys.argv[1:])
