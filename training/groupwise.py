"""Statistics of numbered groups, under the names and with the results that verl's users know.

For estimators that bring their own grouping. The built-in ones use `core_algos.Groups`, which takes labels of any kind
and leaves failed rows out.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.core_algos import Groups


def as_torch_index(index: Sequence[Any] | np.ndarray | Tensor, device: str | torch.device | None = None) -> Tensor:
    """One number per label, int64 [B]: equal labels, equal numbers.

    Integers, and floats all within 1e-6 of integers, stay what they are. Anything else is numbered from 0 in the
    order of its string form.
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
    """(mean, std, count), float32 [G], of scores [B] by their group's number `gidx` [B] in 0 … G - 1.

    std has n - 1 in the denominator and is at least sqrt(eps). A group of one, or none, has mean 0 and std 1.
    Raises ValueError if the lengths differ.
    """
    scores = torch.as_tensor(scores, device=device).flatten().float()
    gidx = as_torch_index(gidx, device=scores.device)
    groups = Groups(gidx, torch.ones(len(scores), 1, device=scores.device))
    size = int(gidx.max()) + 1 if len(gidx) else 0

    def per_group(per_row: Tensor, of_none: float) -> Tensor:
        return scores.new_full((size,), of_none).scatter(0, gidx, per_row)

    std = groups.std(scores).clamp(min=math.sqrt(eps))
    return per_group(groups.mean(scores), 0.0), per_group(std, 1.0), per_group(groups.count, 0.0)
