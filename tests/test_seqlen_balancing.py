"""Micro-batches hold everything once, fit their budget, and are few."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.seqlen_balancing import micro_batch_indices, padded_parts

few = settings(max_examples=100, deadline=None)


def sums(values, parts):
    return [sum(values[index] for index in part) for part in parts]


def test_micro_batches_by_tokens_by_hand():
    assert micro_batch_indices([], max_token_len=2) == []
    assert micro_batch_indices([4, 3, 2, 1], max_token_len=10) == [[0, 1, 2, 3]]
    assert micro_batch_indices([4, 3, 2, 1], max_token_len=5) == [[0, 3], [1, 2]]


@few
@given(st.lists(st.integers(0, 100), max_size=40), st.integers(100, 400))
def test_micro_batches_hold_every_row_once_and_fit_the_budget(lengths, budget):
    parts = micro_batch_indices(lengths, max_token_len=budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(total <= budget for total in sums(lengths, parts))
    assert all(first + second > budget for first, second in combinations(sums(lengths, parts), 2)), "parts to be joined"
    assert parts == micro_batch_indices(lengths, max_token_len=budget), "the cut must be deterministic"


def test_a_row_above_the_budget_names_the_key_and_both_numbers():
    with pytest.raises(ValueError, match=r"ppo_max_token_len_per_gpu=100 .* a sequence of 101 tokens: raise it"):
        micro_batch_indices([5, 101], max_token_len=100)


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
