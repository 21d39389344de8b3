"""PF-PPO draws rows by their score."""

import math
from collections import Counter

import pytest
import torch

from data.protocol import DataProto
from extras.pf_ppo.settings import PFPPOConfig
from extras.pf_ppo.stage import draw_rows, pf_ppo_weights
from tests.batches import Turn, episode_batch, scored
from tests.test_ray_trainer import ALL_ROWS, MINI, make_trainer

SCORES = [3.0, 7.0, -2.0, 0.0, 1.0]
FAILED, COMPLETED = (1,), (0, 2, 3, 4)
METHODS = {"pow": [9, 4, 0, 1], "max_min": [1, 1, 0, 0], "max_random": [0.4, 0.1, 0.1, 0.1]}  # of COMPLETED, by hand


def pf_ppo(batch: DataProto, seed: int, **settings) -> list[int]:
    rows = draw_rows(batch, PFPPOConfig(**settings), seed)
    assert rows.dtype == torch.int64
    return rows.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_drawn_as_often_as_their_weights_say(method):
    weights = torch.tensor(METHODS[method], dtype=torch.float64)
    batch = scored(SCORES, "aabbb", FAILED)
    draws = [pf_ppo(batch, seed, reweight_method=method) for seed in range(1000)]
    assert {len(rows) for rows in draws} == {5}
    counts = Counter(row for rows in draws for row in rows)
    for row, probability in zip(COMPLETED, (weights / weights.sum()).tolist(), strict=True):
        four_sigma = 4 * math.sqrt(5000 * probability * (1 - probability))
        assert abs(counts[row] - 5000 * probability) <= four_sigma, (row, counts)
    assert not any(counts[row] for row in FAILED)  # though its score is the best of all
    assert not any(counts[row] for row, weight in zip(COMPLETED, weights, strict=True) if weight == 0)


def test_if_all_failed_each_row_stays():
    assert pf_ppo(scored([1.0, 2.0], "ab", failed=(0, 1)), seed=0) == [0, 1]


def test_pf_ppo_weights_by_hand_and_an_unknown_method():
    scores = torch.tensor([-2.0, 0.0, 1.0, 1.0]).double()
    by_hand = {(): [4, 0, 1, 1], ("pow", 1.0): [2, 0, 1, 1]}
    by_hand |= {("max_min",): [1, 0, 1, 1], ("max_random",): [0.1, 0.1, 0.4, 0.4]}
    for arguments, weights in by_hand.items():
        assert pf_ppo_weights(scores, *arguments).tolist() == pytest.approx([weight + 1e-8 for weight in weights])
    with pytest.raises(ValueError, match=r"'median', but must be 'pow', 'max_min' or 'max_random'"):
        pf_ppo_weights(scores, "median")


def test_pf_ppo_draws_a_row_by_the_return_of_its_episode():
    """Rewards that cancel out within an episode are a score of 0, however large each is."""
    groups = [[[Turn(1, 0, 100.0), Turn(1, 0, -100.0)], [Turn(1, 0, 0.0), Turn(1, 0, 1.0), Turn(1)], []]]
    batch = episode_batch(groups, "turns")
    draws = [draw_rows(batch, PFPPOConfig(), seed) for seed in range(9)]
    assert len(batch) == 6 and {*torch.cat(draws).tolist()} == {2, 3, 4}


def test_pf_ppo_changes_what_is_learnt_and_neither_the_batch_nor_the_number_of_updates(tmp_path):
    taught = {}
    for name, *overrides in [("plain",), ("first", "p"), ("again", "p"), ("other seed", "p", "trainer.seed=1")]:
        pf_ppo = ["algorithm.use_pf_ppo=true" if text == "p" else text for text in overrides]
        trainer, bandit = make_trainer(tmp_path / name, MINI, ALL_ROWS, *pf_ppo)
        trainer.fit()
        taught[name] = bandit.updates, trainer.train_loader.sampler.seen[0]
    for name, (updates, batch) in taught.items():
        assert [len(update) for update in updates] == [8, 8] and len(batch) == 16
        if name != "plain":  # |score|²: what did not pay is not learnt from
            assert all(update.token_level_scores.sum() == 8 for update in updates)
            assert batch.token_level_scores.sum() < 16
    learnt = {name: [update.input_ids.tolist() for update in updates] for name, (updates, _) in taught.items()}
    assert learnt["first"] == learnt["again"] != learnt["other seed"]
    assert torch.equal(taught["first"][1].responses, taught["plain"][1].responses)
