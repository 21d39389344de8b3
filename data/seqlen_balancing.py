"""Cuts rows into balanced parts by their lengths: shards of equal work, micro-batches that fit a token budget.

Pure functions over python lists of lengths. Parts are lists of row indices. Moving the rows themselves, and agreeing
on the number of micro-batches among ranks, is left to the callers.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")


def calculate_workload(seqlen: int) -> int:
    """Estimates the cost of a sequence of `seqlen` tokens: linear for matrix products, squared for attention.

    The ratio is verl's, of a 7B model with hidden size 4096: both parts weigh the same at 24,576 tokens.
    """
    return 24576 * seqlen + seqlen**2


def neighbour_shares(workloads: Sequence[int], count: int) -> list[slice]:
    """Cuts rows into `count` consecutive shares of about equal work, each where its middle lies. Some may be empty."""
    ends = np.cumsum(workloads, dtype=float)
    middles = ends - np.asarray(workloads) / 2
    edges = np.searchsorted(middles, sum(workloads) * np.arange(1, count) / count)
    return [slice(start, end) for start, end in pairwise([0, *map(int, edges), len(workloads)])]


def micro_batch_indices(lengths: Sequence[int], max_token_len: int) -> list[list[int]]:
    """Cuts rows into micro-batches of at most `max_token_len` tokens, near the fewest possible: by best-fit decreasing.

    The heaviest part is the first, so that too little memory shows at once.

    Args:
        lengths: real tokens of each row, prompt and response together.

    Raises:
        ValueError: a row is longer than the token budget.
    """
    if max(lengths, default=0) > max_token_len:
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max_token_len} (or the key of the role in question) "
            f"cannot hold a sequence of {max(lengths)} tokens: raise it to at least that, "
            "or lower data.max_prompt_length or data.max_response_length."
        )
    if sum(lengths) <= max_token_len:
        return [[*range(len(lengths))]] if lengths else []
    parts: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # the tokens that a part still takes, ascending, and its index
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fitting = bisect_left(rooms, (lengths[row], 0))
        if fitting == len(rooms):
            rooms.append((max_token_len, len(parts)))
            parts.append([])
        room, index = rooms.pop(fitting)
        parts[index].append(row)
        insort(rooms, (room - lengths[row], index))
    workloads = [sum(calculate_workload(lengths[row]) for row in part) for part in parts]
    return [sorted(part) for _, part in sorted(zip(workloads, parts, strict=True), key=lambda pair: -pair[0])]


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
