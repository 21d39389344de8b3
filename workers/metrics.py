"""Metrics of one update, pooled exactly over its micro-batches."""

from collections import defaultdict

from torch import Tensor


class PooledMetrics:
    """Sums (parts of a loss that is already normalised) and means (weighted by the tokens they were taken over)."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = defaultdict(float)

    def add_sum(self, name: str, value: Tensor) -> None:
        self._totals[name] += float(value.detach())

    def add_mean(self, name: str, value: Tensor | float, weight: float) -> None:
        self._totals[name] += float(value) * weight
        self._weights[name] += weight

    def reduce(self) -> dict[str, float]:
        """Name → number; a mean over nothing is 0."""
        return {
            name: total / max(self._weights[name], 1) if name in self._weights else total
            for name, total in self._totals.items()
        }
