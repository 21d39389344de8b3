"""Scores rollouts by the user's function or manager, and fills token_level_scores.

A reward manager is called with a `reward_view`: one row per response, texts decoded once, and everything of the dataset
row. It returns B numbers, B dicts with a `score`, a [B] or [B, R] tensor, or verl's {"reward_tensor",
"reward_extra_info"}; `FunctionReward` is the manager around a plain function (training/reward_function.py). What comes
back is checked before it meets a loss, and a row without a score is not one with a score of zero.
"""

import inspect
import logging
import math
import numbers
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, groupby
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once, users_line
from configs.extras import find
from configs.import_utils import bind, callable_name, load_extern_object
from configs.schema import Config, RewardConfig, RewardManagerConfig, ScoringConfig
from data.chat import parse_prompt
from data.padding import last_token
from data.protocol import DataProto, join_rows, object_array
from data.rows import prompt_text
from data.types import NotScored, Row
from training.episode_rows import BROUGHT, EpisodeRows, describe_conversations, score_others

RewardManager = Callable[[DataProto], Any]
Columns = dict[str, np.ndarray]
Failures = dict[int, NotScored]  # by row
TOO_LARGE = 1e18  # from here on the squares of a batch of scores are no longer finite in float32

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardRun:
    """The parts of a run that a source may build a reward with, its whole config among them."""

    tokenizer: PreTrainedTokenizerBase | None
    environment: Any | None
    config: Config | None = None


@runtime_checkable
class ChecksRows(Protocol):
    """A reward that looks at rows before the run; `title` is what messages call it."""

    title: str

    def check(self, rows: Mapping[int, Row]) -> None:
        """Raises ConfigError where rows, by their position in the data set, lack what it needs."""


def load_reward_manager(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    environment: Any | None,
    run_config: Config | None = None,
) -> RewardManager:
    """Loads the run's reward, of the kind "reward" of configs/extras.py. Raises ValueError if its form is unknown."""
    name = reward_of(config, environment)
    if name not in ("manager", "environment") and (unread := config.reward_kwargs.extras):
        raise ValueError(
            f"reward.reward_kwargs has {', '.join(unread)}, which only a reward.reward_manager of yours reads: a "
            "function has reward.custom_reward_function.reward_kwargs."
        )
    if name != "environment" and environment is not None:
        notice_once(f"{config.source()} scores the responses, {config.reward_manager.path} and the environment do not.")
    return find("reward", name)(config, RewardRun(tokenizer, environment, run_config))


def reward_of(config: RewardConfig, environment: Any | None) -> str:
    """Names the reward that scores; configs/checks.py refuses two that are named together."""
    if environment is None and config.reward_manager != RewardManagerConfig():
        return "manager"
    return "environment" if environment is not None and config.source() is None else config.scorer


def load_environment(settings: RewardConfig, run: RewardRun) -> RewardManager:
    """Loads the manager of custom/reward_manager.py, or of the user's file, around the environment."""
    chosen = settings.reward_manager
    manager = load_extern_object(chosen.path, chosen.name, "reward.reward_manager.path")
    parameters = inspect.signature(manager).parameters  # **kwargs do not count: a subclass may hand them on to ours
    offered = {"tokenizer": run.tokenizer, "config": run.config}
    arguments = {name: value for name, value in offered.items() if name in parameters}
    extras, game = settings.reward_kwargs.extras or None, {"environment": run.environment}
    return bind(manager, arguments, extras, "reward.reward_manager", positional=game, settings="reward_kwargs")()


def reward_name(reward: Callable) -> str:
    """Returns what messages call a reward: its own `title`, or the name of a function or a class."""
    return reward.title if isinstance(reward, ChecksRows) else callable_name(reward)


# What a reward reads


def reward_view(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> DataProto:
    """Builds what a reward reads of B rollouts: texts `prompts`, `responses`, `ground_truths`, the dataset's columns.

    `data.responses` are texts of what the policy produced alone (`policy_text`), without special tokens. The tensors
    of `data.batch`, ["responses"], ["attention_mask"] …, are those of the batch, as verl's managers read them.
    """
    rows = [*zip(batch.batch["responses"].tolist(), batch.batch["response_mask"].tolist(), strict=True)]
    prompts = tokenizer.batch_decode(list(batch.non_tensor_batch["raw_prompt_ids"]), skip_special_tokens=True)
    view = with_texts(batch, prompts, [policy_text(*row, tokenizer) for row in rows])
    view.non_tensor_batch["response_ids"] = object_array([[*compress(*row)] for row in rows])
    return view


def policy_text(token_ids: Sequence[int], policy_mask: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decodes what the policy said in a row, each turn alone and on a line of its own: "1", "2" is never 12."""
    runs = groupby(zip(token_ids, policy_mask, strict=True), key=itemgetter(1))
    turns = [[token for token, _ in run] for policy, run in runs if policy]
    return "\n".join(tokenizer.batch_decode(turns, skip_special_tokens=True))


def view_of_rows(rows: Sequence[Row], responses: Sequence[str], validate: bool = False) -> DataProto:
    """Builds the `reward_view` of dataset rows (`with_labels`), each with a response, where there is no tokenizer.

    The prompt's text is then the contents of its messages, a line each, without what a chat template writes around.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["data_source"] = [row.get("data_source") or "unknown" for row in rows]
    prompts = [None if row.get("prompt") is None else parse_prompt(row["prompt"]) for row in rows]
    columns["raw_prompt"] = [row.get("raw_prompt") or prompt for row, prompt in zip(rows, prompts, strict=True)]
    if all(row.get("rows") for row in rows):  # samples of a run (extras/report/transcripts.py)
        columns["response_ids"] = [
            [id for part in row["rows"] for id in compress(part["token_ids"], part["policy_mask"])] for row in rows
        ]
    texts = [
        "\n".join(prompt_text([message]) for message in prompt) if isinstance(prompt, list) else prompt or ""
        for prompt in prompts
    ]
    return with_texts(DataProto.from_single_dict(columns, {"validate": validate}), texts, list(responses))


def with_texts(batch: DataProto, prompts: list[str], responses: list[str]) -> DataProto:
    """Adds to `batch` what a reward reads beside its columns: texts, ground truths, and facts of conversations."""
    labels = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    texts = {
        "prompts": prompts,
        "responses": responses,
        "ground_truths": [label.get("ground_truth") if isinstance(label, dict) else None for label in labels],
        "extra_info": describe_conversations(batch),
    }
    columns = batch.non_tensor_batch | {name: object_array(values) for name, values in texts.items()}
    return DataProto.from_dict(batch.tensors, columns, dict(batch.meta_info))


# From rollouts to scores


def add_scores(
    batch: DataProto, manager: RewardManager, tokenizer: PreTrainedTokenizerBase, config: ScoringConfig | None = None
) -> DataProto:
    """Adds token_level_scores to `batch`, and the reward's extra columns, named in meta_info["reward_extra_keys"].

    Rows that could not be scored become what `config` says (`mark_failures`). Episodes of an environment bring their
    scores. Raises as `compute_reward`.
    """
    if "token_level_scores" in batch and "turn_ids" in batch:
        batch.meta_info["reward_extra_keys"] = []
        return batch
    config = config or ScoringConfig()  # a test may leave it out
    score = partial(compute_reward, manager=manager, tokenizer=tokenizer, config=config)
    scores, extra, failures = score_others(batch, score) if BROUGHT in batch else score(batch)
    batch.batch["token_level_scores"] = scores
    mark_failures(batch, failures, config)
    batch.non_tensor_batch.update(extra)
    batch.meta_info["reward_extra_keys"] = sorted(extra)
    return batch


def compute_reward(
    batch: DataProto, manager: RewardManager, tokenizer: PreTrainedTokenizerBase, config: ScoringConfig
) -> tuple[Tensor, Columns, Failures]:
    """Scores a batch: token_level_scores [B, R] float32, a row's score on its last policy token; the extra columns ([B]
    objects) of managers that return dicts; and the rows that could not be scored.

    Raises:
        RuntimeError: the manager raised, or too many rows could not be scored; names it and the line.
        ValueError: the scores are of a wrong number, type or shape, or on no token of the policy, or an extra column is
            in the batch already.
    """
    name, mask = reward_name(manager), batch.batch["response_mask"]
    result = call_manager(manager, reward_view(batch, tokenizer))
    scores, extra, failures = validate_result(result, manager, mask.shape, config)
    if clashing := [key for key in extra if key in batch]:
        raise ValueError(f"the reward {name} returned the keys {clashing}, which are columns of the batch already.")
    placed = place_scores(scores, mask, name)
    if scores.ndim == 2 and config.on_failure == "score":
        placed[sorted(failures)] = config.failure_score * (last_token(mask) == 1)[sorted(failures)].float()
    return placed, extra, failures


def call_manager(manager: RewardManager, view: DataProto) -> Any:
    """Returns what `manager` returns for a `reward_view`. Raises RuntimeError if it raises; names it and the line."""
    try:
        return manager(view)
    except Exception as error:  # the boundary to the user's code: say where it broke, then stop
        raise RuntimeError(
            f"the reward {reward_name(manager)} raised {type(error).__name__}: {error} (at {users_line(error)}). "
            "Try it alone: reward(DataProto.from_single_dict({'responses': [...], 'ground_truths': [...]}))."
        ) from error


def place_scores(scores: Tensor, mask: Tensor, name: str) -> Tensor:
    """Puts [B] scores onto each row's last policy token (failed rows have none), [B, R] as it is: [B, R] float32."""
    if scores.ndim == 1:
        return torch.where(last_token(mask) == 1, scores[:, None], 0.0)
    if misplaced := ((scores != 0) & (mask == 0)).nonzero().tolist():
        raise ValueError(
            f"the reward {name} scored {len(misplaced)} tokens that the policy did not produce, the first at "
            f"[response, token] = {misplaced[0]}: multiply by data.response_mask."
        )
    return scores


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


def concat_scored(batches: Sequence[DataProto]) -> DataProto:
    """Joins scored batches; what the reward said, or a tool kept, in some of them alone is None in the others."""
    keys = sorted({key for batch in batches for key in batch.meta_info["reward_extra_keys"]})
    for batch in batches:
        batch.meta_info["reward_extra_keys"] = keys
    return join_rows(batches)


def reward_metrics(batch: DataProto) -> dict[str, float]:
    """Computes reward/<key>/{mean, std, min, max} of every number beside the score, over samples that did not fail and
    have it (an episode's is its last row's), and counts rows without a score: reward/timeout, reward/error.
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
            metrics |= {f"reward/{name}/{kind}": float(reduce(column)) for kind, reduce in reducers.items()}
    return metrics


# What a reward returns


def validate_result(
    result: Any, manager: Callable, shape: tuple[int, int], config: ScoringConfig
) -> tuple[Tensor, Columns, Failures]:
    """Checks what a manager returned: scores [B] or [B, R], with `shape` (B, R); extra columns [B]; and the rows that
    have no score: 0, or, of [B], reward.failure_score. Raises as `compute_reward`.
    """
    name = reward_name(manager)
    scores, extra, failures = parse_scores(result, shape, name)
    if failures:
        check_failures(failures, shape[0], config, name)
        if config.on_failure == "score" and scores.ndim == 1:
            scores[sorted(failures)] = config.failure_score
    return scores, extra, failures


def check_failures(failures: Failures, rows: int, config: ScoringConfig, name: str) -> None:
    """Warns of responses that the reward called `name` could not score, with the most frequent cause; raises
    RuntimeError if they are more than reward.max_failed_fraction of `rows`."""
    [(problem, times)] = Counter(failure.reason for failure in failures.values()).most_common(1)
    kinds = Counter(failure.outcome for failure in failures.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    example = next(failure for failure in failures.values() if failure.reason == problem)
    cause = f"the reward {name} {'raised' if example.trace else 'failed:'} {problem}"
    summary = f"{len(failures)} of {rows} responses could not be scored ({counts})"
    if len(failures) <= config.max_failed_fraction * rows:
        becomes = "left out" if config.on_failure == "mask" else f"scored {config.failure_score:g}"
        logger.warning("%s, and are %s: %s, most often (%d times)", summary, becomes, cause, times)
        return
    limit = f"more than reward.max_failed_fraction={config.max_failed_fraction:g} allows"
    error = RuntimeError(f"{cause}. {summary}, {limit}; python -m extras.try_reward tries it alone.")
    if example.trace:
        error.add_note(f"in the process of the reward function:\n{example.trace}")
    raise error


def parse_scores(result: Any, shape: tuple[int, int], name: str) -> tuple[Tensor, Columns, Failures]:
    """Reads numbers, dicts or a tensor as float32 scores ([B] or [B, R], with `shape` (B, R)), the dicts' columns, and
    the rows that have no score: their scores and numbers are 0, and all else None.

    A row that the reward called `name` could not score has none, nor has one with anything but a finite number, or
    with a dict of other keys than most. A number beside dicts is a score without further values: None in their columns.
    Raises ValueError if the whole has a wrong number, type or shape.
    """
    rows, extra, failures = shape[0], {}, {}
    if isinstance(result, dict) and "reward_tensor" in result:  # verl's managers
        info = result.get("reward_extra_info") or {}
        if bad := {key: len(values) for key, values in info.items() if len(values) != rows}:
            raise ValueError(f"the reward {name} returned reward_extra_info of the lengths {bad} for {rows} responses.")
        result, extra = result["reward_tensor"], {key: object_array(list(values)) for key, values in info.items()}
    allowed = f"it must return [{rows}] numbers, one per response, or {list(shape)}, one per response token"
    if isinstance(result, np.ndarray | Tensor) and result.ndim == 1:
        result = result.tolist()
    if isinstance(result, list | tuple):
        if len(result) != rows:
            raise ValueError(f"the reward {name} returned {len(result)} scores for {rows} responses: {allowed}.")
        scores, columns, failures = split_results(result)
        return scores, extra | columns, failures
    if not isinstance(result, np.ndarray | Tensor):
        raise ValueError(f"the reward {name} returned {reprlib.repr(result)}: {allowed}, as a list or a tensor.")
    if tuple(result.shape) != tuple(shape):
        raise ValueError(f"the reward {name} returned scores of shape {list(result.shape)}: {allowed}.")
    scores = torch.as_tensor(result).detach().float().cpu().clone()
    is_invalid = ~(scores.abs() < TOO_LARGE)  # NaN is not below anything
    for row in is_invalid.any(1).nonzero()[:, 0].tolist():
        failures[row] = why_no_score(scores[row][is_invalid[row]][0].item(), frozenset())
        scores[row] = 0
    return scores, extra, failures


def split_results(results: Sequence[Any]) -> tuple[Tensor, Columns, Failures]:
    """Splits the results of B responses into scores [B], a column for every other key of their dicts, and the rows
    whose result is no score."""
    dicts = [result if isinstance(result, dict) else {"score": result} for result in results]
    kinds = Counter(frozenset(result) for result in results if isinstance(result, dict) and "score" in result)
    [(keys, _)] = kinds.most_common(1) or [(frozenset(["score"]), 0)]
    scores, failures, example = torch.tensor([as_number(entry.get("score")) for entry in dicts]), {}, {}
    for row, result in enumerate(results):
        if scores[row].isnan() or (isinstance(result, dict) and set(result) != keys):
            failures[row] = why_no_score(result, keys)
        elif set(dicts[row]) == keys:
            example = example or dicts[row]
    scores[[*failures]] = 0
    filler = {key: 0.0 if isinstance(value, numbers.Real) else None for key, value in example.items()}
    dicts = [filler if row in failures else entry for row, entry in enumerate(dicts)]
    columns = {key: object_array([entry.get(key) for entry in dicts]) for key in filler if key != "score"}
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
