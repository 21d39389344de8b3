"""Partitions cover everything once; test_against_verl.py has them beside verl's."""

from hypothesis import given, settings
from hypothesis import strategies as st

from extras.verl.numerics import get_seqlen_balanced_partitions

few = settings(max_examples=100, deadline=None)


def sums(values, parts):
    return [sum(values[index] for index in part) for part in parts]


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
