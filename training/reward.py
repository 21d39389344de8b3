"""Scores: from the user's function or manager to token_level_scores.

A reward manager is called with a `reward_view`: one row per response, texts decoded once, and everything of the dataset
row. It returns B numbers, B dicts with a `score`, or a [B] or [B, R] tensor. `FunctionReward` is the manager around a
plain function in any of the three forms that users write. Whatever comes back is checked before it meets a loss.
"""

import asyncio
import inspect
import numbers
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema import RewardConfig
from data.import_utils import load_extern_object
from data.protocol import DataProto

RewardManager = Callable[[DataProto], Any]

FORMS = (
    "compute_score(data_source, solution_str, ground_truth, extra_info=None), "
    "compute_reward(data, tokenizer=None) for a whole DataProto, or "
    "compute_reward(prompt, response, ground_truth)"
)


class FunctionReward:
    """A reward manager from a function, sync or async; its form is read from its signature.

    Args:
        function: in one of the three `FORMS`.
        reward_kwargs: passed on to every call; they win over what the caller passes.

    Raises:
        ValueError: the signature has none of the forms.
    """

    def __init__(
        self, function: Callable, tokenizer: PreTrainedTokenizerBase | None = None, reward_kwargs: dict | None = None
    ) -> None:
        self.function = function
        self.tokenizer = tokenizer
        self.reward_kwargs = reward_kwargs or {}
        self.parameters = inspect.signature(function).parameters
        self.calls = self._calls_for_form()

    def __call__(self, data: DataProto) -> Any:
        results = [self.function(**{**call, **self.reward_kwargs}) for call in self.calls(data)]
        if results and inspect.isawaitable(results[0]):
            results = asyncio.run(gather(results))
        return results[0] if self.calls == self._batch_call else results

    def _calls_for_form(self) -> Callable[[DataProto], list[dict]]:
        if "solution_str" in self.parameters:
            return self._sample_calls
        if "response" in self.parameters:
            return self._text_calls
        if next(iter(self.parameters), None) == "data":
            return self._batch_call
        given = f"{self.function.__name__}{inspect.signature(self.function)}"
        raise ValueError(f"the reward function {given} has none of the known forms: {FORMS}.")

    def _sample_calls(self, data: DataProto) -> list[dict]:
        names = {
            "data_source": "data_source",
            "solution_str": "responses",
            "ground_truth": "ground_truths",
            "extra_info": "extra_info",
        }
        return [{name: data.get(column)[row] for name, column in names.items()} for row in range(len(data))]

    def _text_calls(self, data: DataProto) -> list[dict]:
        names = {"prompt": "prompts", "response": "responses", "ground_truth": "ground_truths"}
        return [{name: data.get(column)[row] for name, column in names.items()} for row in range(len(data))]

    def _batch_call(self, data: DataProto) -> list[dict]:
        return [{"data": data, "tokenizer": self.tokenizer} if "tokenizer" in self.parameters else {"data": data}]


async def gather(awaitables: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*awaitables)


def load_reward_manager(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase, environment: Any | None
) -> RewardManager:
    """The run's reward: a function named in the config, else the manager of its environment.

    Raises:
        ValueError: neither is there, or the function has an unknown form.
    """
    chosen = config.custom_reward_function
    if chosen.path:
        return FunctionReward(load_extern_object(chosen.path, chosen.name), tokenizer, chosen.reward_kwargs)
    if environment is not None:
        manager = load_extern_object(config.reward_manager.path, config.reward_manager.name)
        return manager(environment)
    raise ValueError(
        "nothing scores the responses: set reward.custom_reward_function.path (and .name) to a function of yours, "
        f"{FORMS}; or set env.id to train on an environment."
    )


def reward_view(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> DataProto:
    """What a reward sees of B rollouts: `prompts` and `responses` as texts, `ground_truths`, and the dataset's columns.

    `responses` holds only what the policy produced (response_mask 1), without special tokens: text of an environment
    earns nothing.
    """
    masked = [
        ids[mask.bool()] for ids, mask in zip(batch.batch["responses"], batch.batch["response_mask"], strict=True)
    ]
    labels = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    columns = {
        **batch.non_tensor_batch,
        "prompts": tokenizer.batch_decode(list(batch.non_tensor_batch["raw_prompt_ids"]), skip_special_tokens=True),
        "responses": tokenizer.batch_decode(masked, skip_special_tokens=True),
        "ground_truths": [label["ground_truth"] if isinstance(label, dict) else None for label in labels],
    }
    return DataProto.from_single_dict(columns, dict(batch.meta_info))


def compute_reward(
    batch: DataProto, manager: RewardManager, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, dict[str, np.ndarray]]:
    """Scores a batch of rollouts.

    Returns:
        token_level_scores [B, R] float32, a row's score on its last response token; and the extra columns ([B]
        objects) of managers that return dicts.

    Raises:
        RuntimeError: the manager raised; names it and the line.
        ValueError: wrong number, type or shape, or a score that is not finite; names the row.
    """
    view = reward_view(batch, tokenizer)
    name = reward_name(manager)
    try:
        result = manager(view)
    except Exception as error:  # the boundary to the user's code: say where it broke, then stop
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(
            f"the reward {name} raised {type(error).__name__}: {error} ({place.filename}:{place.lineno}). "
            "Try it alone: reward(DataProto.from_single_dict({'responses': [...], 'ground_truths': [...]}))."
        ) from error
    scores, extra = as_scores(result, len(batch), name)
    return place_scores(scores, batch, name), extra


def as_scores(result: Any, rows: int, name: str) -> tuple[Tensor, dict[str, np.ndarray]]:
    """Numbers, dicts or a tensor → float32 scores ([B] or [B, R]) and the dicts' columns, checked."""
    if result is None:
        raise ValueError(f"the reward {name} returned None: it must return one number per response.")
    extra: dict[str, np.ndarray] = {}
    if not isinstance(result, Tensor | np.ndarray):
        result = list(result)
        if len(result) == rows and rows and isinstance(result[0], dict):
            result, extra = split_dicts(result, name)
        for row, score in enumerate(result):
            if isinstance(score, Tensor | np.ndarray) and np.size(score) == 1:
                result[row] = score.item()
            elif not isinstance(score, numbers.Real):
                raise ValueError(f"the reward {name} returned {score!r} for response {row}: it must be a number.")
    scores = torch.as_tensor(np.asarray(result, dtype=np.float32) if isinstance(result, list) else result).float()
    if scores.ndim not in (1, 2) or len(scores) != rows:
        raise ValueError(
            f"the reward {name} returned {tuple(scores.shape)} scores for {rows} responses: "
            f"it must return [{rows}], one per response, or [{rows}, R], one per response token."
        )
    bad = (~torch.isfinite(scores.reshape(rows, -1)).all(1)).nonzero()[:, 0].tolist()
    if bad:
        raise ValueError(
            f"the reward {name} returned {scores[bad[0]].tolist()} for response {bad[0]} "
            f"({len(bad)} of {rows} are not finite): scores must be finite numbers; return 0.0 where there is none."
        )
    return scores, extra


def split_dicts(results: list[dict], name: str) -> tuple[list[float], dict[str, np.ndarray]]:
    keys = set(results[0])
    for row, result in enumerate(results):
        if "score" not in result or set(result) != keys:
            raise ValueError(
                f"the reward {name} returned keys {sorted(result)} for response {row} and {sorted(keys)} for "
                "response 0: every dict needs 'score' and the same keys."
            )
    columns = {key: [result[key] for result in results] for key in keys}
    extra = {key: np.array(values, dtype=object) for key, values in columns.items() if key != "score"}
    return columns["score"], extra


def place_scores(scores: Tensor, batch: DataProto, name: str) -> Tensor:
    """[B] onto each row's last policy token (failed rows have none), [B, R] as it is: [B, R] float32."""
    width = batch.batch["responses"].shape[1]
    if scores.ndim == 2:
        if scores.shape[1] != width:
            raise ValueError(
                f"the reward {name} returned {tuple(scores.shape)} scores; the responses are {(len(batch), width)}."
            )
        return scores
    mask = batch.batch["response_mask"]
    rows = mask.any(1).nonzero()[:, 0]
    last = width - 1 - mask[rows].flip(1).argmax(1)  # of the policy's own tokens: estimators ignore masked ones
    placed = torch.zeros(len(batch), width)
    placed[rows, last] = scores[rows]
    return placed


def reward_name(manager: RewardManager) -> str:
    owner = manager.function if isinstance(manager, FunctionReward) else type(manager)
    return f"{owner.__name__} ({inspect.getsourcefile(owner)})"
