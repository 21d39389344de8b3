"""Scores rollouts by the user's function or manager, and fills token_level_scores.

A reward manager is called with a `reward_view`: one row per response, texts decoded once, and everything of the dataset
row. It returns B numbers, B dicts with a `score`, or a [B] or [B, R] tensor. `FunctionReward` is the manager around a
plain function (training/reward_function.py). Whatever comes back is checked before it meets a loss. With a learned
reward model, a response's score in training is the model's, plus reward.reward_model.function_weight times the
manager's; validation is scored by the manager alone, if there is one, and shows what a policy gains that only pleases
the model. `python -m training.reward FILE --data ROWS` tries a function without a model (training/try_reward.py).
"""

from configs.errors import users_line  # isort: skip

import inspect
import logging
import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema import (
    Config,
    RewardConfig,
    RewardFunctionConfig,
    RewardManagerConfig,
    SandboxFusionConfig,
    ScoringConfig,
)
from configs.threads import available_cores
from data.chat import parse_prompt
from data.data_report import prompt_text
from data.import_utils import bind, callable_name, load_extern_object
from data.padding import last_token
from data.protocol import DataProto, join_rows, object_array
from data.types import Row
from training.episode_rows import BROUGHT, EARLY, EpisodeRows, describe_conversations, score_others
from training.reward_function import (
    Columns,
    Failures,
    FunctionReward,
    Loadable,
    WeightedReward,
    load_function,
    load_parts,
    parse_scores,
)
from training.reward_manager import load_users_manager
from training.roles import RewardModel
from training.sandbox import check_fences

logger = logging.getLogger(__name__)
RewardManager = Callable[[DataProto], Any]
DEFAULT = "training.reward_score", "default_compute_score"  # what scores where nothing is named: file and function


@dataclass(frozen=True)
class EarlyResult:
    """The results of the reward's functions for a row ([]: it brings its score), and the seconds that generation waited
    for them at its end."""

    result: list[Any]
    waited: float


def load_reward_manager(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase, environment: Any | None, whole: Config | None = None
) -> RewardManager:
    """Loads the run's reward manager: one in verl's contract, the functions that the config names, the environment's,
    or the rules of public data sets by each row's data source; with a reward model `zero_reward` instead of the rules.
    A manager in verl's contract reads the `whole` config, of which `config` is the section of rewards.

    Raises:
        ValueError: the function has an unknown form.
    """
    if environment is None and has_manager(config):
        return load_users_manager(config, tokenizer, load_default(config, config.sandbox_fusion, tokenizer), whole)
    if own := config.reward_kwargs.extras:
        raise ValueError(
            f"reward.reward_kwargs has {', '.join(own)}, which only a reward manager of yours reads "
            "(reward.reward_manager.name); a function has reward.custom_reward_function.reward_kwargs."
        )
    if reward := load_functions(config, tokenizer):
        return reward
    if environment is not None:
        manager = load_extern_object(config.reward_manager.path, config.reward_manager.name)
        named = inspect.signature(manager).parameters  # one that hands **kwargs on to ours is given none
        offered = {key: value for key, value in {"tokenizer": tokenizer, "config": whole}.items() if key in named}
        return bind(manager, offered, positional={"environment": environment}, key="reward.reward_manager")()
    if config.reward_model.enable:
        return zero_reward
    return load_default(config, config.sandbox_fusion, tokenizer)


def zero_reward(data: DataProto) -> list[float]:
    """Scores every row 0: the manager of a run that only a reward model scores."""
    return [0.0] * len(data)


def load_default(
    config: ScoringConfig, server: SandboxFusionConfig, tokenizer: PreTrainedTokenizerBase | None
) -> FunctionReward:
    """Loads the rules of public data sets; if `server` has a url, they run programs there, else in processes that are
    at most the cores."""
    kwargs = {
        "sandbox_fusion_url": server.url,
        "concurrent_semaphore": server.max_concurrent,
        "memory_limit_mb": server.memory_limit_mb,
        "timeout": config.timeout,
    }
    if server.url is None:  # programs run here, and compute
        if config.sandbox == "required":
            check_fences(required=True)
        config = replace(config, num_workers=min(config.num_workers, available_cores()[0]))
    return load_function(RewardFunctionConfig(*DEFAULT, kwargs), config, tokenizer)


def has_manager(config: RewardConfig) -> bool:
    """Whether a manager is chosen: of an environment, or in verl's contract."""
    return config.reward_manager != RewardManagerConfig()


def load_functions(
    config: ScoringConfig, tokenizer: PreTrainedTokenizerBase | None
) -> FunctionReward | WeightedReward | None:
    """Loads the manager around the functions that the config names; returns None if it names none.

    Raises:
        ValueError: one has an unknown form.
    """
    if config.functions:
        return WeightedReward(load_parts(config, tokenizer))
    if config.custom_reward_function.path:
        return load_function(config.custom_reward_function, config, tokenizer)
    return None


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
    """Lists the tokens of the policy in the rows of a sample's record (training/transcripts.py)."""
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


def count_as_reward(batch: DataProto, timing: dict[str, float]) -> None:
    """Moves the time that generation waited for scores, at its end, from gen to reward."""
    waited = max((early.waited for early in batch.non_tensor_batch.get(EARLY, [])), default=0.0)
    timing["gen"] -= waited
    timing["reward"] = timing.get("reward", 0.0) + waited


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
    if EARLY in batch:
        begun = batch.non_tensor_batch.pop(EARLY)
        scores, extra, failures = validate_result(
            manager.of_rows([early.result for early in begun]), manager, mask.shape, config
        )
    else:
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


def validate_result(
    result: Any, manager: RewardManager, shape: tuple[int, int], config: ScoringConfig
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


def reward_name(manager: RewardManager) -> str:
    if isinstance(manager, WeightedReward):
        return f"reward.functions ({', '.join(part.label for part in manager.parts)})"
    return callable_name(manager.function if isinstance(manager, FunctionReward) else manager)


def functions_of(manager: RewardManager) -> list[FunctionReward]:
    """Returns the user's functions that a manager calls."""
    if isinstance(manager, WeightedReward):
        return [part.function for part in manager.parts]
    return [manager] if isinstance(manager, FunctionReward) else []


def early_functions(manager: RewardManager) -> list[Loadable]:
    """Returns what a worker loads to score rows as `manager` does, while others are generated; [] if it cannot."""
    functions = functions_of(manager) if type(manager) in (FunctionReward, WeightedReward) else []
    return [function.loaded_by for function in functions] if all(one.scores_rows() for one in functions) else []


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
        f"{what}. {len(failures)} of {rows} responses could not be scored ({counts}), more than "
        f"reward.max_failed_fraction={config.max_failed_fraction:g} allows. "
        "`python -m training.reward FILE --data ROWS` tries a function alone; with reward.in_process=true breakpoints "
        "work in it."
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


def score_batch(
    batch: DataProto,
    manager: RewardManager,
    model: RewardModel | None,
    tokenizer: PreTrainedTokenizerBase,
    config: RewardConfig,
) -> DataProto:
    """Scores `batch` by `add_scores` and, with a reward model, puts its score in place of the manager's, or adds it.

    Beside it come, among meta_info["reward_extra_keys"], `rm_score` and `function_score`, each alone.

    Raises:
        FloatingPointError: a score of the model is not finite.
        as `add_scores`.
    """
    batch = add_scores(batch, manager, tokenizer, config)
    if model is None:
        return batch
    scores = model.compute_rm_score(batch).batch["rm_scores"]
    if not torch.isfinite(scores).all():
        row = int((~torch.isfinite(scores)).nonzero()[0])
        raise FloatingPointError(
            f"the reward model gives {scores[row].item()} to row {row} of a batch: its weights are not finite, or "
            "reward.reward_model.fsdp_config.dtype=float32 is needed."
        )
    beside = batch.batch["token_level_scores"]
    extra = {"rm_score": scores} | ({} if manager is zero_reward else {"function_score": beside.sum(1)})
    batch.non_tensor_batch.update({name: object_array(values.tolist()) for name, values in extra.items()})
    batch.meta_info["reward_extra_keys"] = sorted([*batch.meta_info["reward_extra_keys"], *extra])
    own = place_scores(scores, batch.batch["response_mask"], "reward model")
    batch.batch["token_level_scores"] = own + config.reward_model.function_weight * beside
    return batch


if __name__ == "__main__":
    from training.try_reward import main

    logging.getLogger("training.reward").setLevel(logging.ERROR)  # failed rows stand in the table
    raise SystemExit(main())
