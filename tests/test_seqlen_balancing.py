"""Partitions cover everything once, are as balanced as theory promises, and micro-batches fit their budget."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.seqlen_balancing import (
    calculate_workload,
    ceildiv,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    micro_batch_indices,
    padded_parts,
)

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
    assert calculate_workload(10) == 245_860


def test_largest_differencing_by_hand():
    """8-7 and 6-5 are paired, 4 goes to 7, then {7, 4} (ahead by 3) takes the smaller of {6}, {5}."""
    assert karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False) == [[4, 1, 3], [0, 2]]


def test_largest_differencing_with_equal_sizes_by_hand():
    """Blocks 1 2, 3 4, 10 20: 10-20 has the largest spread and takes 3-4 crosswise, then 1-2 crosswise."""
    assert karmarkar_karp([20, 1, 4, 2, 3, 10], 2, equal_size=True) == [[0, 4, 1], [5, 2, 3]]


def test_ties_are_broken_by_index():
    assert get_seqlen_balanced_partitions([5] * 6, 3, equal_size=False) == get_seqlen_balanced_partitions(
        [5] * 6, 3, equal_size=True
    )
    assert karmarkar_karp([5, 5], 2, equal_size=False) == [[1], [0]]


def slow_karmarkar_karp(values, k, equal_size):
    """The definition: every state has all k sets, and every set all its items."""
    ordered = [(value, 1, (index,)) for value, index in sorted((v, i) for i, v in enumerate(values))]
    if equal_size:
        states = [ordered[start : start + k] for start in range(0, len(ordered), k)]
    else:
        states = [[item] + [(0, 0, ())] * (k - 1) for item in ordered]
    states = [sorted(state, reverse=True) for state in states]
    while len(states) > 1:
        states.sort(key=lambda sets: (sets[0][0] - sets[-1][0], sets[0]))
        one, other = states.pop(), states.pop()
        states.append(
            sorted((tuple(x + y for x, y in zip(a, b, strict=True)) for a, b in zip(one, other[::-1], strict=True)),
                   reverse=True)
        )  # fmt: skip
    return [list(items) for _, _, items in states[0]]


@few
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 9), st.booleans())
def test_largest_differencing_is_that_of_its_definition(values, k, equal_size):
    """Few different values, so that ties decide."""
    values = values * k if equal_size else values
    assert karmarkar_karp(values, k, equal_size) == slow_karmarkar_karp(values, k, equal_size)


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


def test_micro_batches_by_rows_are_consecutive():
    assert micro_batch_indices([9, 9, 9, 9, 9], micro_batch_size=2) == [[0, 1], [2, 3], [4]]
    assert micro_batch_indices([9, 9], micro_batch_size=8) == [[0, 1]]
    assert micro_batch_indices([], micro_batch_size=2) == micro_batch_indices([], max_token_len=2) == []


def test_micro_batches_by_tokens_by_hand():
    assert micro_batch_indices([4, 3, 2, 1], max_token_len=10) == [[0, 1, 2, 3]]
    assert micro_batch_indices([4, 3, 2, 1], max_token_len=5) == [[0, 3], [1, 2]]


@few
@given(st.lists(st.integers(0, 100), max_size=40), st.integers(100, 400))
def test_micro_batches_hold_every_row_once_and_fit_the_budget(lengths, budget):
    parts = micro_batch_indices(lengths, max_token_len=budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(total <= budget for total in sums(lengths, parts))
    assert parts == micro_batch_indices(lengths, max_token_len=budget), "the cut must be deterministic"


def test_a_row_above_the_budget_names_the_key_and_both_numbers():
    with pytest.raises(ValueError, match=r"ppo_max_token_len_per_gpu=100 .* a sequence of 101 tokens: raise it"):
        micro_batch_indices([5, 101], max_token_len=100)


@pytest.mark.parametrize("limits", [{}, {"max_token_len": 4, "micro_batch_size": 4}])
def test_exactly_one_limit_is_given(limits):
    with pytest.raises(AssertionError, match="one of them"):
        micro_batch_indices([1], **limits)


def test_padded_parts_by_hand():
    """The longest first; 9 and 5 are of one kind, 4 is not; of 4, 4, 3 two fit 8 tokens."""
    assert padded_parts([4, 9, 3, 5, 4], max_token_len=18) == [[1, 3], [0, 4, 2]]
    assert padded_parts([4, 9, 3, 5, 4], max_token_len=8) == [[1], [3], [0, 4], [2]]
    assert padded_parts([], max_token_len=8) == []


@few
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 400))
def test_padded_parts_hold_every_row_once_and_at_most_half_of_them_is_padding(lengths, budget):
    parts = padded_parts(lengths, budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        width, total = max(lengths[index] for index in part), sum(lengths[index] for index in part)
        assert len(part) == 1 or len(part) * width <= budget
        assert len(part) * width <= 2 * total
