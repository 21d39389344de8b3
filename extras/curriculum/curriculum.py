"""Samplers that follow what the policy can do: rows of a level at a time, or those that are neither won nor lost.
And one that mixes sources by data.source_weights.

    data.sampler.class_path=extras/curriculum/curriculum.py data.sampler.class_name=SuccessRateSampler \\
    'data.sampler.kwargs={key: extra_info.level}'

The first two hear of every sample that was scored, also of those that dynamic sampling left out of a step
(`positions_and_metrics`), and what they learnt is in the checkpoint: a resumed run draws what an unbroken one would.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np

from configs.schema import DataConfig
from data.protocol import DataProto
from data.rl_dataset import RLHFDataset
from data.sampler import AbstractSampler, RandomSampler
from data.seeding import numpy_generator
from training.episode_rows import EpisodeRows

NOT_KNOWN = 0.5  # the success rate of what was never drawn; it counts as one observation


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


def check_bounds(name: str, value: float, holds: bool, bounds: str) -> None:
    """Raises ValueError unless `value` of data.sampler.kwargs, called `name`, `holds` its `bounds`."""
    if not holds:
        raise ValueError(f"data.sampler.kwargs.{name}={value}: it must be {bounds}.")


class CurriculumSampler(AbstractSampler):
    """Base of both: rows in bins, by their value in a column, and a success rate of each bin.

    A subclass says by `weights()` how often each bin is drawn from; the row in it is drawn evenly.

    Args:
        key: the column, extra_info.difficulty for one within a dictionary; None: each row is a bin.
        success_above: a sample with a higher reward is a success.
        memory: of this share at least is the newest observation in a rate, the samples of a row in a step; until
            then each counts alike, and so does what is taken for the rate at first. 1: the newest counts alone.
    """

    def __init__(
        self,
        data_source: Sized,
        data_config: DataConfig,
        key: str | None = None,
        success_above: float = 0.5,
        memory: float = 0.2,
    ) -> None:
        super().__init__(data_source, data_config)
        check_bounds("memory", memory, 0 < memory <= 1, "above 0 and at most 1")
        self.key, self.success_above, self.memory = key, success_above, memory
        self.rates: dict[str, float] = {}  # by bin, of those that were drawn
        self.observed: dict[str, int] = {}  # by bin, how often
        self.drawn = self.position = 0  # of all draws; in the epoch
        self._look_through()

    def _look_through(self) -> None:
        """Sorts the rows into bins."""
        size = self.rows_of_epoch()
        values = range(size) if self.key is None else column_of(self.data_source, self.key)[:size]
        if empty := [position for position, value in enumerate(values) if value is None]:
            raise ValueError(
                f"{type(self).__name__}: row {empty[0]} and {len(empty) - 1} others have no {self.key}: "
                "data.sampler.kwargs.key must name a column that every row fills."
            )
        rows: dict[Any, list[int]] = defaultdict(list)
        for position, value in enumerate(values):
            if not isinstance(value, str if isinstance(values[0], str) else Real):
                raise ValueError(
                    f"{type(self).__name__}: {self.key} is {values[0]!r} in row 0 and {value!r} in row {position}: "
                    "levels are all numbers, or all texts."
                )
            rows[value].append(position)
        self.bins = {str(value): np.array(rows[value]) for value in sorted(rows)}
        self.bin_of = {position: name for name, positions in self.bins.items() for position in positions.tolist()}
        self._draw_from: np.ndarray | None = None

    @abstractmethod
    def weights(self) -> np.ndarray:
        """Returns the relative frequency of each of `self.bins`, [bins] float64."""

    def rate(self, name: str) -> float:
        """The success rate of a bin, as far as it is known."""
        return self.rates.get(name, NOT_KNOWN)

    def __iter__(self) -> Iterator[int]:
        if self.rows_of_epoch() != len(self.bin_of):
            self._look_through()
        while self.position < self.rows_of_epoch():
            self.position, self.drawn = self.position + 1, self.drawn + 1
            yield self._draw()
        self.position = 0

    def _draw(self) -> int:
        if self._draw_from is None:
            self._draw_from = np.cumsum(self.weights())
        seed = 0 if self.data_config.seed is None else self.data_config.seed
        of_bin, of_row = numpy_generator(seed, "curriculum", self.drawn).random(2)
        chosen = np.searchsorted(self._draw_from, of_bin * self._draw_from[-1], side="right")
        positions = self.bins[[*self.bins][chosen]]
        return int(positions[int(of_row * len(positions))])

    def update(self, indices: np.ndarray, metrics: Mapping[str, np.ndarray]) -> None:
        """Takes the samples of a step into the rates: the share of successes among a row's is one observation."""
        wins = metrics["reward"] > self.success_above
        for position in dict.fromkeys(indices.tolist()):
            name = self.bin_of[position]
            before, times = self.rate(name), self.observed.get(name, 0)
            weight = max(self.memory, 1 / (times + 2))  # those before it, what was taken for the rate, and itself
            self.rates[name] = before + weight * (float(wins[indices == position].mean()) - before)
            self.observed[name] = times + 1
        self._draw_from = None

    def state_dict(self) -> dict[str, Any]:
        return {"rates": dict(self.rates), "observed": dict(self.observed), "drawn": self.drawn, "place": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.drawn, self.position = dict(state["rates"]), state["drawn"], state["place"]
        self.observed = dict(state["observed"])
        self._draw_from = None


class SuccessRateSampler(CurriculumSampler):
    """Draws most from bins that are won about half of the time, by p (1 - p): these are the groups that teach.

    Args:
        floor: a bin that is always won, or always lost, is drawn from by this share of the most.
    """

    def __init__(self, data_source: Sized, data_config: DataConfig, floor: float = 0.05, **settings: Any) -> None:
        check_bounds("floor", floor, 0 < floor <= 1, "above 0, as what is never drawn is never known better, to 1")
        self.floor = floor
        super().__init__(data_source, data_config, **settings)

    def weights(self) -> np.ndarray:
        rates = np.array([self.rate(name) for name in self.bins])
        return np.maximum(4 * rates * (1 - rates), self.floor)


class DifficultySampler(CurriculumSampler):
    """Draws from one level at a time, the easiest first, and goes on to the next once it is won often enough.

    Args:
        key: the column with the level: numbers, or texts in their order.
        go_on: the success rate of a level from which the next is drawn.
        review: of this share are draws from the levels before it.
    """

    def __init__(
        self,
        data_source: Sized,
        data_config: DataConfig,
        key: str = "extra_info.difficulty",
        go_on: float = 0.8,
        review: float = 0.2,
        **settings: Any,
    ) -> None:
        check_bounds("go_on", go_on, 0 < go_on < 1, "between 0 and 1, as a rate that is estimated is never 1")
        check_bounds("review", review, 0 <= review < 1, "from 0 to below 1, or the level itself is never drawn")
        self.go_on, self.review, self.level = go_on, review, 0
        super().__init__(data_source, data_config, key=key, **settings)

    def weights(self) -> np.ndarray:
        weights = np.zeros(len(self.bins))
        weights[: self.level] = self.review / max(self.level, 1)
        weights[self.level] = 1 - self.review
        return weights

    def update(self, indices: np.ndarray, metrics: Mapping[str, np.ndarray]) -> None:
        super().update(indices, metrics)
        names = [*self.bins]
        if self.level < len(names) - 1 and self.rates.get(names[self.level], 0.0) >= self.go_on:
            self.level += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.level = state["level"]


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


# What samplers with update(indices, metrics) hear of a step


def positions_and_metrics(batch: DataProto) -> tuple[np.ndarray, "SampleMetrics"]:
    """Returns the places in the dataset of the samples that did not fail, [E] int64, and numbers of each.

    A sample is a row, or an episode of several. reward: the score. length: the policy's tokens. loss: how far the score
    is below the mean of all these, which is the policy gradient's where that mean is the baseline and the ratio 1. The
    estimator's own advantages do not compare rows: in a group they may sum to 0, whatever it scored. What the reward
    returned beside the score is there, too.
    """
    episodes = EpisodeRows(batch)
    is_complete = episodes.is_complete()
    scores = episodes.scores()[is_complete].double()
    lengths = episodes.total(batch.batch["response_mask"].sum(1))[is_complete]
    numbers = {"reward": scores, "length": lengths, "loss": scores.mean() - scores}
    last_row = episodes.last_row[is_complete.numpy()]
    metrics = {name: batch.non_tensor_batch[name][last_row] for name in batch.meta_info["reward_extra_keys"]}
    metrics |= {name: values.double().numpy() for name, values in numbers.items()}
    positions = batch.dataset_position[last_row].astype(np.int64)
    return positions, SampleMetrics(metrics, positions)


class SampleMetrics(dict[str, np.ndarray]):
    """Holds numbers of samples by name, metrics["loss"] [E], and by row, metrics[7]["loss"]: the mean of its samples.

    Rows are known by their position in the dataset, if a sample of theirs is here. Iteration is over the names alone.
    """

    def __init__(self, by_name: Mapping[str, np.ndarray], positions: np.ndarray) -> None:
        super().__init__(by_name)
        numbers = {name: values for name, values in by_name.items() if values.dtype != object}  # a reward's may be text
        of_row = {row: positions == row for row in dict.fromkeys(positions.tolist())}
        self.rows = {row: {name: float(numbers[name][mask].mean()) for name in numbers} for row, mask in of_row.items()}

    def __missing__(self, position: int) -> dict[str, float]:
        return self.rows[position]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.rows

    def get(self, key: str | int, default: Any = None) -> Any:
        return super().get(key, self.rows.get(key, default))
