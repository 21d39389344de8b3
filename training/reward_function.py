"""Calls reward functions, one or several with weights, as a reward manager, and reads what they return.

A function's form is read from its signature, and it is given the arguments that it names. They come from a
`reward_view` (training/reward.py), a row for each response.
"""

import inspect
import numbers
import re
import reprlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.schema import RewardFunctionConfig, ScoringConfig, WeightedFunctionConfig
from data.concurrency import run_all
from data.import_utils import bind, callable_name, load_extern_object
from data.protocol import DataProto, object_array
from training.scorers import NotScored
from training.scorers.pool import Scorers
from training.scorers.program import is_async

Columns = dict[str, np.ndarray]
Failures = dict[int, NotScored]  # by row
FORMS = (
    "compute_score(data_source, solution_str, ground_truth, extra_info=None), "
    "compute_score(data_sources, solution_strs, ground_truths, extra_infos) for a whole batch in lists, "
    "compute_reward(data, tokenizer=None) for one in a DataProto, or "
    "compute_reward(prompt, response, ground_truth)"
)
# What a function of one response may name, and the column of the view that holds it. The first four are verl's.
ARGUMENTS = {
    "data_source": "data_source",
    "solution_str": "responses",
    "ground_truth": "ground_truths",
    "extra_info": "extra_info",
    "prompt": "prompts",
    "response": "responses",
}
LISTS = {f"{name}s": column for name, column in ARGUMENTS.items()}  # the same of a function of a whole batch
VERL_ARGUMENTS = 4


class FunctionReward:
    """A reward manager from a function, sync or async; its form is read from its signature.

    A function of one response is given exactly what it names among `ARGUMENTS` and `split` ("train" or "val"); one of
    lists, each with an element for every response, among `LISTS` and `split`. With **kwargs it gets all of verl's four.

    Args:
        function: in one of the four `FORMS`.
        reward_kwargs: passed on to every call; they win over what the caller passes.
        max_concurrent, timeout: limits of an async function that is called in this process.
        scorers: processes that call it; None: it is called here, and what it raises is raised.
        key: the setting that names it.

    Raises:
        ValueError: the signature has none of the forms, or does not go with `reward_kwargs`.
    """

    def __init__(
        self,
        function: Callable,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reward_kwargs: dict | None = None,
        *,
        max_concurrent: int = ScoringConfig.max_concurrent,
        timeout: float | None = None,
        scorers: Scorers | None = None,
        key: str = "reward.custom_reward_function",
    ) -> None:
        self.function = function
        self.tokenizer = tokenizer
        self.reward_kwargs = reward_kwargs or {}
        self.max_concurrent, self.timeout, self.scorers = max_concurrent, timeout, scorers
        signature = inspect.signature(function)
        self.takes_one_response = bool({"solution_str", "response"} & set(signature.parameters))
        takes_data = next(iter(signature.parameters), None) == "data"
        takes_lists = not takes_data and bool({"solution_strs", "responses"} & set(signature.parameters))
        self.columns = ARGUMENTS if self.takes_one_response else LISTS if takes_lists else {}
        if not self.columns and not takes_data:
            raise ValueError(
                f"the reward function {callable_name(function)}{signature} has none of the known forms: {FORMS}."
            )
        known = [*self.columns, "split"] if self.columns else ["data", "tokenizer"]
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        self.wanted = {name for name in known if name in signature.parameters}
        ground_truth = "ground_truths" if self.columns is LISTS else "ground_truth"
        given = ground_truth in self.reward_kwargs
        self.needs_ground_truth = not given and requires(signature, ground_truth)
        if takes_all:
            self.wanted |= set(list(self.columns)[:VERL_ARGUMENTS])
        settings = f"{key}.reward_kwargs"
        bind(function, dict.fromkeys(sorted(self.wanted)), self.reward_kwargs, "the reward function", settings=settings)

    def __call__(self, data: DataProto) -> Any:
        """Returns the function's results, a list or one for all; NotScored for a row that could not be scored."""
        return self.begin(data)()

    def begin(self, data: DataProto) -> Callable[[], Any]:
        """Starts scoring, and returns a function that waits for the results."""
        calls = [{name: call[name] for name in self.wanted} for call in self._calls(data)]
        if self.scorers is None:
            results = self._called_here(calls)
            return lambda: results
        rows = 1 if self.takes_one_response else len(data)
        return partial(self._joined, [self.scorers.submit(call, rows) for call in calls], len(data))

    def scores_rows(self) -> bool:
        """Whether a row can be scored in a process before the others are there."""
        return self.takes_one_response and self.scorers is not None

    def of_rows(self, begun: list[list[Any]]) -> list[Any]:
        """Joins the results that `begin` had for each row of a batch alone."""
        return [result for [result] in begun]

    def _called_here(self, calls: list[dict[str, Any]]) -> Any:
        results = [self.function(**call | self.reward_kwargs) for call in calls]
        if results and inspect.isawaitable(results[0]):
            results = run_all(results, self.max_concurrent, self.timeout)
        return results if self.takes_one_response else results[0]

    def _joined(self, futures: list[Future], rows: int) -> Any:
        try:
            results = [future.result() for future in futures]
        finally:
            for future in futures:  # those that wait, if one has failed
                future.cancel()
        if self.takes_one_response:
            return results
        [result] = results
        return [result] * rows if isinstance(result, NotScored) else result

    def _calls(self, data: DataProto) -> list[dict[str, Any]]:
        """Returns the arguments that each call may name: a call for every response, or one for all."""
        if not self.columns:
            return [{"data": data, "tokenizer": self.tokenizer}]
        split = "val" if data.meta_info.get("validate") else "train"
        columns = {name: list(data.get(column, [None] * len(data))) for name, column in self.columns.items()}
        if not self.takes_one_response:
            return [columns | {"split": split}]
        return [{"split": split} | {name: column[row] for name, column in columns.items()} for row in range(len(data))]


def requires(signature: inspect.Signature, argument: str) -> bool:
    """Whether an argument has no default and, as far as is written there, may not be None."""
    parameter = signature.parameters.get(argument)
    if parameter is None or parameter.default is not parameter.empty:
        return False
    return not re.search("None|Optional", str(parameter.annotation))


def load_function(
    entry: RewardFunctionConfig,
    config: ScoringConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    key: str = "reward.custom_reward_function",
) -> FunctionReward:
    """Loads the function that `entry` names under the setting `key`, to be called by the limits of `config`.

    One that takes a DataProto is called in this process: its rows cannot be scored one by one.

    Raises:
        ValueError: it has none of the forms; and whatever loading the file raises.
    """
    function = load_extern_object(entry.path, entry.name)
    limits = {"max_concurrent": config.max_concurrent, "timeout": config.timeout, "key": key}
    reward = FunctionReward(function, tokenizer, entry.reward_kwargs, **limits)
    if reward.columns and not config.in_process:
        reward.scorers = Scorers(entry.path, entry.name, reward.reward_kwargs, is_async(function), config)
    return reward


def parse_scores(result: Any, shape: tuple[int, int], name: str) -> tuple[Tensor, Columns, Failures]:
    """Reads numbers, dicts or a tensor as float32 scores ([B] or [B, R], with `shape` (B, R)), the dicts' columns, and
    the rows that the reward called `name` could not score, whose scores and numbers are 0, and all else None.

    Raises:
        ValueError: wrong number, type or shape, or a score that is not finite; names the row.
    """
    rows, extra, failures = shape[0], {}, {}
    if isinstance(result, dict) and "reward_tensor" in result:  # verl's managers
        said = result.get("reward_extra_info") or {}
        if bad := {key: len(values) for key, values in said.items() if len(values) != rows}:
            raise ValueError(f"the reward {name} returned reward_extra_info of the lengths {bad} for {rows} responses.")
        result, extra = result["reward_tensor"], {key: object_array(list(values)) for key, values in said.items()}
    allowed = f"it must return [{rows}] numbers, one per response, or {list(shape)}, one per response token"
    if isinstance(result, np.ndarray):
        result = list(result) if result.ndim == 1 else torch.as_tensor(result)
    if isinstance(result, list | tuple):
        if len(result) != rows:
            raise ValueError(f"the reward {name} returned {len(result)} scores for {rows} responses: {allowed}.")
        if NotScored in map(type, result):
            result, failures = set_aside(result)
        if any(isinstance(item, dict) for item in result):
            result, extra = split_dicts(result, name)
        result = torch.tensor([as_number(score, row, name) for row, score in enumerate(result)])
    if not isinstance(result, Tensor):
        raise ValueError(f"the reward {name} returned {reprlib.repr(result)}: {allowed}, as a list or a tensor.")
    scores = result.detach().float().cpu()
    if tuple(scores.shape) not in ((rows,), tuple(shape)):
        raise ValueError(f"the reward {name} returned scores of shape {list(scores.shape)}: {allowed}.")
    bad = (~torch.isfinite(scores)).nonzero().tolist()
    if bad:
        raise ValueError(
            f"the reward {name} returned {scores[tuple(bad[0])].item()} for response {bad[0][0]} ({len(bad)} of "
            f"{scores.numel()} scores are not finite): return 0.0 where there is no score."
        )
    return scores, extra, failures


def set_aside(results: list[Any]) -> tuple[list[Any], Failures]:
    """Replaces the results of rows that could not be scored by a filler of the others' kind; returns those rows too."""
    failures = {row: result for row, result in enumerate(results) if isinstance(result, NotScored)}
    example = next((result for result in results if not isinstance(result, NotScored)), 0.0)
    filler: Any = 0.0
    if isinstance(example, dict):
        filler = {key: 0.0 if isinstance(value, numbers.Real) else None for key, value in example.items()}
    return [filler if row in failures else result for row, result in enumerate(results)], failures


def as_number(score: Any, row: int, name: str) -> float:
    if isinstance(score, Tensor | np.ndarray) and score.shape in ((), (1,)):
        score = score.item()
    if not isinstance(score, numbers.Real | np.bool_):
        raise ValueError(
            f"the reward {name} returned {reprlib.repr(score)} for response {row}: it must be a number, or a dict "
            "with the number as 'score'."
        )
    return float(score)


def split_dicts(results: list[dict], name: str) -> tuple[list[Any], Columns]:
    """Splits dicts into scores and a column for every other key."""
    keys = next(set(result) for result in results if isinstance(result, dict))
    for row, result in enumerate(results):
        if not isinstance(result, dict) or set(result) != keys or "score" not in keys:
            found = sorted(result) if isinstance(result, dict) else reprlib.repr(result)
            raise ValueError(
                f"the reward {name} returned {found} for response {row} and {sorted(keys)} for another: either every "
                "response gets a dict, each with 'score' and the same keys, or every response gets a number."
            )
    columns = {key: [result[key] for result in results] for key in results[0]}
    return columns.pop("score"), {key: object_array(values) for key, values in columns.items()}


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
        """Starts scoring, and returns a function that waits for the results of each function."""
        waits = [part.function.begin(data) for part in self.parts]
        return lambda: [wait() for wait in waits]

    def of_rows(self, begun: list[list[Any]]) -> list[Any]:
        """Joins the results that `begin` had for each row of a batch alone."""
        results = [part.function.of_rows([row[place] for row in begun]) for place, part in enumerate(self.parts)]
        return self.combine(results, len(begun))

    def combine(self, results: list[Any], rows: int) -> list[Any]:
        """Joins the functions' results into a dict for each response, or NotScored if one could not score it."""
        combined: list[Any] = [{"score": 0.0} for _ in range(rows)]
        lost: dict[int, NotScored] = {}
        for part, result in zip(self.parts, results, strict=True):
            name = f"{part.label} of reward.functions, {callable_name(part.function.function)}"
            scores, columns, failures = parse_scores(result, (rows, 1), name)
            for row, failure in failures.items():
                lost.setdefault(row, NotScored(failure.outcome, f"{failure.said}, in {part.label}", failure.trace))
            for row, score in enumerate(scores.flatten().tolist()):
                combined[row]["score"] += part.weight * score
                said = {f"{part.label}/{key}": values[row] for key, values in columns.items()}
                combined[row] |= {part.label: score, **said}
        return [lost.get(row, result) for row, result in enumerate(combined)]


def load_parts(config: ScoringConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[Part]:
    """Loads the functions of reward.functions.

    Raises:
        ConfigError: two would be logged under one name.
        ValueError …: an entry cannot be loaded, or is of a whole DataProto; the key names it.
    """
    parts = []
    for place, (entry, label) in enumerate(zip(config.functions, labels(config.functions), strict=True)):
        key = f"reward.functions[{place}]"
        try:
            function = load_function(entry, config, tokenizer, key)
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
    """Names the functions in the log: by their names, and by their files' if several have one name."""
    names = Counter(entry.name for entry in entries)
    found = [entry.name if names[entry.name] == 1 else f"{Path(entry.path).stem}.{entry.name}" for entry in entries]
    for place, label in enumerate(found):
        if (first := found.index(label)) != place:
            raise ConfigError(
                f"reward.functions[{place}] and reward.functions[{first}] would both be logged as reward/{label}: "
                "define it under another name in its file."
            )
    return found
