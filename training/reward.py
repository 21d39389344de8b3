"""Scores rollouts by the user's function or manager, and fills token_level_scores.

A reward manager is called with a `reward_view`: one row per response, texts decoded once, and everything of the dataset
row. It returns B numbers, B dicts with a `score`, or a [B] or [B, R] tensor. `FunctionReward` is the manager around a
plain function (training/reward_function.py). Whatever comes back is checked before it meets a loss.
"""

import inspect
import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.errors import users_line
from configs.extras import find, moved
from configs.import_utils import bind, load_extern_object
from configs.schema import Config, RewardConfig, RewardManagerConfig, ScoringConfig
from data.chat import parse_prompt
from data.data_report import prompt_text
from data.padding import last_token
from data.protocol import DataProto, join_rows, object_array
from data.types import Row
from training.episode_rows import BROUGHT, EpisodeRows, describe_conversations, score_others
from training.reward_results import Columns, Failures, mark_failures, place_scores, reward_name, validate_result

RewardManager = Callable[[DataProto], Any]


@dataclass(frozen=True)
class RewardRun:
    """The parts of a run that a source may build a reward with; `whole`: its config, of which rewards are a section."""

    tokenizer: PreTrainedTokenizerBase | None
    environment: Any | None
    whole: Config | None = None


def load_reward_manager(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    environment: Any | None,
    whole: Config | None = None,
) -> RewardManager:
    """Loads the run's reward: of the kind "reward" of configs/extras.py, the one that the settings name.

    Raises:
        ValueError: the function has an unknown form.
    """
    name = reward_of(config, environment)
    if name != "manager" and (unread := config.reward_kwargs.extras):
        raise ValueError(
            f"reward.reward_kwargs has {', '.join(unread)}, which only a reward manager of yours reads (reward."
            "reward_manager.name); a function has reward.custom_reward_function.reward_kwargs."
        )
    return find("reward", name)(config, RewardRun(tokenizer, environment, whole))


def reward_of(config: RewardConfig, environment: Any | None) -> str:
    """Names the reward that scores; configs/checks.py refuses two that are named together."""
    if environment is None and config.reward_manager != RewardManagerConfig():
        return "manager"
    if config.source() is not None:
        return "functions"
    return config.fallback if environment is None else "environment"


def load_environment(settings: RewardConfig, run: RewardRun) -> RewardManager:
    """Loads the manager of custom/reward_manager.py, or of the user's file, around the environment."""
    manager = load_extern_object(settings.reward_manager.path, settings.reward_manager.name)
    named = inspect.signature(manager).parameters  # one that hands **kwargs on to ours is given none
    offered = {key: value for key, value in {"tokenizer": run.tokenizer, "config": run.whole}.items() if key in named}
    return bind(manager, offered, positional={"environment": run.environment}, key="reward.reward_manager")()


def reward_view(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> DataProto:
    """Builds what a reward reads of B rollouts: texts `prompts`, `responses`, `ground_truths`, the dataset's columns.

    `data.responses` are texts, of what the policy produced alone (response_mask 1) and without special tokens: text of
    an environment earns nothing. `data.batch["responses"]`, ["prompts"], ["attention_mask"] and all other tensors are
    those of the batch, [B, …], as verl's managers read them.
    """
    masked = [
        ids[mask.bool()] for ids, mask in zip(batch.batch["responses"], batch.batch["response_mask"], strict=True)
    ]
    return view_of(batch, masked, tokenizer)


def view_of(batch: DataProto, policy_ids: list[Any], tokenizer: PreTrainedTokenizerBase) -> DataProto:
    """Builds a `reward_view` of `batch`, with the responses `policy_ids`: the tokens of the policy in each row."""
    prompts = tokenizer.batch_decode(list(batch.non_tensor_batch["raw_prompt_ids"]), skip_special_tokens=True)
    view = with_texts(batch, prompts, tokenizer.batch_decode(policy_ids, skip_special_tokens=True))
    view.non_tensor_batch["response_ids"] = object_array([torch.as_tensor(ids).tolist() for ids in policy_ids])
    return view


def view_of_rows(rows: Sequence[Row], responses: Sequence[str], validate: bool = False) -> DataProto:
    """Builds the `reward_view` of dataset rows (`with_labels`), each with a response, where there is no tokenizer.

    The prompt's text is then the contents of its messages, a line each. In training it is the decoded prompt, which
    also has what the chat template writes around them. A prompt that is a text is the same in both.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["data_source"] = [row.get("data_source") or "unknown" for row in rows]
    prompts = [None if row.get("prompt") is None else parse_prompt(row["prompt"]) for row in rows]
    columns["raw_prompt"] = [row.get("raw_prompt") or prompt for row, prompt in zip(rows, prompts, strict=True)]
    if all(row.get("rows") for row in rows):  # samples of a run
        columns["response_ids"] = [policy_ids(row["rows"]) for row in rows]
    texts = [
        "\n".join(prompt_text([message]) for message in prompt) if isinstance(prompt, list) else prompt or ""
        for prompt in prompts
    ]
    return with_texts(DataProto.from_single_dict(columns, {"validate": validate}), texts, list(responses))


def policy_ids(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Lists the tokens of the policy in the rows of a sample's record (extras/report/transcripts.py)."""
    return [id for row in rows for id, policy in zip(row["token_ids"], row["policy_mask"], strict=True) if policy]


def with_texts(batch: DataProto, prompts: list[str], responses: list[str]) -> DataProto:
    """Adds to `batch` what a reward reads beside its columns: texts, ground truths, and facts of conversations."""
    labels = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    texts = {
        "prompts": prompts,
        "responses": responses,
        "ground_truths": [label.get("ground_truth") if isinstance(label, dict) else None for label in labels],
    }
    texts["extra_info"] = describe_conversations(batch)
    columns = batch.non_tensor_batch | {name: object_array(values) for name, values in texts.items()}
    return DataProto.from_dict(batch.tensors, columns, dict(batch.meta_info))


def add_scores(
    batch: DataProto, manager: RewardManager, tokenizer: PreTrainedTokenizerBase, config: ScoringConfig | None = None
) -> DataProto:
    """Adds token_level_scores to `batch`, and the reward's extra columns, named in meta_info["reward_extra_keys"].

    Rows that could not be scored become what `config` says (`mark_failures`). Episodes of an environment
    bring their scores.

    Raises:
        as `compute_reward`.
    """
    if "token_level_scores" in batch and "turn_ids" in batch:
        batch.meta_info["reward_extra_keys"] = []
        return batch
    config = config or ScoringConfig()  # alone, in a test
    score = partial(compute_reward, manager=manager, tokenizer=tokenizer, config=config)
    batch.batch["token_level_scores"], extra, failures = (
        score_others(batch, score) if BROUGHT in batch else score(batch)
    )
    mark_failures(batch, failures, config)
    batch.non_tensor_batch.update(extra)
    batch.meta_info["reward_extra_keys"] = sorted(extra)
    return batch


def concat_scored(batches: Sequence[DataProto]) -> DataProto:
    """Joins scored batches; what the reward said, or a tool kept, in some of them alone is None in the others."""
    keys = sorted({key for batch in batches for key in batch.meta_info["reward_extra_keys"]})
    for batch in batches:
        batch.meta_info["reward_extra_keys"] = keys
    return join_rows(batches)


def reward_metrics(batch: DataProto) -> dict[str, float]:
    """reward/<key>/{mean, std, min, max} of every number that the reward returned beside the score; and how many rows
    could not be scored, reward/timeout and reward/error.

    Over samples that did not fail and of which it is not None; of an episode of several rows it is the last row's.
    """
    metrics: dict[str, float] = {}
    if "reward_outcome" in batch:
        counts = Counter(batch.non_tensor_batch["reward_outcome"])
        metrics = {f"reward/{outcome}": float(counts[outcome]) for outcome in ("timeout", "error")}
    episodes = EpisodeRows(batch)
    completed = episodes.last_row[episodes.is_complete().numpy()]
    for name in batch.meta_info["reward_extra_keys"]:
        values = [value for value in batch.non_tensor_batch[name][completed] if value is not None]
        if values and all(isinstance(value, numbers.Real | np.bool_) for value in values):
            reducers, column = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}, np.array(values, float)
            metrics |= {f"reward/{name}/{how}": float(reduce(column)) for how, reduce in reducers.items()}
    return metrics


def compute_reward(
    batch: DataProto, manager: RewardManager, tokenizer: PreTrainedTokenizerBase, config: ScoringConfig
) -> tuple[Tensor, Columns, Failures]:
    """Scores a batch of rollouts.

    Returns:
        token_level_scores [B, R] float32, a row's score on its last policy token; the extra columns ([B] objects)
        of managers that return dicts; and the rows that could not be scored.

    Raises:
        RuntimeError: the manager raised, or too many rows could not be scored; names it and the line.
        ValueError: a wrong number, type or shape of all scores, a score that no token of the policy earns, or an extra
            column that the batch already has; names the row or the column.
    """
    name, mask = reward_name(manager), batch.batch["response_mask"]
    scores, extra, failures = view_scores(reward_view(batch, tokenizer), manager, mask.shape, config)
    if taken := [key for key in extra if key in batch]:
        raise ValueError(
            f"the reward {name} returned the keys {taken}, which are columns of the batch already: rename them."
        )
    placed = place_scores(scores, mask, name)
    if scores.ndim == 2 and config.on_failure == "score":
        placed[sorted(failures)] = config.failure_score * (last_token(mask) == 1)[sorted(failures)].float()
    return placed, extra, failures


def view_scores(
    view: DataProto, manager: RewardManager, shape: tuple[int, int], config: ScoringConfig
) -> tuple[Tensor, Columns, Failures]:
    """Scores a `reward_view`: `call_manager`, then `validate_result`."""
    return validate_result(call_manager(manager, view), manager, shape, config)


def call_manager(manager: RewardManager, view: DataProto) -> Any:
    """Returns what `manager` returns for a `reward_view`. Raises RuntimeError if it raises; names it and the line."""
    try:
        return manager(view)
    except Exception as error:  # the boundary to the user's code: say where it broke, then stop
        raise RuntimeError(
            f"the reward {reward_name(manager)} raised {type(error).__name__}: {error} (at {users_line(error)}). "
            "Try it alone: reward(DataProto.from_single_dict({'responses': [...], 'ground_truths': [...]}))."
        ) from error


if __name__ == "__main__":
    raise SystemExit(moved(__spec__.name))
