"""Metrics of one update, pooled exactly over its micro-batches and over all workers."""

from collections import defaultdict

from torch import Tensor

from workers.collectives import gather


class PooledMetrics:
    """Sums (parts of a loss that is already normalised), means (weighted by the tokens they are over) and maxima."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}

    def add_sum(self, name: str, value: Tensor) -> None:
        self._totals[name] += float(value.detach())

    def add_mean(self, name: str, value: Tensor | float, weight: float) -> None:
        self._totals[name] += float(value) * weight
        self._weights[name] += weight

    def add_max(self, name: str, value: Tensor | float) -> None:
        self._maxima[name] = max(self._maxima.get(name, float(value)), float(value))

    def reduce(self) -> dict[str, float]:
        """Name → number, the same on every rank, all of which have to ask for it; a mean over nothing is 0."""
        totals, weights, maxima = defaultdict(float), defaultdict(float), {}
        for part_totals, part_weights, part_maxima in gather((self._totals, self._weights, self._maxima)):
            for into, part in ((totals, part_totals), (weights, part_weights)):
                for name, value in part.items():
                    into[name] += value
            for name, value in part_maxima.items():
                maxima[name] = max(maxima.get(name, value), value)
        means = {name: total / max(weights[name], 1) if name in weights else total for name, total in totals.items()}
        return means | maxima
