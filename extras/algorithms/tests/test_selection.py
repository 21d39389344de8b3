"""Dynamic sampling keeps the groups that differ."""

import pytest
import torch

from extras.algorithms.dynamic_sampling import groups_by_signal, metrics_compared, rows_with_signal
from tests.batches import scored
from tests.runs import compose
from tests.test_episodes import both
from training.episode_rows import EpisodeRows


def test_rows_of_groups_that_differ_have_signal_wherever_they_stand():
    batch = scored([0, 1, 1, 1, 1, 3, 2, 2], "abababcc")
    assert rows_with_signal(batch, "score").tolist() == [bool(mark) for mark in (1, 1, 1, 1, 1, 1, 0, 0)]
    assert rows_with_signal(scored([5, 5, 7], "aab"), "reward").tolist() == [False] * 3  # alone is no difference


def test_groups_whose_mean_lies_beyond_the_bounds_are_left_out():
    batch = scored([0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0], "aaaaabbbbbccccc")  # 0.2, 0.4, 0.8
    for bounds, kept in {(0.2, None): "abc", (0.3, None): "bc", (0.3, 0.8): "bc", (None, 0.7): "ab"}.items():
        has_signal = rows_with_signal(batch, "score", *bounds)
        assert {uid for uid, mark in zip(batch.uid, has_signal.tolist(), strict=True) if mark} == {*kept}


def test_a_failed_row_makes_no_difference():
    batch = scored([1, 0, 1, 0, 0, 0], "aabbcc", failed=(1, 2, 3, 4, 5))
    assert rows_with_signal(batch, "score").tolist() == [False] * 6
    beside = scored([1, 0, 2], "aaa", failed=(1,))
    assert rows_with_signal(beside, "score").tolist() == [True] * 3  # its group does not break up


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_last_bits_of_float32_are_no_difference(scale):
    """Rows whose rewards are one sum, added up in different orders, have no signal."""
    batch = scored([0, 0, 0], "aaa")
    tenths = torch.tensor([0.1, 0.2, 0.3]) * scale
    sums = torch.stack([tenths[0] + tenths[1] + tenths[2], tenths[2] + tenths[1] + tenths[0], tenths.sum()])
    batch.batch["token_level_scores"][:, 1] = sums + torch.tensor([0.0, 1e-7, -1e-7]) * scale
    assert batch.batch["token_level_scores"][:, 1].unique().numel() > 1
    assert not rows_with_signal(batch, "score").any()
    batch.batch["token_level_scores"][0, 1] += 1e-4 * max(scale, 1)
    assert rows_with_signal(batch, "score").all()


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


def test_groups_that_gdpo_learns_from_are_kept_though_their_scores_tie():
    batch = scored([1, 1, 1, 1], "aabb", right=[1, 0, 1, 1], brief=[0, 1, 0, 0])
    gdpo = compose("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[right,brief]")
    assert groups_by_signal(batch, metrics_compared(gdpo)) == ([[0, 1]], [[2, 3]])
    assert metrics_compared(compose("algorithm.adv_estimator=gdpo", "algorithm.filter_groups.metric=brief")) == [
        "brief"
    ]
    assert metrics_compared(compose()) == ["reward"]


@pytest.mark.parametrize("seed", range(5))
def test_selection_counts_episodes(seed):
    transcript, turns = both(seed)
    of_row = EpisodeRows(turns).episode_of_row
    for metric in ("score", "correct"):
        assert torch.equal(rows_with_signal(turns, metric), rows_with_signal(transcript, metric)[of_row])
        for rows, others in zip(groups_by_signal(transcript, [metric]), groups_by_signal(turns, [metric]), strict=True):
            assert [{*transcript.uid[group]} for group in rows] == [{*turns.uid[group]} for group in others]
