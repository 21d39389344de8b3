"""Draws rows of several sources in proportion to weights."""

from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np

from configs.schema import DataConfig
from data.rl_dataset import RLHFDataset
from data.sampler import RandomSampler
from data.seeding import numpy_generator


@runtime_checkable
class HasColumns(Protocol):
    """A dataset that gives a whole column at once: `column("extra_info.difficulty")`, one value a row."""

    def column(self, name: str) -> Sequence[Any]: ...


def column_of(dataset: Any, name: str) -> Sequence[Any]:
    """Returns a column of `dataset`, one value a row; dots lead into dictionaries; None where there is none.

    Rows of files are read as they stand there; another dataset without `column` is asked for row after row.
    """
    if isinstance(dataset, HasColumns):
        return dataset.column(name)
    rows = dataset.rows if isinstance(dataset, RLHFDataset) else []
    if len(rows) != len(dataset):
        rows = (dataset[position] for position in range(len(dataset)))
    return [value_in(row, name) for row in rows]


def value_in(row: Mapping[str, Any], name: str) -> Any:
    """Returns row["a"]["b"] for "a.b"; None where there is none."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


class MixtureSampler(RandomSampler):
    """Draws rows of several sources (column data.reward_fn_key) in proportion to data.source_weights.

    An epoch is as many rows as the dataset has. A source that runs out in it begins anew; of one with more rows than
    its share, each epoch draws others.
    """

    def __init__(self, data_source: Sized, data_config: DataConfig, seed: int) -> None:
        super().__init__(data_source, data_config, seed)
        iter(self)  # or raises

    def __iter__(self) -> Iterator[int]:
        sources = column_of(self.data_source, self.data_config.reward_fn_key)[: self.rows_of_epoch()]
        weights, rng = self.data_config.source_weights, numpy_generator(self.seed, "mixture", self.epoch)
        return iter(mixed_order(sources, weights, rng, self.data_config.shuffle))


def mixed_order(
    sources: Sequence[Hashable], weights: Mapping[str, float], rng: np.random.Generator, shuffle: bool = True
) -> list[int]:
    """Orders as many positions as there are rows, those of each source as often as `weights` says (in proportion).

    Each source's rows come evenly spread over the order, each once before any comes twice.

    Raises:
        ValueError: a source of the data has no weight, a weight no source, or one is negative or all are 0.
    """
    positions: dict[str, list[int]] = {}
    for position, source in enumerate(sources):
        positions.setdefault(str(source or "unknown"), []).append(position)
    weight_of = {str(source): float(weight) for source, weight in weights.items()}
    if weight_of.keys() != positions.keys() or min(weight_of.values()) < 0 or max(weight_of.values()) == 0:
        raise ValueError(
            f"data.source_weights={weight_of} must hold a number from 0 (never) up for each source of the data, one of "
            f"them above 0; the sources (column data.reward_fn_key) are {', '.join(sorted(positions))}."
        )
    draws = []
    for source, count in shares(weight_of, len(sources)).items():
        cycles = -(-count // len(positions[source]))
        rows = [rng.permutation(positions[source]) if shuffle else np.array(positions[source]) for _ in range(cycles)]
        times = (np.arange(count) + rng.random()) / max(count, 1)
        draws += zip(times, np.concatenate([*rows, np.array([], int)])[:count].tolist(), strict=True)
    return [position for _, position in sorted(draws)]


def shares(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Returns whole numbers in proportion to `weights` that sum to `total` (largest remainder)."""
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    return counts | {name: counts[name] + 1 for name in by_remainder[: total - sum(counts.values())]}
