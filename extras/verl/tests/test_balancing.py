"""Partitions cover everything once, and are as balanced as theory promises."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extras.verl.numerics import ceildiv, get_seqlen_balanced_partitions, karmarkar_karp

few = settings(max_examples=100, deadline=None)


def sums(values, parts):
    return [sum(values[index] for index in part) for part in parts]


def fewest_tokens_in_the_largest_part(values, k):
    """Optimum by trying every assignment."""
    assignments = product(range(k), repeat=len(values))
    return min(
        max(sum(v for v, a in zip(values, chosen, strict=True) if a == j) for j in range(k)) for chosen in assignments
    )


def test_integer_helpers_by_hand():
    assert [ceildiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_largest_differencing_by_hand():
    """8-7 and 6-5 are paired, 4 goes to 7, then {7, 4} (ahead by 3) takes the smaller of {6}, {5}."""
    assert karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False) == [[4, 1, 3], [0, 2]]


def test_largest_differencing_with_equal_sizes_by_hand():
    """Blocks 1 2, 3 4, 10 20: 10-20 has the largest spread and takes 3-4 crosswise, then 1-2 crosswise."""
    assert karmarkar_karp([20, 1, 4, 2, 3, 10], 2, equal_size=True) == [[0, 4, 1], [5, 2, 3]]


def test_ties_are_broken_by_index():
    one, other = (get_seqlen_balanced_partitions([5] * 6, 3, equal_size) for equal_size in (False, True))
    assert one == other
    assert karmarkar_karp([5, 5], 2, equal_size=False) == [[1], [0]]


@few
@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 8), st.booleans())
def test_partitions_cover_every_index_once(values, k, equal_size):
    values = values * k if equal_size else values + [1] * k
    parts = get_seqlen_balanced_partitions(values, k, equal_size)
    assert len(parts) == k
    assert sorted(index for part in parts for index in part) == list(range(len(values)))
    assert not equal_size or {len(part) for part in parts} == {len(values) // k}
    assert all(parts) and all(part == sorted(part) for part in parts)
    assert sums(values, parts) == sorted(sums(values, parts), reverse=True)


@few
@given(st.lists(st.integers(1, 100), min_size=3, max_size=7), st.integers(2, 3))
def test_the_largest_part_is_within_the_proven_bound_of_the_optimum(values, k):
    """4/3 - 1/(3k) of the optimum: Michiels, Korst, Aarts, van Leeuwen, 2003, for k-way largest differencing."""
    largest = max(sums(values, get_seqlen_balanced_partitions(values, k, equal_size=False)))
    optimum = fewest_tokens_in_the_largest_part(values, k)
    assert optimum <= largest <= (4 / 3 - 1 / (3 * k)) * optimum + 1e-9


def test_impossible_partitions_are_refused():
    with pytest.raises(AssertionError, match="2 items cannot fill 3 parts"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(AssertionError, match="3 items do not divide into 2 equal parts"):
        karmarkar_karp([1, 2, 3], 2, equal_size=True)
