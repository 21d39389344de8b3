"""What a reward may return for B responses, checked before it meets a loss: numbers, dicts with a `score`, tensors."""

import numbers
import reprlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.protocol import object_array
from training.scorers import NotScored

Columns = dict[str, np.ndarray]
Failures = dict[int, NotScored]  # by row


def as_scores(result: Any, shape: tuple[int, int], name: str) -> tuple[Tensor, Columns, Failures]:
    """Numbers, dicts or a tensor → float32 scores ([B] or [B, R], with `shape` (B, R)), the dicts' columns, and the
    rows that the reward called `name` could not score; their scores, and numbers in columns, are 0, all else None.

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
    """`results` with something of their kind in the places of rows that could not be scored, and those rows."""
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
    """The scores, and every other key as a column."""
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
