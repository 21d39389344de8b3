"""Sequence lengths to balanced parts: shards of equal work, micro-batches that fit a token budget.

Pure functions over python lists of lengths. Parts are lists of row indices. Moving the rows themselves, and agreeing
on the number of micro-batches among ranks, is left to the callers.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np


def ceildiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def calculate_workload(seqlen: int) -> int:
    """Cost of a sequence of `seqlen` tokens, in arbitrary units: linear for matrix products, squared for attention.

    The ratio is verl's, of a 7B model with hidden size 4096: both parts weigh the same at 24,576 tokens.
    """
    return 24576 * seqlen + seqlen**2


class _Set(NamedTuple):
    """Some items; compared by total, then count, then indices, so that no order depends on chance."""

    total: int = 0
    count: int = 0
    items: tuple[int, ...] = ()

    def union(self, other: "_Set") -> "_Set":
        return _Set(self.total + other.total, self.count + other.count, self.items + other.items)


@dataclass
class _State:
    """A division of some of the items into k sets, largest first."""

    sets: list[_Set]

    def __post_init__(self) -> None:
        self.sets.sort(reverse=True)

    def __lt__(self, other: "_State") -> bool:
        """Larger spread first (heapq pops the least), the larger leading set breaking ties."""
        return (self.spread, self.sets[0]) > (other.spread, other.sets[0])

    @property
    def spread(self) -> int:
        return self.sets[0].total - self.sets[-1].total

    def merge(self, other: "_State") -> "_State":
        """The largest set of one joins the smallest of the other, and so on."""
        return _State([a.union(b) for a, b in zip(self.sets, reversed(other.sets), strict=True)])


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Largest differencing: k parts of nearly equal sums, as lists of indices, the largest sum first.

    Source: Karmarkar & Karp, "The Differencing Method of Set Partitioning", 1982 (here its k-way form).

    Args:
        equal_size: every part gets len / k items; the length must divide.
    """
    items = [_Set(value, 1, (index,)) for value, index in sorted((v, i) for i, v in enumerate(seqlen_list))]
    if equal_size:
        assert len(items) % k_partitions == 0, f"{len(items)} items do not divide into {k_partitions} equal parts"
        heap = [_State(items[i : i + k_partitions]) for i in range(0, len(items), k_partitions)]
    else:
        heap = [_State([item, *[_Set()] * (k_partitions - 1)]) for item in items]
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, heapq.heappop(heap).merge(heapq.heappop(heap)))
    return [list(part.items) for part in heap[0].sets]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """k parts of nearly equal sums: every index once, none empty, indices ascending inside a part."""
    assert len(seqlen_list) >= k_partitions, f"{len(seqlen_list)} items cannot fill {k_partitions} parts"
    parts = [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
    assert all(parts), f"a part is empty: {parts}"
    assert sorted(index for part in parts for index in part) == list(range(len(seqlen_list))), "not every index once"
    return parts


def neighbour_shares(workloads: Sequence[int], count: int) -> list[slice]:
    """`count` consecutive shares of about equal work: a row belongs where its middle lies. Some may be empty."""
    ends = np.cumsum(workloads, dtype=float)
    middles = ends - np.asarray(workloads) / 2
    edges = np.searchsorted(middles, sum(workloads) * np.arange(1, count) / count)
    return [slice(start, end) for start, end in pairwise([0, *map(int, edges), len(workloads)])]


def micro_batch_indices(
    lengths: Sequence[int], max_token_len: int | None = None, micro_batch_size: int | None = None
) -> list[list[int]]:
    """Rows of each micro-batch: consecutive `micro_batch_size` rows, or parts of at most `max_token_len` tokens.

    By tokens, the parts are balanced by workload, the heaviest first, so that too little memory shows at once.

    Args:
        lengths: real tokens of each row, prompt and response together.

    Raises:
        ValueError: a row is longer than the token budget.
    """
    assert (max_token_len is None) != (micro_batch_size is None), "give max_token_len or micro_batch_size, one of them"
    if micro_batch_size is not None:
        rows = range(len(lengths))
        return [list(rows[start : start + micro_batch_size]) for start in rows[::micro_batch_size]]
    if not lengths:
        return []
    if max(lengths) > max_token_len:
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max_token_len} (or the key of the role in question) "
            f"cannot hold a sequence of {max(lengths)} tokens: raise it to at least that, "
            "or lower data.max_prompt_length or data.max_response_length."
        )
    workloads = [calculate_workload(length) for length in lengths]
    count = _first_fit(lengths, max_token_len)
    while True:
        parts = get_seqlen_balanced_partitions(workloads, count, equal_size=False)
        if all(sum(lengths[index] for index in part) <= max_token_len for part in parts):
            return parts
        # One row a part always fits. Steps of 1 up to 64 parts, of under 2 % above, where each try is slow.
        count = min(count + ceildiv(count, 64), len(lengths))


def _first_fit(lengths: Sequence[int], capacity: int) -> int:
    """Number of parts that first-fit decreasing fills: near the fewest possible, so the search above ends soon."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = next((i for i, room in enumerate(rooms) if room >= length), None)
        if fitting is None:
            rooms.append(capacity - length)
        else:
            rooms[fitting] -= length
    return len(rooms)
