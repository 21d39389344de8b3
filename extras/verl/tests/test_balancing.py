"""Partitions cover everything once, and are as balanced as theory promises; test_against_verl.py has them beside
verl's."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from extras.verl.numerics import get_seqlen_balanced_partitions

few = settings(max_examples=100, deadline=None)


def sums(values, parts):
    return [sum(values[index] for index in part) for part in parts]


def fewest_tokens_in_the_largest_part(values, k):
    """Optimum by trying every assignment."""
    assignments = product(range(k), repeat=len(values))
    return min(
        max(sum(v for v, a in zip(values, chosen, strict=True) if a == j) for j in range(k)) for chosen in assignments
    )


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
