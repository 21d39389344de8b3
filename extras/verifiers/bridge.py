"""Bridges environments of the package verifiers (below 0.4), which has data sets and rubrics of its own.

`env.id=verifiers:NAME?split=train&KEY=VALUE` loads the environment NAME by load_environment(KEY=VALUE, …). Its rows are
the prompts. One of a single turn scores the answers by its rubric, one of several turns, or with tools, plays its rows
itself, by the policy's endpoint (extras/sessions).
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qsl

import yaml

from data.rows import Found, Origin
from data.types import Row


def package() -> ModuleType:
    """Raises ValueError, with the command that installs it, where verifiers is missing, or has other environments."""
    try:
        import verifiers
        from verifiers import load_environment  # noqa: F401  (0.4 has other environments)
    except ImportError as error:
        raise ValueError(
            "it needs the package verifiers before 0.4, from which on a harness plays tasks in a runtime, without data "
            f"sets and rubrics: pip install 'verifiers<0.4' ({error})"
        ) from None
    return verifiers


@cache
def environment(made_by: str) -> Any:
    """Returns the environment of a JSON list: its name, and its arguments."""
    name, arguments = json.loads(made_by)
    with patch("signal.signal"):  # it would take Ctrl-C and SIGTERM, which are the run's
        return package().load_environment(name, **arguments)


def made_by_of(name: str, settings: dict[str, str]) -> str:
    """Returns what `environment` makes it of: `settings` are YAML, and `split` is none of the environment's."""
    arguments = {key: yaml.safe_load(text) for key, text in settings.items() if key != "split"}
    return json.dumps([name, arguments])


def has_one_turn(env_id: str) -> bool:
    """Says whether the environment that env.id names asks the policy once, so that its rubric alone is needed."""
    name, _, query = env_id.partition(":")[2].partition("?")
    return isinstance(environment(made_by_of(name, dict(parse_qsl(query)))), package().SingleTurnEnv)


def read_rows(source: str, name: str, settings: dict[str, str]) -> Iterator[Found]:
    """Reads the rows of an environment, each with what made it; of its split `split`: train, or eval."""
    made_by = made_by_of(name, settings)
    env = environment(made_by)
    dataset = env.get_eval_dataset() if settings.get("split") == "eval" else env.get_dataset()
    for number, row in enumerate(dataset):
        columns = {"prompt": row["prompt"], "data_source": name, "made_by": made_by, "input": dict(row)}
        yield Origin(source, number), columns


async def rubric(
    completions: Sequence[Any], uid: Sequence[str], made_by: Sequence[str], input: Sequence[Row]
) -> list[dict[str, float]]:
    """Scores the responses to each prompt together, as rubrics that compare them need it."""
    from openai import AsyncOpenAI
    from verifiers.utils.message_utils import normalize_messages

    client = package().OpenAIChatCompletionsClient(AsyncOpenAI(api_key="none"))  # which nothing asks
    states, groups = [], {}
    for row, completion, *group in zip(input, completions, uid, made_by, strict=True):
        env = environment(group[1])
        state = await env.init_state(row, client, "policy")
        await env.setup_state(state)
        state["completion"] = normalize_messages(completion)
        state["trajectory"] = [{"advantage": None, "reward": None}]
        states.append(state)
        groups.setdefault(tuple(group), []).append(state)
    await asyncio.gather(*(environment(by).rubric.score_group(group) for (_, by), group in groups.items()))
    return [{**state["metrics"], "score": state["reward"]} for state in states]


async def play(base_url: str, api_key: str, made_by: str, input: Row) -> float:
    """Has the environment play a row, and score it, also one of a policy that says nothing."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai_client:
        client = package().OpenAIChatCompletionsClient(openai_client)
        output = await environment(made_by).run_rollout(input, client, "policy", {})
    if output["error"] and output["error"]["error"] != "EmptyModelResponseError":
        raise RuntimeError(output["error"]["error_chain_str"])
    return output["reward"]
