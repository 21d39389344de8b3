"""Episodes of several rows: every estimator and every statistic counts them once, as if each were one row."""

import re

import numpy as np
import pytest
import torch

from configs.extras import has
from configs.import_utils import find
from configs.schema import AlgorithmConfig
from data.protocol import DataProto
from data.types import FAILED_END_REASONS
from tests.batches import Turn, episode_batch, random_groups
from training.advantage import Estimator, kl_in_reward
from training.core_algos import ADV_ESTIMATOR_REGISTRY, AdaptiveKLController, AdvantageEstimator
from training.episode_rows import EpisodeRows, check_failures, greedy_scores, valid_episodes
from training.metric_utils import compute_data_metrics, compute_episode_metrics, compute_group_metrics
from training.reward import reward_metrics

HISTORIES = ("transcript", "turns")
ALL_ROWS = "(response_length|prompt_length)/|response/aborted|end_reason/"  # metrics that failures are part of
DIMENSIONS = ["correct", "brief"]  # gdpo's rewards


def both(seed: int, **columns: list) -> tuple[DataProto, DataProto]:
    """The same random episodes as one row each, and as one row a turn."""
    groups = random_groups(seed)
    rng, count = np.random.default_rng(seed), sum(map(len, groups))
    columns |= {name: rng.normal(size=count).tolist() for name in DIMENSIONS} | {"flawed": [*(rng.random(count) < 0.5)]}
    transcript, turns = (episode_batch(groups, history, seed, **columns) for history in HISTORIES)
    for batch in (transcript, turns):
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    return transcript, turns


def by_token(batch: DataProto, column: torch.Tensor) -> torch.Tensor:
    """Returns a column's numbers at the policy's tokens, in the order in which they were said."""
    return column[batch.batch["response_mask"].bool()]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [member.value for member in AdvantageEstimator if member != "prime"])
def test_transcript_and_turns_give_the_same_advantages(name, seed):
    transcript, turns = both(seed)
    rewards = {"gdpo_reward_keys": DIMENSIONS} if name == "gdpo" else {}
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8, **rewards)
    for batch in (transcript, turns):
        batch.batch["reward_baselines"] = batch.batch["tracked_values"] = torch.full((len(batch),), 0.25)
    whole, cut = (Estimator(config)(batch) for batch in (transcript, turns))
    for column in ("advantages", "returns"):
        assert cut[column].shape == turns.batch["response_mask"].shape
        torch.testing.assert_close(by_token(turns, cut[column]), by_token(transcript, whole[column]))


def test_an_estimator_of_the_users_sees_each_episode_as_one_row(monkeypatch):
    seen = {}

    def mine(token_level_rewards, response_mask, responses, turn_ids, dones, index, correct):
        seen.update(locals())
        return token_level_rewards, response_mask.float()

    groups = [[[Turn(2, 1, 0.5), Turn(1, 0, 2.0)], [Turn(1, 0, 1.0)]], [[]]]
    batch = episode_batch(groups, "turns", correct=["a", "b", "c"])
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY.data, "mine", mine)
    found = Estimator(AlgorithmConfig(adv_estimator="mine"))(batch)
    assert len(batch) == 4 and batch.batch["responses"].shape == (4, 3)
    assert seen["responses"].tolist() == [[10, 10, 50, 11], [10, 0, 0, 0], [10, 0, 0, 0]]
    assert seen["turn_ids"].tolist() == [[0, 0, 0, 1], [0] * 4, [0] * 4]
    assert seen["response_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert seen["dones"].tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert [*seen["index"]] == ["group-0", "group-0", "group-1"] and [*seen["correct"]] == ["a", "b", "c"]
    assert found["advantages"].tolist() == [[0, 0.5, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert found["returns"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_rows_of_an_episode_need_not_be_neighbours():
    batch = episode_batch([[[Turn(1), Turn(1)], [Turn(1)]]], "turns").select_idxs([0, 2, 1])
    episodes = EpisodeRows(batch)
    assert episodes.episode_of_row.tolist() == [0, 1, 0] and episodes.last_row.tolist() == [2, 1]
    assert episodes.join().batch["responses"].tolist() == [[10, 11], [10, 0]]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("seed", range(5))
def test_failed_episodes_change_no_statistic(history, seed):
    groups = [group for group in random_groups(seed) if len(group) == 1 or sum(map(bool, group)) != 1]  # else: above
    healthy = [kept for kept in ([turns for turns in group if turns] for group in groups) if kept]
    if not healthy:
        groups = healthy = [[[Turn(1)]]]
    found = []
    for some in (groups, healthy):
        batch = episode_batch(some, history, seed, data_source=["lake"] * sum(map(len, some)))
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        metrics = {name: value for name, value in metrics_of(batch).items() if not re.match(ALL_ROWS, name)}
        advantages = Estimator(AlgorithmConfig(adv_estimator="rloo"))(batch)
        found.append((metrics, by_token(batch, advantages["advantages"])))
    (with_failed, advantages), (without, expected) = found
    assert with_failed.keys() == without.keys()
    compared = {name for name in without if not re.match("critic/(values|advantages|returns|vf)", name)}  # else random
    assert {name: with_failed[name] for name in compared} == pytest.approx({name: without[name] for name in compared})
    torch.testing.assert_close(advantages, expected)


def test_the_kl_controller_sees_the_mean_over_episodes():
    transcript, turns = both(3)
    found = []
    for batch in (transcript, turns):
        controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=50)
        penalty, metrics = kl_in_reward(batch, controller, "kl")
        found.append((controller.value, metrics["actor/reward_kl_penalty"], by_token(batch, penalty)))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-5)
    assert torch.equal(found[0][2], found[1][2]) and found[0][0] != 0.2


@pytest.mark.parametrize("history", HISTORIES)
def test_a_greedy_episodes_return_is_the_baseline_of_every_row_of_its_prompt(history):
    """A failed greedy episode counts as the mean return of the episodes of its prompt that did not, even of one."""
    batch = episode_batch([[[Turn(1), Turn(1)]] * 2, [[Turn(2, 0, 0.5), Turn(1, 0, 1.0)], []]], history)
    greedy = episode_batch([[[Turn(1, 1, 0.5), Turn(1, 0, 0.25)]], [[]]], history)
    expected = [0.75 if uid == "group-0" else 1.5 for uid in batch.uid]
    assert greedy_scores(greedy, batch).tolist() == expected


def metrics_of(batch: DataProto) -> dict[str, float]:
    for name in ("advantages", "returns"):
        batch.batch[name] = batch.batch["values"]
    return {**compute_data_metrics(batch), **compute_group_metrics(batch), **compute_episode_metrics(batch)}


@pytest.mark.parametrize("seed", range(5))
def test_metrics_count_episodes_but_for_lengths(seed):
    count = sum(map(len, random_groups(seed)))
    columns = {"data_source": ["lake", "maze"] * count, "success": [True, None, False] * count}
    transcript, turns = both(seed, **columns)
    whole, cut = metrics_of(transcript), metrics_of(turns)
    shared = {name for name in whole if not re.match("(response|prompt)_length|episode/tokens/prompt", name)}
    assert whole.keys() == cut.keys() and {"critic/score/mean", "num_turns/mean"} < shared
    assert {name: cut[name] for name in shared} == pytest.approx({name: whole[name] for name in shared}, rel=1e-4)
    assert cut["response_length/max"] < whole["response_length/max"]


@pytest.mark.parametrize("history", HISTORIES)
def test_episode_metrics_by_hand(history):
    """One of four episodes in two environments failed, and of another nobody says whether it was a success."""
    groups = [[[Turn(2, 3, 0.5), Turn(1, 0, 1.0)], []], [[Turn(1, 2), Turn(2, 1), Turn(3)], [Turn(4, 0, -1.0)]]]
    columns = {"data_source": ["lake", "lake", "maze", "maze"], "success": [True, False, False, None]}
    counts = {"invalid_actions": [0, 9, 2, 1], "tool_call_counts": [1, 9, 2, 3]}
    counts["tool_failures"] = [{}, {"malformed": 9}, {"raised": 1, "timeout": 2}, None]
    metrics = compute_episode_metrics(episode_batch(groups, history, **columns, **counts))
    prompts = {"transcript": 3.0, "turns": 6.0}[history]  # three tokens each; two, three and one rows
    lake_and_maze = {
        "return": (1.5, -0.5), "success": (1, 0), "num_turns": (2, 2), "tool_calls": (1, 2.5),
        "invalid_actions": (0, 1.5), "tool_failures/raised": (0, 0.5), "tool_failures/timeout": (0, 1),
    }  # fmt: skip
    wanted = {f"episode/{source}/{name}/mean": values[place] for name, values in lake_and_maze.items()
              for place, source in enumerate(("lake", "maze"))}  # fmt: skip
    tokens = {"policy": 13 / 3, "observation": 2.0, "prompt": prompts}
    assert metrics == wanted | {f"episode/tokens/{name}/mean": mean for name, mean in tokens.items()}


@pytest.mark.parametrize("history", HISTORIES)
def test_what_the_reward_says_and_samplers_hear_is_of_episodes(history):
    """Episodes of three, one and no turns count once each."""
    groups = [[[Turn(1, 1, 1.0), Turn(2, 0, -0.5), Turn(1, 0, 2.0)], [Turn(2, 0, 1.0)], []]]
    batch = episode_batch(groups, history, acc=[0.0, 1.0, 7.0], dataset_position=[4, 5, 6])
    batch.meta_info["reward_extra_keys"] = ["acc"]
    measured = {"mean": 0.5, "std": 0.5, "min": 0, "max": 1}
    assert reward_metrics(batch) == {f"reward/acc/{name}": value for name, value in measured.items()}
    if has("optional", "positions_and_metrics"):
        positions, numbers = find("optional", "positions_and_metrics")(batch)
        assert positions.tolist() == [4, 5] and [*numbers["acc"]] == [0, 1]
        assert numbers["reward"].tolist() == [2.5, 1] and numbers["length"].tolist() == [4, 2]
        assert numbers["loss"].tolist() == [-0.75, 0.75]


# Failures


def failing(*reasons: str | None, cause: str = "KeyError: {} (at my_env.py:7)") -> DataProto:
    """An episode for each of `reasons`; None: it did not fail. Each cause has a number of its own."""
    groups = [[[Turn(1), Turn(1)] if reason is None else [] for reason in reasons]]
    batch = episode_batch(groups, "turns")
    for number, reason in enumerate(reasons):
        if reason is not None:
            batch.end_reason[batch.episode == number] = reason
            batch.failure[batch.episode == number] = cause.format(number)
    return batch


def test_too_many_failed_episodes_end_the_run_with_kinds_and_the_most_frequent_cause(caplog):
    batch = failing("env_error", "env_error", "timeout", None, None, "aborted")
    batch.failure[batch.episode == 2] = "no answer within env.timeout=5 seconds (at other.py:3)"
    check_failures(batch, 0.5)  # three of six are no more than a half, though there are eight rows
    kinds, cause = "3 of 6 episodes failed (2 by env_error, 1 by timeout)", "2 times: KeyError: 0 (at my_env.py:7)"
    assert caplog.messages == [f"{kinds}, and are left out. Most frequent, {cause}"]
    with pytest.raises(RuntimeError, match=re.escape(kinds)) as raised:
        check_failures(batch, 0.4)
    assert "more than env.max_failed_fraction=0.4" in str(raised.value) and f"{cause}. Mend" in str(raised.value)
    check_failures(failing(None, None), 0.0)
    assert len(caplog.messages) == 1
    check_failures(failing("timeout", "timeout"), 1.0)
    with pytest.raises(RuntimeError, match=r"1 of 2 .*1 times: boom\..* raise actor.*multi_turn\.tool_timeout"):
        check_failures(failing(None, "env_error", cause="boom"), 0.0)
    batch.non_tensor_batch["reset_seed"] = batch.episode
    with pytest.raises(RuntimeError, match=r"or raise env\.timeout\.$"):
        check_failures(batch, 0.4)


def test_valid_episodes_are_the_last_rows_of_those_that_did_not_fail():
    batch = failing(None, "env_error", "timeout", None)
    assert [*valid_episodes(batch).episode] == [0, 3] and valid_episodes(batch).batch["turn_ids"].tolist() == [[1], [1]]
    for reason in FAILED_END_REASONS:
        assert len(valid_episodes(failing(reason))) == 0, f"training leaves {reason} out, so validation does"
