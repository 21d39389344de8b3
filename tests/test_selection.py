"""Which rows are learnt from: groups that differ (dynamic sampling), rows drawn by their score (PF-PPO)."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from configs.schema import PFPPOConfig
from data.protocol import DataProto
from training.collection import draw_rows, pf_ppo_weights, rows_with_signal


def scored(scores: list[float], uids: str, failed: tuple[int, ...] = (), **columns) -> DataProto:
    """A row of two tokens for each of `scores`, of the group that its letter in `uids` names."""
    mask = torch.ones(len(scores), 2, dtype=torch.int64)
    mask[list(failed)] = 0
    tensors = {
        "response_mask": mask,
        "token_level_scores": torch.tensor([[0.0, score] for score in scores]),
        "number": torch.arange(len(scores)),  # to know the rows by, wherever they go
    }
    batch = DataProto.from_single_dict({**tensors, "uid": list(uids), "name": [str(i) for i in range(len(scores))]})
    batch.non_tensor_batch |= {name: np.array(values, dtype=object) for name, values in columns.items()}
    batch.meta_info["reward_extra_keys"] = list(columns)
    return batch


# Groups with signal


def test_rows_of_groups_that_differ_have_signal_wherever_they_stand():
    batch = scored([0, 1, 1, 1, 1, 3, 2, 2], "abababcc")
    assert rows_with_signal(batch, "score").tolist() == [bool(mark) for mark in (1, 1, 1, 1, 1, 1, 0, 0)]
    assert rows_with_signal(scored([5, 5, 7], "aab"), "reward").tolist() == [False] * 3  # alone is no difference


def test_a_failed_row_makes_no_difference():
    assert (
        rows_with_signal(scored([1, 0, 1, 0, 0, 0], "aabbcc", failed=(1, 2, 3, 4, 5)), "score").tolist() == [False] * 6
    )
    beside = scored([1, 0, 2], "aaa", failed=(1,))
    assert rows_with_signal(beside, "score").tolist() == [True] * 3  # its group does not break up


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_last_bits_of_float32_are_no_difference(scale):
    """The same rewards of three turns, added up in another order."""
    batch = scored([0, 0, 0], "aaa")
    tenths = torch.tensor([0.1, 0.2, 0.3]) * scale
    sums = torch.stack([tenths[0] + tenths[1] + tenths[2], tenths[2] + tenths[1] + tenths[0], tenths.sum()])
    batch.batch["token_level_scores"][:, 1] = sums + torch.tensor([0.0, 1e-7, -1e-7]) * scale
    assert batch.batch["token_level_scores"][:, 1].unique().numel() > 1
    assert not rows_with_signal(batch, "score").any()
    batch.batch["token_level_scores"][0, 1] += 1e-4 * max(scale, 1)
    assert rows_with_signal(batch, "score").all()


def test_any_number_that_the_reward_returns_can_be_the_metric():
    batch = scored([0, 1, 0, 1], "aabb", acc=[True, True, 1, np.float32(0)])
    assert rows_with_signal(batch, "acc").tolist() == [False, False, True, True]
    assert rows_with_signal(batch, "score").all()
    assert rows_with_signal(scored([0, 1], "aa"), "acc").all()  # a lone number is called so, as in verl


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("accuracy", r"metric=accuracy: the reward returns no such number\. Use score, or one of \['acc', 'word'\]"),
        ("word", r"metric=word: the reward must return a number under that name in every row; .*'yes'"),
        ("acc", r"metric=acc: the reward must return a number under that name in every row; .*NoneType"),
    ],
)
def test_a_metric_that_is_missing_or_no_number_is_refused_by_name(metric, says):
    batch = scored([0, 1], "aa", acc=[1.0, None], word=["yes", "no"])
    with pytest.raises(ValueError, match=rf"^algorithm\.filter_groups\.{says}"):
        rows_with_signal(batch, metric)


# PF-PPO

SCORES = [3.0, 7.0, -2.0, 0.0, 1.0]
FAILED, COMPLETED = (1,), (0, 2, 3, 4)
METHODS = {  # of the four rows that did not fail, by hand
    "pow": [9, 4, 0, 1],
    "max_min": [1, 1, 0, 0],
    "max_random": [0.4, 0.1, 0.1, 0.1],
}


def drawn(method: str, seed: int, batch: DataProto | None = None) -> list[int]:
    batch = scored(SCORES, "aabbb", FAILED) if batch is None else batch
    return pf_ppo(batch, seed, reweight_method=method)


def pf_ppo(batch: DataProto, seed: int, **settings) -> list[int]:
    rows = draw_rows(batch, PFPPOConfig(**settings), seed)
    assert rows.dtype == torch.int64
    return rows.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_drawn_as_often_as_their_weights_say(method):
    weights = torch.tensor(METHODS[method], dtype=torch.float64)
    draws = [drawn(method, seed) for seed in range(1000)]
    assert {len(rows) for rows in draws} == {5}
    counts = Counter(row for rows in draws for row in rows)
    for row, probability in zip(COMPLETED, (weights / weights.sum()).tolist(), strict=True):
        four_sigma = 4 * math.sqrt(5000 * probability * (1 - probability))
        assert abs(counts[row] - 5000 * probability) <= four_sigma, (row, counts)
    assert not any(counts[row] for row in FAILED)  # though its score is the best of all
    assert not any(counts[row] for row, weight in zip(COMPLETED, weights, strict=True) if weight == 0)


def test_the_exponent_is_the_settings():
    batch = scored([1.0, 2.0], "ab")
    count = Counter(row for seed in range(500) for row in pf_ppo(batch, seed, weight_pow=3.0))
    assert count[1] / 1000 == pytest.approx(8 / 9, abs=0.04)  # four standard deviations


def test_rows_whose_scores_are_all_zero_are_drawn_alike():
    batch = scored([0.0, 0.0, 0.0], "abc")
    rows = [row for seed in range(300) for row in pf_ppo(batch, seed)]
    assert all(abs(rows.count(row) - 300) < 60 for row in range(3))


def test_draws_follow_from_the_seed_and_the_batch_stays():
    assert drawn("pow", 1) == drawn("pow", 1)
    assert len({tuple(drawn("pow", seed)) for seed in range(10)}) > 5
    batch = scored(SCORES, "aabbb", FAILED)
    drawn("pow", 1, batch)
    assert batch.batch["number"].tolist() == list(range(5)) and "drawn_row" not in batch


def test_if_all_failed_each_row_stays():
    assert pf_ppo(scored([1.0, 2.0], "ab", failed=(0, 1)), seed=0) == [0, 1]


def test_pf_ppo_weights_by_hand_and_an_unknown_method():
    scores = torch.tensor([-2.0, 0.0, 1.0, 1.0]).double()
    for arguments, weights in [
        ((), [4, 0, 1, 1]),
        (("pow", 1.0), [2, 0, 1, 1]),
        (("max_min",), [1, 0, 1, 1]),
        (("max_random",), [0.1, 0.1, 0.4, 0.4]),
    ]:
        assert pf_ppo_weights(scores, *arguments).tolist() == pytest.approx([weight + 1e-8 for weight in weights])
    with pytest.raises(ValueError, match=r"'median', but must be 'pow', 'max_min' or 'max_random'"):
        pf_ppo_weights(scores, "median")
