"""Reads what a reward returned: scores, columns, and the responses that could not be scored; refuses anything else.

Numbers, dicts with a `score`, a [B] or [B, R] tensor, or verl's {"reward_tensor", "reward_extra_info"}: nothing else
reaches a loss, and a row without a score is none with a score of zero.
"""

import logging
import math
import numbers
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from configs.import_utils import callable_name
from configs.schema import ScoringConfig
from data.padding import last_token
from data.protocol import DataProto, object_array
from data.types import NotScored, Row

logger = logging.getLogger("training.reward")
Columns = dict[str, np.ndarray]
Failures = dict[int, NotScored]  # by row
TOO_LARGE = 1e18  # from here on the squares of a batch of scores are no longer finite in float32


@runtime_checkable
class ChecksRows(Protocol):
    """A reward that looks at rows before the run; `title` is what messages call it."""

    title: str

    def check(self, rows: Mapping[int, Row]) -> None:
        """Raises ConfigError where rows, by their position in the data set, lack what it needs."""


def reward_name(reward: Callable) -> str:
    """Returns what messages call a reward: its own `title`, or the name of a function or a class."""
    return reward.title if isinstance(reward, ChecksRows) else callable_name(reward)


def validate_result(
    result: Any, manager: Callable, shape: tuple[int, int], config: ScoringConfig
) -> tuple[Tensor, Columns, Failures]:
    """Checks what a manager returned.

    Returns:
        scores [B] or [B, R], with `shape` (B, R); extra columns [B]; and the rows that have no score: 0, or, of [B],
        reward.failure_score.

    Raises:
        RuntimeError, ValueError: as `compute_reward`.
    """
    name = reward_name(manager)
    scores, extra, failures = parse_scores(result, shape, name)
    if failures:
        check_failures(failures, shape[0], config, name)
        if config.on_failure == "score" and scores.ndim == 1:
            scores[sorted(failures)] = config.failure_score
    return scores, extra, failures


def parse_scores(result: Any, shape: tuple[int, int], name: str) -> tuple[Tensor, Columns, Failures]:
    """Reads numbers, dicts or a tensor as float32 scores ([B] or [B, R], with `shape` (B, R)), the dicts' columns, and
    the rows that have no score: their scores and numbers are 0, and all else None.

    A row that the reward called `name` could not score has none, nor has one with anything but a finite number, or
    with a dict of other keys than most. A number beside dicts is a score without further values: None in their columns.

    Raises:
        ValueError: the whole has a wrong number, type or shape.
    """
    rows, extra, failures = shape[0], {}, {}
    if isinstance(result, dict) and "reward_tensor" in result:  # verl's managers
        said = result.get("reward_extra_info") or {}
        if bad := {key: len(values) for key, values in said.items() if len(values) != rows}:
            raise ValueError(f"the reward {name} returned reward_extra_info of the lengths {bad} for {rows} responses.")
        result, extra = result["reward_tensor"], {key: object_array(list(values)) for key, values in said.items()}
    allowed = f"it must return [{rows}] numbers, one per response, or {list(shape)}, one per response token"
    if isinstance(result, np.ndarray | Tensor) and result.ndim == 1:
        result = result.tolist()
    if isinstance(result, list | tuple):
        if len(result) != rows:
            raise ValueError(f"the reward {name} returned {len(result)} scores for {rows} responses: {allowed}.")
        scores, split, failures = split_results(result)
        return scores, extra | split, failures
    if not isinstance(result, np.ndarray | Tensor):
        raise ValueError(f"the reward {name} returned {reprlib.repr(result)}: {allowed}, as a list or a tensor.")
    if tuple(result.shape) != tuple(shape):
        raise ValueError(f"the reward {name} returned scores of shape {list(result.shape)}: {allowed}.")
    scores = torch.as_tensor(result).detach().float().cpu().clone()
    return scores, extra, set_aside(scores)


def set_aside(scores: Tensor) -> Failures:
    """Fills the rows of `scores` [B, R] that hold anything but finite numbers with 0; returns those rows."""
    wrong, failures = ~(scores.abs() < TOO_LARGE), {}  # NaN is not below anything
    for row in wrong.any(1).nonzero()[:, 0].tolist():
        failures[row] = why_no_score(scores[row][wrong[row]][0].item(), frozenset())
        scores[row] = 0
    return failures


def split_results(results: Sequence[Any]) -> tuple[Tensor, Columns, Failures]:
    """Splits the results of B responses into scores [B], a column for every other key of their dicts, and the rows
    whose result is no score."""
    dicts = [result if isinstance(result, dict) else {"score": result} for result in results]
    kinds = Counter(frozenset(result) for result in results if isinstance(result, dict) and "score" in result)
    [(keys, _)] = kinds.most_common(1) or [(frozenset(["score"]), 0)]
    scores, failures, example = torch.tensor([as_number(one.get("score")) for one in dicts]), {}, {}
    for row, result in enumerate(results):
        if scores[row].isnan() or (isinstance(result, dict) and set(result) != keys):
            failures[row] = why_no_score(result, keys)
        elif set(dicts[row]) == keys:
            example = example or dicts[row]
    scores[[*failures]] = 0
    filler = {key: 0.0 if isinstance(value, numbers.Real) else None for key, value in example.items()}
    dicts = [filler if row in failures else one for row, one in enumerate(dicts)]
    columns = {key: object_array([one.get(key) for one in dicts]) for key in filler if key != "score"}
    return scores, columns, failures


def why_no_score(result: Any, keys: frozenset[str]) -> NotScored:
    """Says why `result` is no score, where most dicts of the batch have `keys`."""
    if isinstance(result, NotScored):
        return result
    if isinstance(result, dict) and set(result) != keys:
        rule = f"most dicts have {sorted(map(str, keys))}" if "score" in result else "a dict needs 'score'"
        return NotScored("error", f"it returned a dict of {sorted(map(str, result))}: {rule}")
    score = result["score"] if isinstance(result, dict) else result
    is_number = isinstance(score, numbers.Real)
    rule = f"finite number below {TOO_LARGE:g}" if is_number else "number, or a dict with it as 'score'"
    return NotScored("error", f"it returned {reprlib.repr(score)}: a score is a {rule}")


def as_number(score: Any) -> float:
    """Returns a number of any type as a float; NaN for anything else, and for one that is too large."""
    if isinstance(score, Tensor | np.ndarray) and score.shape in ((), (1,)):
        score = score.item()
    return float(score) if isinstance(score, numbers.Real | np.bool_) and abs(score) < TOO_LARGE else math.nan


def place_scores(scores: Tensor, mask: Tensor, name: str) -> Tensor:
    """Puts [B] scores onto each row's last policy token (failed rows have none), [B, R] as it is: [B, R] float32."""
    if scores.ndim == 2:
        strays = ((scores != 0) & (mask == 0)).nonzero().tolist()
        if strays:
            raise ValueError(
                f"the reward {name} scored {len(strays)} tokens that the policy did not produce, the first at "
                f"[response, token] = {strays[0]}: multiply by data.response_mask, or score its last 1 of each row."
            )
        return scores
    return torch.where(last_token(mask) == 1, scores[:, None], 0.0)


def check_failures(failures: Failures, rows: int, config: ScoringConfig, name: str) -> None:
    """Warns of responses that the reward called `name` could not score, or ends the run if they are too many.

    Raises:
        RuntimeError: more than reward.max_failed_fraction of `rows`; has the most frequent cause, with file and line.
    """
    [(said, times)] = Counter(failure.said for failure in failures.values()).most_common(1)
    kinds = Counter(failure.outcome for failure in failures.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    example = next(failure for failure in failures.values() if failure.said == said)
    verb = "raised" if example.trace else "failed:"
    what = f"the reward {name} {verb} {said}"
    if len(failures) <= config.max_failed_fraction * rows:
        becomes = "left out" if config.on_failure == "mask" else f"scored {config.failure_score:g}"
        logger.warning("%d of %d responses could not be scored (%s), and are %s: %s, most often (%d times)",
                       len(failures), rows, counts, becomes, what, times)  # fmt: skip
        return
    error = RuntimeError(
        f"{what}. {len(failures)} of {rows} responses could not be scored ({counts}), more than reward."
        f"max_failed_fraction={config.max_failed_fraction:g} allows; python -m extras.try_reward tries it alone."
    )
    if example.trace:
        error.add_note(f"in the process of the reward function:\n{example.trace}")
    raise error


def mark_failures(batch: DataProto, failures: Failures, config: ScoringConfig) -> None:
    """Adds the column reward_outcome, [B] (ok, timeout or error), and leaves rows without a score out of training.

    Such a row loses its policy tokens and, if there is that column, gets the end_reason reward_timeout or reward_error.
    """
    outcomes = [failures[row].outcome if row in failures else "ok" for row in range(len(batch))]
    batch.non_tensor_batch["reward_outcome"] = object_array(outcomes)
    if not failures or config.on_failure == "score":
        return
    rows = sorted(failures)
    batch.batch["response_mask"][rows] = 0
    if "end_reason" in batch:
        reasons = np.array(batch.end_reason, dtype=object)
        reasons[rows] = [f"reward_{failures[row].outcome}" for row in rows]
        batch.non_tensor_batch["end_reason"] = reasons
