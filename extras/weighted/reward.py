"""Scores by several functions, as the weighted sum that `reward.functions` says."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.import_utils import callable_name
from configs.schema import ScoringConfig
from data.protocol import DataProto
from data.rows import RUN_COLUMNS
from data.types import NotScored, Row
from training.reward import RewardRun, Scored, read_results
from training.reward_function import FunctionReward, load_function, with_name

# What the log and the records of samples call the scores of a run and the texts beside them.
TAKEN = frozenset(("score", "reward", "rm_score", "function_score", "step", "input", "output", "gts", "turns", "rows"))
NOT_MINE = NotScored("not mine", "it returned None")  # of one of the functions
NO_PART = NotScored("error", "all functions returned None")


@dataclass(frozen=True)
class Part:
    """One of the functions; `label`: what it is called in the log; `data_sources`: whose rows it scores, empty: all."""

    label: str
    weight: float
    function: FunctionReward
    data_sources: frozenset[str]

    def begin(self, data: DataProto) -> Callable[[], Any]:
        """Starts scoring, and returns a function that waits for the results: None for rows of other data sources."""
        if not self.data_sources or self.data_sources.issuperset(data.data_source):
            return self.function.begin(data)
        selected = [row for row, source in enumerate(data.data_source) if source in self.data_sources]
        wait = self.function.begin(data[selected]) if selected else list

        def spread() -> list[Any]:
            result_of = dict(zip(selected, wait(), strict=True))
            return [result_of.get(row) for row in range(len(data))]

        return spread

    def read(self, returned: Any, rows: int) -> list[Row | NotScored]:
        """Reads what the function returned for `rows` responses: each's values under their names in the log."""
        name = f"{self.label} of reward.functions, {callable_name(self.function.function)}"
        if isinstance(returned, list | tuple):
            returned = [NOT_MINE if score is None else score for score in returned]
        return [
            {self.label: result.score} | {f"{self.label}/{key}": value for key, value in result.extra.items()}
            if isinstance(result, Scored)
            else result
            for result in read_results(returned, (rows, 1), name)
        ]


class WeightedReward:
    """A reward manager whose score is the weighted sum of what several functions return for a response.

    The parts come as columns under their labels, and what their dicts hold beside the score as LABEL/KEY. One that
    returns None has no part in the response, and None in its columns. A response that one of them cannot score, or in
    which none has a part, is not scored.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts

    @property
    def title(self) -> str:
        return f"reward.functions ({', '.join(part.label for part in self.parts)})"

    def check(self, rows: Mapping[int, Row]) -> None:
        """Checks each function as `FunctionReward.check` does."""
        for part in self.parts:
            part.function.check(rows)

    def __call__(self, data: DataProto) -> list[Any]:
        waits = [part.begin(data) for part in self.parts]
        return self.combine([wait() for wait in waits], len(data))

    def combine(self, results: list[Any], rows: int) -> list[Any]:
        """Joins the functions' results into a dict for each response, or NotScored if one could not score it."""
        read = [part.read(result, rows) for part, result in zip(self.parts, results, strict=True)]
        values = [value for of_part in read for value in of_part if isinstance(value, dict)]
        names = [*(part.label for part in self.parts), *(name for value in values for name in value)]
        return [self._sum(row, dict.fromkeys(names)) for row in zip(*read, strict=True)]

    def _sum(self, results: Sequence[Row | NotScored], empty: Row) -> Row | NotScored:
        combined = {"score": 0.0, **empty}
        for part, result in zip(self.parts, results, strict=True):
            if isinstance(result, dict):
                combined |= result | {"score": combined["score"] + part.weight * result[part.label]}
            elif result is not NOT_MINE:
                return replace(result, reason=f"{result.reason}, in {part.label}")
        return NO_PART if all(result is NOT_MINE for result in results) else combined


def load_parts(config: ScoringConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[Part]:
    """Loads the functions of reward.functions, each under its name in the log; with its file's, where the name is
    another's, the score's or a column's."""
    entries = [with_name(entry, f"reward.functions[{index}]") for index, entry in enumerate(config.functions)]
    names = Counter([*(entry.name for entry in entries), *RUN_COLUMNS, *TAKEN])
    parts: list[Part] = []
    for index, entry in enumerate(entries):
        key = f"reward.functions[{index}]"
        try:
            function = load_function(entry, config, tokenizer, key)
        except (ValueError, ImportError, AttributeError, OSError, RuntimeError) as error:
            raise ConfigError(f"{key}: {error}") from error
        if not function.columns:
            raise ConfigError(
                f"{key}: {entry.name} in {entry.path} takes a DataProto; here a function takes solution_str, or "
                "solution_strs for all at once."
            )
        label = entry.name if names[entry.name] == 1 else f"{Path(entry.path).stem}.{entry.name}"
        if label in (labels := [part.label for part in parts]):
            raise ConfigError(
                f"{key} and reward.functions[{labels.index(label)}] would both be logged as reward/{label}: rename one "
                "in its file."
            )
        parts.append(Part(label, entry.weight, function, frozenset(entry.data_sources)))
    return parts


def load(settings: ScoringConfig, run: RewardRun) -> WeightedReward:
    """Loads the functions of a run (the entry of the table)."""
    return WeightedReward(load_parts(settings, run.tokenizer))
