"""Scores: from the user's function or manager to token_level_scores.

A reward manager is called with a `reward_view`: one row per response, texts decoded once, and everything of the dataset
row. It returns B numbers, B dicts with a `score`, or a [B] or [B, R] tensor. `FunctionReward` is the manager around a
plain function (training/reward_function.py). Whatever comes back is checked before it meets a loss.
`python -m training.reward FILE --data ROWS` tries one without a model (training/try_reward.py).
"""

if __name__ == "__main__":  # before the imports below, which take seconds that trying a reward needs not
    from training.try_reward import main

    raise SystemExit(main())

import numbers
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.errors import users_line
from configs.schema import RewardConfig
from data.import_utils import callable_name, load_extern_object
from data.padding import last_token
from data.protocol import DataProto, object_array
from training.episodes import Episodes
from training.reward_function import FunctionReward
from training.reward_score import default_compute_score

RewardManager = Callable[[DataProto], Any]


def load_reward_manager(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase, environment: Any | None
) -> RewardManager:
    """The run's reward: a function named in the config, else the manager of its environment, else the rules of public
    data sets by each row's data source.

    Raises:
        ValueError: the function has an unknown form.
    """
    chosen = config.custom_reward_function
    limits = {"max_concurrent": config.max_concurrent, "timeout": config.timeout}
    if chosen.path:
        function = load_extern_object(chosen.path, chosen.name)
        return FunctionReward(function, tokenizer, chosen.reward_kwargs, **limits)
    if environment is not None:
        manager = load_extern_object(config.reward_manager.path, config.reward_manager.name)
        return manager(environment)
    server = config.sandbox_fusion
    kwargs = {
        "sandbox_fusion_url": server.url,
        "concurrent_semaphore": server.max_concurrent,
        "memory_limit_mb": server.memory_limit_mb,
    }
    return FunctionReward(default_compute_score, tokenizer, kwargs, **limits)


def reward_view(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> DataProto:
    """What a reward sees of B rollouts: `prompts` and `responses` as texts, `ground_truths`, and the dataset's columns.

    `data.responses` are texts, of what the policy produced alone (response_mask 1) and without special tokens: text of
    an environment earns nothing. `data.batch["responses"]`, ["prompts"], ["attention_mask"] and all other tensors are
    those of the batch, [B, …], as verl's managers read them.
    """
    masked = [
        ids[mask.bool()] for ids, mask in zip(batch.batch["responses"], batch.batch["response_mask"], strict=True)
    ]
    labels = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    texts = {
        "prompts": tokenizer.batch_decode(list(batch.non_tensor_batch["raw_prompt_ids"]), skip_special_tokens=True),
        "responses": tokenizer.batch_decode(masked, skip_special_tokens=True),
        "ground_truths": [label.get("ground_truth") if isinstance(label, dict) else None for label in labels],
    }
    texts |= {"extra_info": said_of_conversations(batch)} if "tool_call_counts" in batch else {}
    columns = batch.non_tensor_batch | {name: object_array(values) for name, values in texts.items()}
    return DataProto.from_dict(batch.tensors, columns, dict(batch.meta_info))


def said_of_conversations(batch: DataProto) -> list[dict[str, Any]]:
    """Each row's extra_info with what came of its conversation: num_turns, tool_call_counts, tool_rewards (one a call)
    and turn_scores (one for each time that the simulated user spoke), as verl's rewards read them."""
    columns = {name: batch.non_tensor_batch[name] for name in ("tool_call_counts", "tool_rewards", "turn_scores")}
    columns["num_turns"] = batch.non_tensor_batch["__num_turns__"]
    own = batch.non_tensor_batch.get("extra_info", [{}] * len(batch))
    return [(own[row] or {}) | {name: column[row] for name, column in columns.items()} for row in range(len(batch))]


def add_scores(batch: DataProto, manager: RewardManager, tokenizer: PreTrainedTokenizerBase) -> DataProto:
    """`batch` with token_level_scores and, named in meta_info["reward_extra_keys"], what the reward returned beside.

    Episodes of an environment bring their scores.

    Raises:
        as `compute_reward`.
    """
    if "token_level_scores" in batch and "turn_ids" in batch:
        batch.meta_info["reward_extra_keys"] = []
        return batch
    batch.batch["token_level_scores"], extra = compute_reward(batch, manager, tokenizer)
    batch.non_tensor_batch.update(extra)
    batch.meta_info["reward_extra_keys"] = sorted(extra)
    return batch


def reward_metrics(batch: DataProto) -> dict[str, float]:
    """reward/<key>/{mean, std, min, max} of every number that the reward returned beside the score.

    Over samples that did not fail; of an episode of several rows it is the last row's.
    """
    metrics: dict[str, float] = {}
    episodes = Episodes(batch)
    completed = episodes.last_row[episodes.completed().numpy()]
    for name in batch.meta_info["reward_extra_keys"]:
        values = batch.non_tensor_batch[name][completed]
        if len(values) and all(isinstance(value, numbers.Real | np.bool_) for value in values):
            reducers = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
            metrics |= {f"reward/{name}/{how}": float(reduce(values.astype(float))) for how, reduce in reducers.items()}
    return metrics


def compute_reward(
    batch: DataProto, manager: RewardManager, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, dict[str, np.ndarray]]:
    """Scores a batch of rollouts.

    Returns:
        token_level_scores [B, R] float32, a row's score on its last policy token; and the extra columns ([B] objects)
        of managers that return dicts.

    Raises:
        RuntimeError: the manager raised; names it and the line.
        ValueError: wrong number, type or shape, a score that is not finite or that no token of the policy earns, or an
            extra column that the batch already has; names the row or the column.
    """
    name, mask = reward_name(manager), batch.batch["response_mask"]
    scores, extra = view_scores(reward_view(batch, tokenizer), manager, mask.shape)
    if taken := [key for key in extra if key in batch]:
        raise ValueError(
            f"the reward {name} returned the keys {taken}, which are columns of the batch already: rename them."
        )
    return place_scores(scores, mask, name), extra


def view_scores(
    view: DataProto, manager: RewardManager, shape: tuple[int, int]
) -> tuple[Tensor, dict[str, np.ndarray]]:
    """What `manager` makes of a `reward_view`: scores [B] or [B, R], with `shape` (B, R), and extra columns [B].

    Raises:
        RuntimeError, ValueError: as `compute_reward`.
    """
    name = reward_name(manager)
    try:
        result = manager(view)
    except Exception as error:  # the boundary to the user's code: say where it broke, then stop
        raise RuntimeError(
            f"the reward {name} raised {type(error).__name__}: {error} (at {users_line(error)}). "
            "Try it alone: reward(DataProto.from_single_dict({'responses': [...], 'ground_truths': [...]}))."
        ) from error
    return as_scores(result, shape, name)


def as_scores(result: Any, shape: tuple[int, int], name: str) -> tuple[Tensor, dict[str, np.ndarray]]:
    """Numbers, dicts or a tensor → float32 scores ([B] or [B, R], with `shape` (B, R)) and the dicts' columns."""
    rows, extra = shape[0], {}
    allowed = f"it must return [{rows}] numbers, one per response, or {list(shape)}, one per response token"
    if isinstance(result, np.ndarray):
        result = list(result) if result.ndim == 1 else torch.as_tensor(result)
    if isinstance(result, list | tuple):
        if len(result) != rows:
            raise ValueError(f"the reward {name} returned {len(result)} scores for {rows} responses: {allowed}.")
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
    return scores, extra


def as_number(score: Any, row: int, name: str) -> float:
    if isinstance(score, Tensor | np.ndarray) and score.shape in ((), (1,)):
        score = score.item()
    if not isinstance(score, numbers.Real | np.bool_):
        raise ValueError(
            f"the reward {name} returned {reprlib.repr(score)} for response {row}: it must be a number, or a dict "
            "with the number as 'score'."
        )
    return float(score)


def split_dicts(results: list[dict], name: str) -> tuple[list[Any], dict[str, np.ndarray]]:
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


def place_scores(scores: Tensor, mask: Tensor, name: str) -> Tensor:
    """[B] onto each row's last policy token (failed rows have none), [B, R] as it is: [B, R] float32."""
    if scores.ndim == 2:
        strays = ((scores != 0) & (mask == 0)).nonzero().tolist()
        if strays:
            raise ValueError(
                f"the reward {name} scored {len(strays)} tokens that the policy did not produce, the first at "
                f"[response, token] = {strays[0]}: multiply by data.response_mask, or score its last 1 of each row."
            )
        return scores
    return torch.where(last_token(mask) == 1, scores[:, None], 0.0)


def reward_name(manager: RewardManager) -> str:
    return callable_name(manager.function if isinstance(manager, FunctionReward) else manager)
