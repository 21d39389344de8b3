"""Curricula draw by what was won, and go on exactly where they were."""

import numpy as np
import pytest
import torch

from configs.schema import DataConfig, SamplerConfig
from data.protocol import DataProto, object_array
from data.sampler import PromptLoader, SequentialSampler, update_sampler
from extras.curriculum.curriculum import DifficultySampler, SampleMetrics, SuccessRateSampler
from tests.test_sampler import Levels, Numbers, assert_resuming_is_exact

CONFIG = DataConfig()
CURRICULA = {
    "success rate of a row": ("SuccessRateSampler", {}),
    "success rate of a level": ("SuccessRateSampler", {"key": "extra_info.difficulty"}),
    "difficulty": ("DifficultySampler", {"memory": 0.5}),
}


@pytest.mark.parametrize("name", CURRICULA)
def test_resuming_in_the_middle_of_a_curriculum_over_a_growing_dataset_is_exact(name):
    sampler = SamplerConfig("extras/curriculum/curriculum.py", *CURRICULA[name])
    assert_resuming_is_exact(DataConfig(sampler=sampler))


def test_the_success_rate_sampler_draws_what_is_neither_won_nor_lost():
    dataset = Levels([0, 1, 2] * 20)
    sampler = SuccessRateSampler(dataset, CONFIG, key="extra_info.difficulty", memory=0.5)
    assert np.allclose(sampler.weights(), 1), "nothing is known"
    for reward in (1.0, 0.0):
        sampler.update(np.array([0, 1, 2]), {"reward": np.array([1.0, reward, 0.0])})
    assert [sampler.rate(level) for level in "012"] == [0.875, 0.375, 0.125]
    for _ in range(10):
        sampler.update(np.array([0, 1, 1, 2]), {"reward": np.array([1.0, 1.0, 0.0, 0.0])})
    assert np.allclose(sampler.weights(), [0.05, 1, 0.05], atol=0.001)
    levels = [position % 3 for position in sampler]
    assert len(levels) == 60 and levels.count(1) > 45
    sampler.update(np.array([4]), {"reward": np.array([0.0])})
    assert abs(sampler.rate("1") - 0.25) < 0.001 and np.allclose(sampler.weights()[1], 0.75, atol=0.001)


def test_the_difficulty_sampler_goes_on_once_a_level_is_won():
    sampler = DifficultySampler(Levels([2, 0, 1] * 20), CONFIG, memory=1.0, review=0.2)
    levels = {0: 1, 1: 2, 2: 0}
    assert {sampler.data_source.levels[position] for position in sampler} == {0}
    for level, weights in ((0, [0.2, 0.8, 0]), (1, [0.1, 0.1, 0.8]), (2, [0.1, 0.1, 0.8])):
        sampler.update(np.array([levels[level]]), {"reward": np.array([0.0])})
        before = sampler.level
        sampler.update(np.array([levels[level]]), {"reward": np.array([1.0])})
        assert sampler.level == min(before + 1, 2)
        assert np.allclose(sampler.weights(), weights)


@pytest.mark.parametrize("first", range(4))
def test_the_samples_of_a_row_are_one_observation_beside_what_was_taken_for_the_rate(first):
    """One right of four is no reason to go on, whichever of them it is."""
    sampler = DifficultySampler(Levels([0, 1] * 10), CONFIG, memory=0.05)
    sampler.update(np.zeros(4, int), {"reward": np.eye(4)[first]})
    assert sampler.rate("0") == (0.5 + 0.25) / 2 and sampler.level == 0
    sampler.update(np.array([2, 2, 4, 4]), {"reward": np.array([1.0, 1.0, 1.0, 0.0])})
    assert sampler.rate("0") == pytest.approx((0.5 + 0.25 + 1 + 0.5) / 4)


def test_a_curriculum_does_not_hear_of_samples_that_could_not_be_scored():
    sampler, mask = SuccessRateSampler(Numbers(2), CONFIG), torch.ones(4, 2)
    mask[1:3] = 0
    columns = {name: torch.eye(4)[:, :2] for name in ("token_level_scores", "advantages")} | {"response_mask": mask}
    places = {"dataset_position": np.array([0, 0, 1, 1], dtype=object)}
    batch = DataProto.from_dict(columns, places, {"reward_extra_keys": []})
    update_sampler(PromptLoader(Numbers(2), 1, sampler), batch, None)
    assert [sampler.rate("0"), sampler.rate("1")] == [0.75, 0.25] and sampler.observed == {"0": 1, "1": 1}


class EasyMore(SequentialSampler):
    """A curriculum as guides write one: rows of little loss weigh more, sample by sample."""

    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.weights = np.ones(len(data_source))

    def update(self, indices, metrics):
        for idx in indices:
            self.weights[idx] *= 1.05 if metrics.get(idx, {}).get("loss", 0) < 0.2 else 0.95


class HardMore(EasyMore):
    def update(self, indices, metrics):
        for idx in range(len(self.data_source)):
            if idx in metrics:
                self.weights[idx] = 1 + metrics[idx]["loss"]


@pytest.mark.parametrize(
    ("kind", "weights"), [(EasyMore, [1.05**2, 0.95**2, 1, 1.05**4]), (HardMore, [0.375, 1.375, 1, 1.125])]
)
def test_a_curriculum_by_the_loss_of_rows_moves_by_what_they_scored(kind, weights):
    """Row 2 failed, row 3 was drawn twice. The mean score is 3/8; advantages sum to 0 in each row, as GRPO's do."""
    scores, rows = torch.tensor([1.0, 1, 0, 0, 0, 0, 1, 0, 0, 0]), [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    mask = torch.tensor([[0.0 if row == 2 else 1.0] for row in rows])
    advantages = torch.tensor([0.0, 0, 0, 0, 0, 0, 1, -1, 0, 0])
    columns = {"token_level_scores": scores[:, None], "advantages": advantages[:, None], "response_mask": mask}
    batch = DataProto.from_dict(columns, {"dataset_position": object_array(rows)}, {"reward_extra_keys": []})
    sampler = kind(Numbers(4), CONFIG)
    update_sampler(PromptLoader(Numbers(4), 1, sampler), batch, None)
    assert sampler.weights == pytest.approx(weights)


def test_metrics_are_arrays_by_name_and_the_means_of_a_rows_samples_by_its_position():
    columns = {"loss": np.array([1.0, 2.0, 4.0]), "note": object_array("abc")}
    metrics = SampleMetrics(columns, np.array([4, 4, 7]))
    assert [*metrics] == [*dict(metrics.items())] == ["loss", "note"] and len(metrics) == 2
    assert metrics["loss"] is metrics.get("loss") is columns["loss"]
    for integer in (int, np.int32, np.int64):
        assert metrics[integer(4)] == metrics.get(integer(4)) == {"loss": 1.5} and integer(7) in metrics
        assert metrics.get(integer(5), {}) == {} and integer(5) not in metrics
    for absent in (5, "reward"):
        with pytest.raises(KeyError):
            metrics[absent]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(SuccessRateSampler, {"floor": 0, "memory": 0}), (DifficultySampler, {"review": 1, "go_on": 1.0})],
)
def test_settings_of_a_curriculum_out_of_their_bounds_are_refused(kind, settings):
    for name, value in settings.items():
        with pytest.raises(ValueError, match=rf"data\.sampler\.kwargs\.{name}={value}: it must be "):
            kind(Levels([0, 1]), CONFIG, **{name: value})


def test_a_row_without_a_level_is_named():
    with pytest.raises(ValueError, match=r"row 0 and 1 others have no extra_info.level.*sampler.kwargs.key"):
        SuccessRateSampler(Numbers(2), CONFIG, key="extra_info.level")


@pytest.mark.parametrize(("levels", "row"), [([1, "hard"], 1), (["easy", "hard", 2], 2), ([[1]], 0), ([1, [2]], 1)])
def test_levels_that_cannot_be_compared_are_named(levels, row):
    with pytest.raises(ValueError, match=rf"extra_info.difficulty is .* in row 0 and .* in row {row}: levels are all"):
        DifficultySampler(Levels(levels), CONFIG)
