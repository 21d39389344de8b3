"""A mixture draws each source in proportion to its weight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.loader import compose
from configs.schema import DataConfig
from data.sampler import create_rl_sampler
from extras.curriculum.curriculum import mixed_order, shares
from tests.test_sampler import Levels, assert_resuming_is_exact


def test_a_mixture_draws_each_source_in_its_share_evenly_and_every_row_before_any_comes_twice():
    sources = ["a"] * 6 + ["b"] * 30
    order = mixed_order(sources, {"a": 1, "b": 2}, np.random.default_rng(0))
    assert len(order) == 36
    of_a = [position for position in order if position < 6]
    assert len(of_a) == 12 and sorted(of_a[:6]) == sorted(of_a[6:]) == [*range(6)]
    of_b = [position for position in order if position >= 6]
    assert len(of_b) == len(set(of_b)) == 24
    drawn = np.cumsum([position < 6 for position in order])
    assert np.abs(drawn - np.arange(1, 37) / 3).max() <= 2, "at no place is one source ahead of its share"
    assert mixed_order(["a", "b", "b"], {"a": 1, "b": 0}, np.random.default_rng(0)) == [0, 0, 0]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(0, 50))
def test_shares_are_whole_and_sum_up(weights, total):
    given = {str(number): weight for number, weight in enumerate(weights)}
    counts = shares(given, total)
    assert sum(counts.values()) == total
    assert all(abs(counts[name] - total * given[name] / sum(weights)) < 1 for name in given)


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": -1, "b": 2}, {"a": 0, "b": 0}])
def test_weights_that_are_not_those_of_the_data_are_refused_with_its_sources(weights):
    with pytest.raises(ValueError, match=r"data.source_weights=.* the sources .* are a, b"):
        create_rl_sampler(DataConfig(source_weights=weights), Levels([0, 1], sources="ab"), seed=0)


def test_resuming_in_the_middle_of_a_mixture_over_a_growing_dataset_is_exact():
    assert_resuming_is_exact(DataConfig(source_weights={"a": 1, "b": 3}))


def test_weights_beside_a_sampler_of_the_users_are_refused():
    sampler = ("data.sampler.class_path=tests/test_sampler.py", "data.sampler.class_name=Told")
    with pytest.raises(ConfigError, match=r"data.sampler.class_path=.* and data.source_weights are both set"):
        compose("frozenlake", [*sampler, "data.source_weights={one: 1}"])
