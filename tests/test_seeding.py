"""Generators are pure functions of the run's seed and a name."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.seeding import derive_seed, numpy_generator, torch_generator


def test_derived_seeds_are_the_same_everywhere_and_always():
    """Literals, so that no process, PYTHONHASHSEED or Python version may give others."""
    assert derive_seed(0, "rollout", 3) == 211106634516208403
    assert derive_seed(1, "rollout", 3) == 1912556253448922149


def test_names_do_not_run_into_each_other():
    names = [(), ("a", "b"), ("ab",), ("a,b",), (1, 2), (12,), ("1", 2), ("1", "2"), (0,)]
    seeds = {derive_seed(0, *name) for name in names} | {derive_seed(1, *name) for name in names}
    assert len(seeds) == 2 * len(names)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64), st.lists(st.integers() | st.text(), max_size=3))
def test_a_derived_seed_fits_a_signed_64_bit_integer(seed, names):
    assert 0 <= derive_seed(seed, *names) < 2**63


def test_generators_of_one_name_repeat_and_of_two_names_differ():
    def draw(name):
        return torch.rand(4, generator=torch_generator(7, name)), numpy_generator(7, name).random(4)

    torch.testing.assert_close(draw("a")[0], draw("a")[0], rtol=0, atol=0)
    np.testing.assert_array_equal(draw("a")[1], draw("a")[1])
    assert not torch.equal(draw("a")[0], draw("b")[0])
    assert not np.array_equal(draw("a")[1], draw("b")[1])
