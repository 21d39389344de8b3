"""Scores rollouts by the user's function or manager, and fills token_level_scores.

A reward manager is called with a `reward_view`: one row per response, texts decoded once, and everything of the dataset
row. It returns B numbers, B dicts with a `score`, a [B] or [B, R] tensor, or verl's {"reward_tensor",
"reward_extra_info"}; `FunctionReward` is the manager around a plain function (training/reward_function.py). What it
returns is checked before the loss reads it, and a row without a score is never scored 0.
"""

import inspect
import logging
import numbers
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress, groupby
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once, users_line
from configs.import_utils import bind, callable_name, find, load_extern_object
from configs.schema import Config, RewardConfig, RewardManagerConfig, ScoringConfig
from data.chat import parse_prompt
from data.padding import last_token
from data.protocol import DataProto, join_rows, object_array
from data.rows import prompt_text
from data.types import NotScored, Row
from training.episode_rows import LOOP_SCORE, EpisodeRows, describe_conversations

RewardManager = Callable[[DataProto], Any]
Columns = dict[str, np.ndarray]
TOO_LARGE = 1e18  # from here on the squares of a batch of scores are no longer finite in float32

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """Holds a row's score (or its tokens' scores, [R] float32) and the reward's further values."""

    score: float | Tensor
    extra: Row


Result = Scored | NotScored


@dataclass(frozen=True)
class RewardRun:
    """The parts of a run that a reward may be built from."""

    tokenizer: PreTrainedTokenizerBase | None
    environment: Any | None
    config: Config | None = None


@runtime_checkable
class ChecksRows(Protocol):
    """A reward that checks rows before the run starts; messages call it `title`."""

    title: str

    def check(self, rows: Mapping[int, Row]) -> None:
        """Raises ConfigError if rows, keyed by their position in the data set, lack what the reward needs."""


def load_reward_manager(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    environment: Any | None,
    run_config: Config | None = None,
) -> RewardManager:
    """Loads the run's reward, by the kind "reward" of configs/extras.py. Raises ValueError if its form is unknown."""
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
    """Names the reward that scores; configs/checks.py refuses settings that name two."""
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

    `config` decides about rows that could not be scored (`mark_failures`). Episodes of an environment, and some rows of
    agent loops, have scores already: the reward does not see them.

    Raises:
        RuntimeError: the manager raised, or too many rows could not be scored; names it and the line.
        ValueError: the number, type or shape of the scores is wrong, or a score is on no token of the policy, or an
            extra column is in the batch already.
    """
    if "token_level_scores" in batch and "turn_ids" in batch:
        batch.meta_info["reward_extra_keys"] = []
        return batch
    config = config or ScoringConfig()  # a test may leave it out
    name, mask = reward_name(manager), batch.batch["response_mask"]
    results = take_loop_scores(batch) if LOOP_SCORE in batch else [None] * len(batch)
    if rows := [row for row, result in enumerate(results) if result is None]:
        view = reward_view(batch if len(rows) == len(batch) else batch.select_idxs(rows), tokenizer)
        scored = score_view(view, manager, config, mask.shape[1])
        if clashing := [key for key in extra_columns(scored) if key in batch]:
            raise ValueError(f"the reward {name} returned the keys {clashing}, which are columns of the batch already.")
        for row, result in zip(rows, scored, strict=True):
            results[row] = result
    extra = extra_columns(results)
    failure_score = config.failure_score if config.on_failure == "score" else 0.0
    batch.batch["token_level_scores"] = place_scores(results, mask, name, failure_score)
    mark_failures(batch, results, config)
    batch.non_tensor_batch.update(extra)
    batch.meta_info["reward_extra_keys"] = sorted(extra)
    return batch


def take_loop_scores(batch: DataProto) -> list[Scored | None]:
    """Removes from `batch` the scores, with extra info, that agent loops gave to rows; None for a row without one."""
    infos = batch.non_tensor_batch.pop("reward_extra_info", [None] * len(batch))
    pairs = zip(batch.non_tensor_batch.pop(LOOP_SCORE), infos, strict=True)
    return [None if score is None else Scored(score, info or {}) for score, info in pairs]


def score_view(view: DataProto, manager: RewardManager, config: ScoringConfig, width: int = 1) -> list[Result]:
    """Scores the rows of a `reward_view`, whose responses are `width` tokens wide. Raises as `add_scores`."""
    name = reward_name(manager)
    results = read_results(call_manager(manager, view), (len(view), width), name)
    if failures := [result for result in results if isinstance(result, NotScored)]:
        check_failures(failures, len(results), config, name)
    return results


def call_manager(manager: RewardManager, view: DataProto) -> Any:
    """Returns what `manager` returns for a `reward_view`. Raises RuntimeError if it raises; names it and the line."""
    try:
        return manager(view)
    except Exception as error:  # the boundary to the user's code: say where it broke, then stop
        raise RuntimeError(
            f"the reward {reward_name(manager)} raised {type(error).__name__}: {error} (at {users_line(error)}). "
            "Try it alone: reward(DataProto.from_single_dict({'responses': [...], 'ground_truths': [...]}))."
        ) from error


def read_results(returned: Any, shape: tuple[int, int], name: str) -> list[Result]:
    """Reads what the reward called `name` returned for B responses of R tokens, `shape`, as a result for each.

    A row is scored by a finite number, by R of them in a tensor, or by a dict with `score` that has no key beyond those
    of most dicts; anything else is NotScored. A number among dicts is a score without further values. Raises ValueError
    if the number of results, their type or their shape is wrong.
    """
    rows, columns = shape[0], {}
    if isinstance(returned, dict) and "reward_tensor" in returned:  # verl's managers
        returned, columns = returned["reward_tensor"], returned.get("reward_extra_info") or {}
        if bad := {key: len(values) for key, values in columns.items() if len(values) != rows}:
            raise ValueError(f"the reward {name} returned reward_extra_info of the lengths {bad} for {rows} responses.")
    is_array = isinstance(returned, np.ndarray | Tensor)
    size = [*returned.shape] if is_array else [len(returned)] if isinstance(returned, list | tuple) else None
    if size != [rows] and (size != [*shape] or not is_array):
        what = reprlib.repr(returned) if size is None else f"scores of shape {size}"
        allowed = f"[{rows}] numbers, one per response, or {[*shape]}, one per response token, as a list or a tensor"
        raise ValueError(f"the reward {name} returned {what}: it must return {allowed}.")
    returned = returned.tolist() if is_array and size == [rows] else [*returned]
    kinds = Counter(frozenset(result) for result in returned if isinstance(result, dict) and "score" in result)
    keys = max(kinds, key=lambda kind: sum(map(kind.issuperset, kinds.elements())), default=frozenset(["score"]))
    extra = [{key: values[row] for key, values in columns.items()} for row in range(rows)]
    return [read_result(*pair, keys, shape[1]) for pair in zip(returned, extra, strict=True)]


def read_result(result: Any, extra: Row, keys: frozenset[str], width: int) -> Result:
    """Reads a row's result: its score, and its further values after `extra`; most dicts of the batch have `keys`."""
    if isinstance(result, NotScored):
        return result
    if isinstance(result, dict) and not {"score"} <= result.keys() <= keys:
        rule = f"most dicts have {sorted(map(str, keys))}" if "score" in result else "a dict needs 'score'"
        return NotScored("error", f"it returned a dict of {sorted(map(str, result))}: {rule}")
    fields = result if isinstance(result, dict) else {"score": result}
    score, extra = fields["score"], extra | {key: value for key, value in fields.items() if key != "score"}
    if isinstance(score, Tensor | np.ndarray) and score.shape in ((), (1,)):
        score = score.item()
    elif isinstance(score, Tensor | np.ndarray) and score.shape == (width,):
        score = torch.as_tensor(score).detach().float().cpu()
        wrong = score[~(score.abs() < TOO_LARGE)]  # NaN is not below anything
        if not len(wrong):
            return Scored(score, extra)
        score = wrong[0].item()
    if isinstance(score, numbers.Real | np.bool_) and abs(score) < TOO_LARGE:
        return Scored(float(score), extra)
    is_number = isinstance(score, numbers.Real)
    rule = f"finite number below {TOO_LARGE:g}" if is_number else "number, or a dict with it as 'score'"
    return NotScored("error", f"it returned {reprlib.repr(score)}: a score is a {rule}")


def check_failures(failures: Sequence[NotScored], total: int, config: ScoringConfig, name: str) -> None:
    """Warns of the `failures` among `total` responses, with the most frequent cause; raises RuntimeError if they are
    more than reward.max_failed_fraction."""
    [(problem, times)] = Counter(failure.reason for failure in failures).most_common(1)
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(failure.outcome for failure in failures).items())
    trace = next(failure.trace for failure in failures if failure.reason == problem)
    cause = f"the reward {name} {'raised' if trace else 'failed:'} {problem}"
    summary = f"{len(failures)} of {total} responses could not be scored ({counts})"
    if len(failures) <= config.max_failed_fraction * total:
        becomes = "left out" if config.on_failure == "mask" else f"scored {config.failure_score:g}"
        logger.warning("%s, and are %s: %s, most often (%d times)", summary, becomes, cause, times)
        return
    limit = f"more than reward.max_failed_fraction={config.max_failed_fraction:g} allows"
    error = RuntimeError(f"{cause}. {summary}, {limit}; python -m extras.try_reward tries it alone.")
    if trace:
        error.add_note(f"in the process of the reward function:\n{trace}")
    raise error


def place_scores(results: Sequence[Result], mask: Tensor, name: str, failure_score: float = 0.0) -> Tensor:
    """Places each row's score, or `failure_score`, on its last policy token, and scores of tokens on theirs: [B, R]
    float32. A row without policy tokens gets none. Raises ValueError for a score on any other token."""
    placed, ends = torch.zeros(mask.shape), last_token(mask) == 1
    for row, result in enumerate(results):
        score = result.score if isinstance(result, Scored) else failure_score
        placed[row, slice(None) if isinstance(score, Tensor) else ends[row]] = score
    if misplaced := ((placed != 0) & (mask == 0)).nonzero().tolist():
        raise ValueError(
            f"the reward {name} scored {len(misplaced)} tokens that the policy did not produce, the first at "
            f"[response, token] = {misplaced[0]}: multiply by data.response_mask."
        )
    return placed


def extra_columns(results: Sequence[Result]) -> Columns:
    """Makes a column, [B] objects, of each further value: a row without a score gets 0 for numbers, a scored row that
    lacks the value None."""
    empty: Row = {}
    for result in results:
        for key, value in result.extra.items() if isinstance(result, Scored) else ():
            empty.setdefault(key, 0.0 if isinstance(value, numbers.Real) else None)
    rows = [result.extra if isinstance(result, Scored) else empty for result in results]
    return {key: object_array([row.get(key) for row in rows]) for key in empty}


def mark_failures(batch: DataProto, results: Sequence[Result], config: ScoringConfig) -> None:
    """Adds the column reward_outcome, [B] (ok, timeout or error), and leaves rows without a score out of training.

    Such a row loses its policy tokens and, if there is that column, gets the end_reason reward_timeout or reward_error.
    """
    outcomes = ["ok" if isinstance(result, Scored) else result.outcome for result in results]
    batch.non_tensor_batch["reward_outcome"] = object_array(outcomes)
    rows = [row for row, outcome in enumerate(outcomes) if outcome != "ok"]
    if not rows or config.on_failure == "score":
        return
    batch.batch["response_mask"][rows] = 0
    if "end_reason" in batch:
        reasons = np.array(batch.end_reason, dtype=object)
        reasons[rows] = [f"reward_{outcomes[row]}" for row in rows]
        batch.non_tensor_batch["end_reason"] = reasons


def concat_scored(batches: Sequence[DataProto]) -> DataProto:
    """Joins scored batches; columns of rewards or tools that only some of them have are None in the others."""
    keys = sorted({key for batch in batches for key in batch.meta_info["reward_extra_keys"]})
    for batch in batches:
        batch.meta_info["reward_extra_keys"] = keys
    return join_rows(batches)


def reward_metrics(batch: DataProto) -> dict[str, float]:
    """Computes reward/<key>/{mean, std, min, max} of the reward's further numbers, over the samples that have them and
    did not fail (of an episode: its last row), and counts rows without a score: reward/timeout, reward/error.
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


# Without a run


def compute_reward(data: DataProto, reward_fn: Callable, tokenizer: PreTrainedTokenizerBase | None = None) -> Tensor:
    """Scores responses by a reward in any form of docs/rewards.md: [B] float32, NaN for one that it cannot score.

    `data.responses` are texts; those of rollouts are token ids, which `tokenizer` decodes. Scores of tokens are summed.
    """
    config, is_rollout = ScoringConfig(), "responses" in data.tensors
    view, width = (reward_view(data, tokenizer), data.responses.shape[1]) if is_rollout else (data, 1)
    results = score_view(view, find("reward", "object")(reward_fn, config, tokenizer), config, width)
    scores = [torch.as_tensor(result.score if isinstance(result, Scored) else torch.nan) for result in results]
    return torch.tensor([score.sum() for score in scores])


def compute_reward_async(*arguments: Any, **keywords: Any) -> Future[Tensor]:
    """Starts `compute_reward` in a thread: `.result()` waits for it, in async code `await asyncio.wrap_future(…)`."""
    return ThreadPoolExecutor(1).submit(compute_reward, *arguments, **keywords)
