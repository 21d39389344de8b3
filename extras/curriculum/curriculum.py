"""Samplers that follow what the policy can do: rows of a level at a time, or those that are neither won nor lost.

    data.sampler.class_path=extras/curriculum/curriculum.py data.sampler.class_name=SuccessRateSampler \\
    'data.sampler.kwargs={key: extra_info.level}'

Both hear of every sample that was scored, also of those that dynamic sampling left out of a step
(training/collection.py), and what they learnt is in the checkpoint: a resumed run draws what an unbroken one would.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sized
from numbers import Real
from typing import Any

import numpy as np

from configs.schema import DataConfig
from data.sampler import AbstractSampler
from data.seeding import numpy_generator
from extras.curriculum.mixture import column_of

NOT_KNOWN = 0.5  # the success rate of what was never drawn; it counts as one observation


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
