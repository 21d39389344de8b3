"""Rewards of every form are scored alike in processes of their own; their failures there are located, and calls have
limits."""

import asyncio
from types import SimpleNamespace

import pytest

from configs.errors import ConfigError
from configs.schema import RewardConfig, RewardFunctionConfig
from data.protocol import DataProto
from extras.scorers.pool import AsyncTokenBucket, Scorers
from extras.weighted.tests import test_weighted as weighted
from extras.weighted.tests.test_weighted import functions
from tests import test_reward as here
from tests.test_reward import TOKENIZER, rollout
from training.reward import add_scores, load_reward_manager


@pytest.fixture(autouse=True)
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "HERE", {})


@pytest.mark.parametrize("form", here.FILES)
def test_every_form_is_scored_in_processes(tmp_path, form):
    here.test_every_form_works_alone_and_in_a_run_and_is_given_its_kwargs(tmp_path, form)


@pytest.mark.parametrize("name", ["one", "all_at_once"])
def test_columns_and_facts_are_sent_to_processes(tmp_path, name):
    here.test_a_function_names_columns_of_the_data_and_facts_of_the_rollout(tmp_path, name)


def test_several_functions_are_summed_by_weight_in_processes(tmp_path):
    weighted.test_several_functions_are_summed_by_weight_and_logged_by_name(tmp_path)
    weighted.test_a_function_that_returns_none_has_no_part_in_a_response(tmp_path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_that_raises_in_a_process_is_located_in_the_users_file(tmp_path, asynchronous):
    text = "import json\ndef compute_score(solution_str):\n    value = json.loads(solution_str)\n    return value"
    reward = here.load(tmp_path, text.replace("def ", "async def ") if asynchronous else text, "compute_score")
    message = rf"compute_score \({tmp_path}/my_reward.py\) raised JSONDecodeError: .*\(at {tmp_path}/my_reward.py:3\)"
    with pytest.raises(RuntimeError, match=message) as caught:
        add_scores(rollout("a"), reward, TOKENIZER)
    assert "JSONDecodeError" in caught.value.__notes__[0]


def test_a_batch_reward_of_lists_has_the_time_of_all_its_rows(tmp_path):
    text = """
import time
def compute_score(solution_strs):
    time.sleep(float(solution_strs[0]))
    return [1.0] * len(solution_strs)
"""
    (tmp_path / "my_reward.py").write_text(text)
    config = RewardConfig(RewardFunctionConfig(str(tmp_path / "my_reward.py")), timeout=0.4)
    reward = load_reward_manager(config, TOKENIZER, None)
    assert reward(DataProto.from_single_dict({"responses": ["0.6"] * 100})) == [1.0] * 100
    results = reward(DataProto.from_single_dict({"responses": ["60"] * 2}))
    assert [result.outcome for result in results] == ["timeout"] * 2 and "each of 2 responses" in results[0].reason


def test_a_row_that_one_of_them_cannot_score_is_not_scored_and_the_message_names_it(tmp_path):
    config = functions(tmp_path, {"name": "brevity"}, {"name": "broken"})
    reward = load_reward_manager(config, TOKENIZER, None)
    message = rf"reward.functions \(brevity, broken\) raised KeyError: 'lost' \(at {tmp_path}/parts.py:7\), in broken"
    with pytest.raises(RuntimeError, match=message):
        add_scores(rollout("a", "b"), reward, TOKENIZER, config)


def test_calls_in_this_process_are_not_counted_by_the_minute():
    with pytest.raises(ConfigError, match=r"reward\.max_rpm.*reward\.in_process=false"):
        RewardConfig(in_process=True, max_rpm=60).check(None, "reward")


def test_a_token_bucket_grants_what_piled_up_at_once_and_the_rest_in_time(monkeypatch: pytest.MonkeyPatch):
    waits, clock = [], iter([0.0, 0.0, 0.0, 1.0, 1.0, 100.0, 100.0])

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 3))

    async def ask(*amounts: float) -> None:
        for amount in amounts:
            await bucket.acquire(amount)

    monkeypatch.setattr("extras.scorers.pool.asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("extras.scorers.pool.time", SimpleNamespace(monotonic=lambda: next(clock)))
    bucket = AsyncTokenBucket(2.0, max_tokens=3.0)
    asyncio.run(ask(3, 1, 1))  # full, then 1 and 2 owed
    asyncio.run(ask(1, 1))  # 2 came in the second that went by
    asyncio.run(ask(3, 7))  # no more than 3 pile up; more than that may be asked for
    assert waits == [0.5, 1.0, 0.5, 1.0, 3.5]


def test_the_first_call_under_a_small_limit_does_not_wait():
    config = RewardConfig(max_rpm=6, max_tpm=60, estimated_tokens_per_request=2000)
    for bucket, amount in Scorers(len, RewardFunctionConfig("rewards.py", "score"), config).limits:
        asyncio.run(asyncio.wait_for(bucket.acquire(amount), 1))
