"""Several reward functions as one reward manager (reward.functions): the score is their weighted sum."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import ScoringConfig, WeightedFunctionConfig
from data.import_utils import callable_name
from data.protocol import DataProto
from training.reward_function import FunctionReward
from training.reward_results import as_scores
from training.scorers import NotScored


@dataclass(frozen=True)
class Part:
    """One of the functions; `label`: what it is called in the log."""

    label: str
    weight: float
    function: FunctionReward


class WeightedReward:
    """A reward manager whose score is the weighted sum of what several functions return for a response.

    Each returns a number, or a dict with `score`, for a response; the parts come as columns under their labels, and
    what their dicts hold beside the score as LABEL/KEY. A response that one of them cannot score is not scored.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts

    def __call__(self, data: DataProto) -> list[Any]:
        return self.combine(self.begin(data)(), len(data))

    def begin(self, data: DataProto) -> Callable[[], list[Any]]:
        """Starts scoring; what is returned waits for what each function returns."""
        waits = [part.function.begin(data) for part in self.parts]
        return lambda: [wait() for wait in waits]

    def of_rows(self, begun: list[list[Any]]) -> list[Any]:
        """The results for a batch, from what `begin` had for each of its rows alone."""
        results = [part.function.of_rows([row[place] for row in begun]) for place, part in enumerate(self.parts)]
        return self.combine(results, len(begun))

    def combine(self, results: list[Any], rows: int) -> list[Any]:
        """What each function returned for so many responses → dicts, and NotScored where one could not."""
        combined: list[Any] = [{"score": 0.0} for _ in range(rows)]
        lost: dict[int, NotScored] = {}
        for part, result in zip(self.parts, results, strict=True):
            name = f"{part.label} of reward.functions, {callable_name(part.function.function)}"
            scores, columns, failures = as_scores(result, (rows, 1), name)
            for row, failure in failures.items():
                lost.setdefault(row, NotScored(failure.outcome, f"{failure.said}, in {part.label}", failure.trace))
            for row, score in enumerate(scores.flatten().tolist()):
                combined[row]["score"] += part.weight * score
                said = {f"{part.label}/{key}": values[row] for key, values in columns.items()}
                combined[row] |= {part.label: score, **said}
        return [lost.get(row, result) for row, result in enumerate(combined)]


def load_parts(config: ScoringConfig, load: Callable[[WeightedFunctionConfig, str], FunctionReward]) -> list[Part]:
    """The functions of reward.functions, by `load(entry, key)`.

    Raises:
        ConfigError: two would be logged under one name.
        ValueError …: an entry cannot be loaded, or is of a whole DataProto; the key names it.
    """
    parts = []
    for place, (entry, label) in enumerate(zip(config.functions, labels(config.functions), strict=True)):
        key = f"reward.functions[{place}]"
        try:
            function = load(entry, key)
        except (ValueError, ImportError, AttributeError, OSError, RuntimeError) as error:
            raise ConfigError(f"{key}: {error}") from error
        if not function.columns:
            raise ConfigError(
                f"{key}: {entry.name} in {entry.path} takes a DataProto, whose scores may be of single tokens: in "
                "reward.functions a function scores responses. Give it solution_str, or solution_strs for all at once."
            )
        parts.append(Part(label, entry.weight, function))
    return parts


def labels(entries: list[WeightedFunctionConfig]) -> list[str]:
    """What the functions are called in the log: their names, where several have one with their files'."""
    names = Counter(entry.name for entry in entries)
    found = [entry.name if names[entry.name] == 1 else f"{Path(entry.path).stem}.{entry.name}" for entry in entries]
    for place, label in enumerate(found):
        if (first := found.index(label)) != place:
            raise ConfigError(
                f"reward.functions[{place}] and reward.functions[{first}] would both be logged as reward/{label}: "
                "define it under another name in its file."
            )
    return found
