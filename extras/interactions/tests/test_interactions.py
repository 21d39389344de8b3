"""Simulated users: found in yaml files and named by rows, and the conversations that they lead."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.schema import DataConfig, MultiTurnConfig, RolloutConfig
from custom.tiny_model import build_tokenizer
from data.files import dump_jsonl
from data.rl_dataset import RLHFDataset
from data.sampler import PromptLoader, SequentialSampler
from extras.http.http import RequestRefused
from extras.interactions.base import load_interactions
from extras.interactions.endpoint import EndpointInteraction
from extras.tools.conversations import ToolEpisodes
from extras.tools.tool_episode import ToolEpisode
from tests.servers import answering
from training.preparation import check_rows
from workers.agents.user_code import Overdue

GSM8K = "interaction: [{class_name: extras.interactions.gsm8k.Gsm8kInteraction, config: {}}]"
TWICE = "{class_name: extras.interactions.base.BaseInteraction}"
SCRIPTED = "interaction: [{name: user, class_name: extras.interactions.scripted.ScriptedInteraction}]"


def row(**kwargs: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "What is 9 + 9?"}]
    return {"raw_prompt_ids": [1], "raw_prompt": prompt, "extra_info": {"interaction_kwargs": kwargs}}


def talk(episode: ToolEpisode, *answers: str) -> list[Any]:
    async def conversation() -> list[Any]:
        try:
            return [await episode.step(answer) for answer in answers]
        finally:
            await episode.close()

    return asyncio.run(conversation())


def episodes(path: str, **settings: Any) -> ToolEpisodes:
    return ToolEpisodes(MultiTurnConfig(enable=True, interaction_config_path=path, **settings))


def test_verls_user_asks_until_the_answer_is_right(write):
    make = episodes(write("users.yaml", GSM8K))
    assert make.users.interactions["gsm8k"].config == {"name": "gsm8k"}, "the name of its class"
    episode = make(row(name="gsm8k", query="…", ground_truth="18"))
    wrong, right = talk(episode, "#### 17", "#### 18")
    [message] = wrong.messages
    assert message["role"] == "user" and "Your response is incorrect!" in message["content"]
    assert (wrong.reward, wrong.end_reason) == (0.0, None)
    assert (right.reward, right.end_reason) == (1.0, "terminated")
    assert asyncio.run(episode.finish()).columns["turn_scores"] == [0.0, 1.0]


def test_a_script_is_said_line_by_line_and_ends_early_where_that_is_asked_for(write):
    make = episodes(write("users.yaml", SCRIPTED))
    script = ["And then?", "Why?"]
    replies = talk(make(row(name="user", script=script)), "a", "b", "c")
    assert [reply.messages[0]["content"] for reply in replies[:2]] == script
    assert [reply.end_reason for reply in replies] == [None, None, "terminated"]
    [only] = talk(make(row(name="user", script=script, until="^yes")), "yes!")
    assert (only.end_reason, only.reward) == ("terminated", 1.0)
    assert not make.users.interactions["user"].lines  # forgotten with the conversations


def test_the_last_answer_is_scored_at_the_limit_of_turns(write):
    path = write("users.yaml", GSM8K)
    kwargs = {"name": "gsm8k", "ground_truth": "18"}
    [wrong] = talk(episodes(path, max_assistant_turns=1)(row(**kwargs)), "#### 17")
    assert (wrong.end_reason, wrong.reward, wrong.messages) == ("max_turns", 0.0, [])
    _, right = talk(episodes(path, max_user_turns=1)(row(**kwargs)), "#### 17", "#### 18")
    assert (right.end_reason, right.reward) == ("terminated", 1.0)


def test_tools_and_a_user_take_their_turns(write):
    tools = write("tools.yaml", "tools: [{class_name: extras.tools.calculator.Calculator}]")
    make = episodes(write("users.yaml", GSM8K), tool_config_path=tools, format="plain")
    replies = talk(make(row(name="gsm8k", ground_truth="18")), "calculator(9+9)", "17", "#### 18")
    assert [reply.messages[0]["role"] for reply in replies[:2]] == ["tool", "user"]
    assert replies[2].end_reason == "terminated"


def test_a_user_that_raises_or_hangs_is_the_episodes_failure(write):
    path = write(
        "mine.py",
        """
        import asyncio
        from extras.interactions.base import BaseInteraction

        class Mine(BaseInteraction):
            async def generate_response(self, instance_id, messages, mood=None, **kwargs):
                if mood == "bad":
                    raise RuntimeError("no more")
                await asyncio.sleep(60)
        """,
    )
    make = episodes(write("users.yaml", f"interaction: [{{class_name: '{path}:Mine'}}]"), tool_timeout=0.1)
    with pytest.raises(RuntimeError, match="no more"):
        talk(make(row(name="mine", mood="bad")), "a")
    with pytest.raises(Overdue):
        talk(make(row(name="mine")), "a")


# Files and rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools: []", "must hold one key, 'interaction'"),
        (
            "interaction: [{class_name: data.tools.BaseTool}]",
            "must be a subclass of extras.interactions.base.BaseInt",
        ),
        ("interaction: [{clas_name: x.Y}]", r"interaction\[0\] has the keys \['clas_name'\]"),
        (f"interaction: [{TWICE}, {TWICE}]", "Duplicate interaction name 'base' found in .*give each"),
        ("interaction: [{class_name: extras.interactions.endpoint.EndpointInteraction}]", "base_url is not set"),
    ],
)
def test_a_yaml_that_cannot_be_used_says_where_and_why(write, text, words):
    with pytest.raises(ValueError, match=words):
        load_interactions(write("users.yaml", text))


def loader(folder: Path, rows: list[dict[str, Any]]) -> PromptLoader:
    dump_jsonl(folder / "rows.jsonl", rows)
    config = DataConfig()
    dataset = RLHFDataset(folder / "rows.jsonl", build_tokenizer(), config=config)
    return PromptLoader(dataset, 1, SequentialSampler(dataset, config))


@pytest.mark.parametrize(
    ("kwargs", "words"), [({}, "row 1: 'name' key is required"), ({"name": "who"}, "row 1: .*'who'.* has user")]
)
def test_rows_are_checked_before_anything_expensive(write, tmp_path, kwargs, words):
    rows = [{"prompt": "a", "extra_info": {"interaction_kwargs": one}} for one in ({"name": "user"}, kwargs)]
    users = MultiTurnConfig(enable=True, interaction_config_path=write("users.yaml", SCRIPTED))
    rollout, conversations = RolloutConfig(multi_turn=users), ToolEpisodes(users)
    check_rows(rollout, loader(tmp_path, rows[:1]), [], conversations)
    with pytest.raises(ConfigError, match=words):
        check_rows(rollout, loader(tmp_path, rows), [], conversations)


# A user that a model plays


def test_another_model_plays_the_user(write):
    seen = []

    def answer(method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        seen.append({"path": path, **body})
        said = "More, please." if len(body["messages"]) < 5 else "Thanks <end>"
        return 200 if body["model"] == "it" else 404, {"choices": [{"message": {"content": said}}]}

    with answering(answer, key="k") as address:
        url = f"{address}/v1"
        config = f"{{base_url: '{url}', model: it, api_key: k, sampling: {{max_tokens: 9}}}}"
        entry = f"{{name: user, class_name: extras.interactions.endpoint.EndpointInteraction, config: {config}}}"
        make = episodes(write("users.yaml", f"interaction: [{entry}]"))
        first, last = talk(make(row(name="user", persona="You are hungry.")), "soup?", "bread?")
        refused = EndpointInteraction({"base_url": url, "model": "none", "api_key": "k"})
        with pytest.raises(RequestRefused, match="chat/completions refused the request, status 404"):
            asyncio.run(refused.generate_response("1", []))
    assert first.messages == [{"role": "user", "content": "More, please."}]
    assert last.end_reason == "terminated"
    assert (seen[0]["path"], seen[0]["max_tokens"]) == ("/v1/chat/completions", 9)
    assert seen[0]["messages"][0]["content"].endswith("You are hungry.")
    assert [message["role"] for message in seen[0]["messages"]] == ["system", "assistant", "user"]
