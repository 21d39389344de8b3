"""Pure functions of verl.utils.seqlen_balancing and verl.utils.groupwise that this project itself does not call."""

import heapq
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.core_algos import Groups


def ceildiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


Set = tuple[int, int, tuple[int, ...]]  # the sum of its items, how many they are, and their indices


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Partitions by largest differencing: k parts of nearly equal sums, as lists of indices, the largest sum first.

    Source: Karmarkar & Karp, "The Differencing Method of Set Partitioning", 1982 (here its k-way form).

    Args:
        equal_size: every part gets len / k items; the length must divide.
    """
    items: list[Set] = [(value, 1, (index,)) for value, index in sorted((v, i) for i, v in enumerate(seqlen_list))]
    size = k_partitions if equal_size else 1
    assert len(items) % size == 0, f"{len(items)} items do not divide into {k_partitions} equal parts"
    empty: list[Set] = [(0, 0, ())] * (k_partitions - size)
    states = [_state([*empty, *items[start : start + size]]) for start in range(0, len(items), size)]
    heapq.heapify(states)
    while len(states) > 1:
        *_, one = heapq.heappop(states)
        *_, other = states[0]
        pairs = zip(one, reversed(other), strict=True)  # the largest set of one joins the smallest of the other
        heapq.heapreplace(states, _state([(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]))
    return [[*indices] for *_, indices in states[0][-1]]


def _state(sets: list[Set]) -> tuple[int, int, int, tuple[int, ...], list[Set]]:
    """Puts a sort key before k sets, the largest first: the largest spread comes first, the larger set breaks ties."""
    (total, count, indices), *_ = ordered = sorted(sets, reverse=True)
    return ordered[-1][0] - total, -total, -count, tuple(-index for index in indices), ordered


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Returns k parts of nearly equal sums: every index once, none empty, indices ascending inside a part."""
    assert len(seqlen_list) >= k_partitions, f"{len(seqlen_list)} items cannot fill {k_partitions} parts"
    if k_partitions == 1:
        return [list(range(len(seqlen_list)))]
    parts = [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
    assert all(parts), f"a part is empty: {parts}"
    assert sorted(index for part in parts for index in part) == list(range(len(seqlen_list))), "not every index once"
    return parts


def as_torch_index(index: Sequence[Any] | np.ndarray | Tensor, device: str | torch.device | None = None) -> Tensor:
    """Numbers labels, int64 [B]: integers, and floats all within 1e-6 of integers, stay what they are.

    Anything else is numbered from 0 in the order of its string form.
    """
    labels = index.detach().cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    labels = labels.reshape(-1)
    if all(isinstance(label, Real | np.bool_) for label in labels):
        labels = np.array(labels.tolist())  # of their common type, where it was object
        if np.allclose(labels, labels.round(), rtol=0, atol=1e-6):
            return torch.as_tensor(labels.round().astype(np.int64), device=device)
    _, codes = np.unique([str(label) for label in labels], return_inverse=True)
    return torch.as_tensor(codes, dtype=torch.int64, device=device)


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: str | torch.device | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, std and count, float32 [G], of scores [B] by their group's number `gidx` [B] in 0 … G - 1.

    std has n - 1 in the denominator and is at least sqrt(eps). A group of one, or none, has mean 0 and std 1.
    """
    scores = torch.as_tensor(scores, device=device).flatten().float()
    gidx = as_torch_index(gidx, device=scores.device)
    groups = Groups(gidx, torch.ones(len(scores), 1, device=scores.device))
    size = int(gidx.max()) + 1 if len(gidx) else 0

    def per_group(per_row: Tensor, if_empty: float) -> Tensor:
        return scores.new_full((size,), if_empty).scatter(0, gidx, per_row)

    std = groups.std(scores).clamp(min=math.sqrt(eps))
    return per_group(groups.mean(scores), 0.0), per_group(std, 1.0), per_group(groups.count, 0.0)
