"""Episodes of several rows: every estimator and every statistic counts them once, as if each were one row."""

import numpy as np
import pytest
import torch

from configs.schema import AlgorithmConfig
from data.protocol import DataProto
from tests.batches import Turn, episode_batch, random_groups
from training.advantage import compute_advantage, kl_in_reward
from training.core_algos import ADV_ESTIMATOR_REGISTRY, AdaptiveKLController, AdvantageEstimator, register_adv_est
from training.episodes import Episodes, greedy_scores
from training.selection import draw_rows, groups_by_signal, rows_with_signal

HISTORIES = ("transcript", "turns")
DIMENSIONS = ["correct", "brief"]  # gdpo's rewards


def both(seed: int, **columns: list) -> tuple[DataProto, DataProto]:
    """The same random episodes as one row each, and as one row a turn."""
    groups = random_groups(seed)
    rng, count = np.random.default_rng(seed), sum(map(len, groups))
    columns |= {name: rng.normal(size=count).tolist() for name in DIMENSIONS}
    transcript, turns = (episode_batch(groups, history, seed, **columns) for history in HISTORIES)
    for batch in (transcript, turns):
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    return transcript, turns


def by_token(batch: DataProto, column: torch.Tensor) -> torch.Tensor:
    """[tokens of the policy], in the order in which they were said."""
    return column[batch.batch["response_mask"].bool()]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [member.value for member in AdvantageEstimator])
def test_transcript_and_turns_give_the_same_advantages(name, seed):
    transcript, turns = both(seed)
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8, gdpo_reward_keys=DIMENSIONS)
    for batch in (transcript, turns):
        batch.batch["reward_baselines"] = torch.full((len(batch),), 0.25)
    (whole, _), (cut, _) = (compute_advantage(batch, config) for batch in (transcript, turns))
    for column in ("advantages", "returns"):
        assert cut[column].shape == turns.batch["response_mask"].shape
        torch.testing.assert_close(by_token(turns, cut[column]), by_token(transcript, whole[column]))


def test_the_estimators_see_more_than_one_row_an_episode_and_failures():
    pairs = [both(seed) for seed in range(8)]
    assert all(len(turns) > len(transcript) for transcript, turns in pairs)
    assert sum("timeout" in batch.end_reason for batch, _ in pairs) > 2


def test_an_estimator_of_the_users_sees_each_episode_as_one_row():
    seen = {}

    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, responses, turn_ids, dones, index, correct):
        seen.update(locals())
        return token_level_rewards, response_mask.float()

    batch = episode_batch(
        [[[Turn(2, 1, 0.5), Turn(1, 0, 2.0)], [Turn(1, 0, 1.0)]], [[]]], "turns", correct=["a", "b", "c"]
    )
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    try:
        found, _ = compute_advantage(batch, AlgorithmConfig(adv_estimator="mine"))
    finally:
        del ADV_ESTIMATOR_REGISTRY["mine"]
    assert len(batch) == 4 and batch.batch["responses"].shape == (4, 3)
    assert seen["responses"].tolist() == [[10, 10, 50, 11], [10, 0, 0, 0], [10, 0, 0, 0]]
    assert seen["turn_ids"].tolist() == [[0, 0, 0, 1], [0] * 4, [0] * 4]
    assert seen["response_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert seen["dones"].tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert [*seen["index"]] == ["group-0", "group-0", "group-1"] and [*seen["correct"]] == ["a", "b", "c"]
    assert found["advantages"].tolist() == [[0, 0.5, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert found["returns"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_prompts_are_no_column_of_an_episode_of_several_rows():
    batch = both(0)[1]
    assert "prompts" not in Episodes(batch).joined() and "attention_mask" not in Episodes(batch).joined()


def test_rows_without_the_column_are_an_episode_each():
    batch = DataProto.from_single_dict({"response_mask": torch.tensor([[1, 0], [0, 0]]), "uid": ["a", "a"]})
    episodes = Episodes(batch)
    assert episodes.count == 2 and episodes.joined() is batch and episodes.completed().tolist() == [True, False]
    column = torch.rand(2, 2)
    assert episodes.cut(column) is column


def test_rows_of_an_episode_need_not_be_neighbours():
    batch = episode_batch([[[Turn(1), Turn(1)], [Turn(1)]]], "turns").select_idxs([0, 2, 1])
    episodes = Episodes(batch)
    assert episodes.of_row.tolist() == [0, 1, 0] and episodes.last_row.tolist() == [2, 1]
    assert episodes.joined().batch["responses"].tolist() == [[10, 11], [10, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_selection_counts_episodes(seed):
    transcript, turns = both(seed)
    of_row = Episodes(turns).of_row
    for metric in ("score", "correct"):
        assert torch.equal(rows_with_signal(turns, metric), rows_with_signal(transcript, metric)[of_row])
        for rows, others in zip(groups_by_signal(transcript, metric), groups_by_signal(turns, metric), strict=True):
            assert [{*transcript.uid[group]} for group in rows] == [{*turns.uid[group]} for group in others]


def test_pf_ppo_draws_a_row_by_the_return_of_its_episode():
    """Rewards that cancel out within an episode are a score of 0, however large each is."""
    groups = [[[Turn(1, 0, 100.0), Turn(1, 0, -100.0)], [Turn(1, 0, 0.0), Turn(1, 0, 1.0), Turn(1)], []]]
    batch = episode_batch(groups, "turns")
    draws = [draw_rows(batch, AlgorithmConfig(use_pf_ppo=True), seed)[0]["drawn_row"] for seed in range(9)]
    assert len(batch) == 6 and {*torch.cat(draws).tolist()} == {2, 3, 4}


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
    batch = episode_batch([[[Turn(1), Turn(1)]] * 2, [[Turn(2)]]], history)
    greedy = episode_batch([[[Turn(1, 1, 0.5), Turn(1, 0, 0.25)]], [[]]], history)
    expected = [0.75 if uid == "group-0" else 0.0 for uid in batch.uid]
    assert greedy_scores(greedy, batch).tolist() == expected
