"""Cuts rows into balanced parts by their lengths: shards of equal work, micro-batches that fit a token budget.

Pure functions over python lists of lengths. Parts are lists of row indices. Moving the rows themselves, and agreeing
on the number of micro-batches among ranks, is left to the callers.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

Item = TypeVar("Item")


def ceildiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def calculate_workload(seqlen: int) -> int:
    """Estimates the cost of a sequence of `seqlen` tokens: linear for matrix products, squared for attention.

    The ratio is verl's, of a 7B model with hidden size 4096: both parts weigh the same at 24,576 tokens.
    """
    return 24576 * seqlen + seqlen**2


class _Set(NamedTuple):
    """Some items, one of which leads to the next; ordered so that no order depends on chance."""

    total: int
    count: int
    first: int  # index of the first item
    last: int


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Partitions by largest differencing: k parts of nearly equal sums, as lists of indices, the largest sum first.

    Source: Karmarkar & Karp, "The Differencing Method of Set Partitioning", 1982 (here its k-way form).

    Args:
        equal_size: every part gets len / k items; the length must divide.
    """
    following = [-1] * len(seqlen_list)  # behind each item, the next of its set
    items = [_Set(value, 1, index, index) for value, index in sorted((v, i) for i, v in enumerate(seqlen_list))]
    size = k_partitions if equal_size else 1
    assert len(items) % size == 0, f"{len(items)} items do not divide into {k_partitions} equal parts"
    states = [_state(items[start : start + size], k_partitions) for start in range(0, len(items), size)]
    heapq.heapify(states)
    while len(states) > 1:
        *_, largest = heapq.heappop(states)
        *_, second = states[0]
        heapq.heapreplace(states, _state(_merge(largest, second, k_partitions, following), k_partitions))
    *_, sets = states[0]
    return [_items(part, following) for part in reversed(sets)] + [[] for _ in range(k_partitions - len(sets))]


def _state(sets: list[_Set], k: int) -> tuple[int, int, int, int, list[_Set]]:
    """Puts a sort key before a division of some items into k sets, the smallest first and empty ones left out: the
    largest spread comes first, the larger leading set breaking ties."""
    smallest, largest = sets[0].total if len(sets) == k else 0, sets[-1]
    return smallest - largest.total, -largest.total, -largest.count, -largest.first, sets


def _merge(left: list[_Set], right: list[_Set], k: int, following: list[int]) -> list[_Set]:
    """Joins the smallest set of one with the largest of the other, and so on; what meets an empty one stays itself."""
    overlap = max(0, len(left) + len(right) - k)
    joined = []
    for a, b in zip(left[:overlap], reversed(right[:overlap]), strict=True):
        following[a.last] = b.first
        joined.append(_Set(a.total + b.total, a.count + b.count, a.first, b.last))
    rest, changed = left[overlap:], joined + right[overlap:]
    if len(changed) == 1:  # most often
        insort(rest, changed[0])
        return rest
    return sorted(rest + changed)


def _items(part: _Set, following: list[int]) -> list[int]:
    items = [part.first]
    while items[-1] != part.last:
        items.append(following[items[-1]])
    return items


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Returns k parts of nearly equal sums: every index once, none empty, indices ascending inside a part."""
    assert len(seqlen_list) >= k_partitions, f"{len(seqlen_list)} items cannot fill {k_partitions} parts"
    if k_partitions == 1:
        return [list(range(len(seqlen_list)))]
    parts = [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
    assert all(parts), f"a part is empty: {parts}"
    assert sorted(index for part in parts for index in part) == list(range(len(seqlen_list))), "not every index once"
    return parts


def neighbour_shares(workloads: Sequence[int], count: int) -> list[slice]:
    """Cuts rows into `count` consecutive shares of about equal work, each where its middle lies. Some may be empty."""
    ends = np.cumsum(workloads, dtype=float)
    middles = ends - np.asarray(workloads) / 2
    edges = np.searchsorted(middles, sum(workloads) * np.arange(1, count) / count)
    return [slice(start, end) for start, end in pairwise([0, *map(int, edges), len(workloads)])]


def micro_batch_indices(
    lengths: Sequence[int], max_token_len: int | None = None, micro_batch_size: int | None = None
) -> list[list[int]]:
    """Cuts rows into micro-batches: consecutive `micro_batch_size` rows, or parts of at most `max_token_len` tokens.

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
    workloads = [*map(calculate_workload, lengths)]
    count = _best_fit(lengths, max_token_len)
    while True:
        parts = get_seqlen_balanced_partitions(workloads, count, equal_size=False)
        if all(sum(lengths[index] for index in part) <= max_token_len for part in parts):
            return parts
        # One row a part always fits. Steps of 1 up to 64 parts, of under 2 % above, where each try is slow.
        count = min(count + ceildiv(count, 64), len(lengths))


def _best_fit(lengths: Sequence[int], capacity: int) -> int:
    """Counts the parts that best-fit decreasing fills: near the fewest possible, so the search above ends soon."""
    rooms: list[int] = []  # ascending
    for length in sorted(lengths, reverse=True):
        index = bisect_left(rooms, length)
        room = rooms.pop(index) if index < len(rooms) else capacity
        insort(rooms, room - length)
    return len(rooms)


def padded_parts(lengths: Sequence[int], max_token_len: int) -> list[list[int]]:
    """Returns the rows of each padded batch: at most `max_token_len` tokens with their padding, or one row.

    The longest first. No row is less than half as long as its batch is wide, so that at most half of it is padding.
    """
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        width = lengths[parts[-1][0]] if parts else 0
        if parts and (len(parts[-1]) + 1) * width <= max_token_len and 2 * lengths[row] >= width:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def fill_groups(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Groups neighbours as they come, of sizes that add up to `most` at most; a larger one alone."""
    group: list[Item] = []
    total = 0
    for item in items:
        if group and total + size_of(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size_of(item)
    if group:
        yield group
