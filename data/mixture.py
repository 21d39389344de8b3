"""Several sources in one order: how many rows of each, and evenly spread, so that every batch has its share."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class HasColumns(Protocol):
    """A dataset that gives a whole column at once: `column("extra_info.difficulty")`, one value a row."""

    def column(self, name: str) -> Sequence[Any]: ...


def column_of(dataset: Any, name: str) -> Sequence[Any]:
    """A column of `dataset`, one value a row; dots lead into dictionaries; None where there is none.

    A dataset of another class that has no `column` is asked for row after row.
    """
    if isinstance(dataset, HasColumns):
        return dataset.column(name)
    return [value_in(dataset[position], name) for position in range(len(dataset))]


def value_in(row: Mapping[str, Any], name: str) -> Any:
    """row["a"]["b"] for "a.b"; None where there is none."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def mixed_order(
    sources: Sequence[Hashable], weights: Mapping[str, float], rng: np.random.Generator, shuffle: bool = True
) -> list[int]:
    """Positions of rows, as many as there are, those of each source as often as `weights` says (in proportion).

    Each source's rows come evenly spread over the order, each once before any comes twice.

    Raises:
        ValueError: a source of the data has no weight, a weight no source, or one is negative or all are 0.
    """
    places: dict[str, list[int]] = {}
    for position, source in enumerate(sources):
        places.setdefault(str(source or "unknown"), []).append(position)
    given = {str(source): float(weight) for source, weight in weights.items()}
    if given.keys() != places.keys() or min(given.values()) < 0 or max(given.values()) == 0:
        raise ValueError(
            f"data.source_weights={given} must hold a number from 0 (never) up for each source of the data, one of "
            f"them above 0; the sources (column data.reward_fn_key) are {', '.join(sorted(places))}."
        )
    draws = []
    for source, count in shares(given, len(sources)).items():
        cycles = -(-count // len(places[source]))
        rows = [rng.permutation(places[source]) if shuffle else np.array(places[source]) for _ in range(cycles)]
        times = (np.arange(count) + rng.random()) / max(count, 1)
        draws += zip(times, np.concatenate([*rows, np.array([], int)])[:count].tolist(), strict=True)
    return [position for _, position in sorted(draws)]


def shares(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers in proportion to `weights` that sum to `total` (largest remainder)."""
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    return counts | {name: counts[name] + 1 for name in by_rest[: total - sum(counts.values())]}
