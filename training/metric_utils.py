"""Computes the metrics of steps and validations: pure functions to `{metric name: float}`.

Names and formulas are verl 0.9.1's; `group/...`, `end_reason/...` and `episode/...` are ours. A row is aborted if it
has no response token or ended in one of FAILED_END_REASONS: its score is no measurement and enters no statistic but
`aborted_ratio` and the plain lengths. An episode of several rows is one sample, scored by their sum; lengths are those
of rows. A statistic over nothing (say, every row aborted) is left out; verl reports NaN there.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.protocol import DataProto
from data.types import END_REASONS, FAILED_END_REASONS
from training.core_algos import Groups, is_close
from training.episode_rows import EpisodeRows

NestedMetrics = dict[str, dict[str, dict[str, float]]]  # data source -> variable -> metric -> value
# Columns that an episode's samples may have, and what they are called beside its data source.
OF_EPISODES = {
    "return": "episode_return",
    "success": "success",
    "num_turns": "__num_turns__",
    "tool_calls": "tool_call_counts",
    "invalid_actions": "invalid_actions",
}
# What a validation is about, most telling first: correctness, the reward of an answer, the return of an episode.
CORE_VARIABLES = ("acc", "reward", "return")


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Computes scores, rewards, advantages, returns, values and lengths of one training batch.

    Lengths are sums of the attention mask, in tokens, so that observations between two turns count; `clip_ratio` is the
    share of rows that fill the padded width.
    """
    prompt_lengths, response_lengths = _lengths(batch)
    episodes, finished, completed = _episodes(batch)
    trained = batch.response_mask.bool() & completed.unsqueeze(-1)  # [B, R]
    max_response_length = batch.responses.size(-1)
    max_prompt_length = batch.attention_mask.size(-1) - max_response_length
    metrics = {
        **_mean_max_min("critic/score", episodes.scores()[finished]),
        **_mean_max_min("critic/rewards", episodes.scores("token_level_rewards")[finished]),
        **_mean_max_min("critic/advantages", batch.advantages[trained]),
        **_mean_max_min("critic/returns", batch.returns[trained]),
        **_length_metrics("response_length", response_lengths, max_response_length),
        **_length_metrics("response_length_non_aborted", response_lengths[completed], max_response_length),
        "response/aborted_ratio": 1 - finished.float().mean().item(),
        **_length_metrics("prompt_length", prompt_lengths, max_prompt_length),
    }
    if use_critic:
        values, returns = batch.values[trained], batch.returns[trained]
        metrics |= _mean_max_min("critic/values", values)
        if values.numel() > 1:
            unexplained = torch.var(returns - values) / (torch.var(returns) + 1e-5)
            metrics["critic/vf_explained_var"] = 1 - unexplained.item()
    for column in ("__num_turns__", "tool_call_counts", "invalid_actions"):
        if column in batch:
            counts = [count for count in batch.get(column)[episodes.last_row[finished.numpy()]] if count is not None]
            metrics |= _mean_max_min(column.strip("_"), torch.tensor([float(count) for count in counts]))
    absent = np.full(len(batch), None)
    reported = [row for row in batch.get("__agent_metrics__", absent)[episodes.last_row] if row]
    for name in dict.fromkeys(name for row in reported for name, value in row.items() if isinstance(value, Real)):
        metrics |= _mean_max_min(f"agent_loop/{name}", torch.tensor([float(row.get(name, 0.0)) for row in reported]))
    return metrics


def compute_episode_metrics(batch: DataProto) -> dict[str, float]:
    """Averages over episodes: `episode/<data source>/<quantity>/mean` and `episode/tokens/<role>/mean`.

    Quantities are those of `OF_EPISODES` and, of calls of tools that failed, `tool_failures/<kind>`; roles are policy,
    observation and prompt. Episodes that failed count nowhere, and those without a verdict not in success.
    """
    episodes, finished, _ = _episodes(batch)
    ends = batch.select_idxs(episodes.last_row[finished.numpy()])
    values_of: dict[str, list[float]] = defaultdict(list)
    for name, column in OF_EPISODES.items():
        for source, value in zip(ends.data_source, ends.get(column, [None] * len(ends)), strict=True):
            if value is not None:
                values_of[f"episode/{source}/{name}/mean"].append(float(value))
    failures = [counts or {} for counts in ends.get("tool_failures", [None] * len(ends))]
    for kind in sorted({kind for counts in failures for kind in counts}):
        for source, counts in zip(ends.data_source, failures, strict=True):
            values_of[f"episode/{source}/tool_failures/{kind}/mean"].append(float(counts.get(kind, 0)))
    prompts, responses = _lengths(batch)
    policy = batch.response_mask.sum(-1).float()
    for role, tokens in (("policy", policy), ("observation", responses - policy), ("prompt", prompts)):
        values_of[f"episode/tokens/{role}/mean"] = episodes.total(tokens)[finished].tolist()
    return {name: float(np.mean(values)) for name, values in values_of.items() if values}


def compute_group_metrics(batch: DataProto) -> dict[str, float]:
    """Computes the shares of prompt groups that teach nothing, as their samples score alike, and of episodes' ends.

    A group is the completed samples of one `uid`; groups of fewer than two have no spread and are not counted. Of those
    without spread, `all_pass_frac` are at the batch's best score, `all_fail_frac` at its worst, `tie_frac` in between;
    `zero_std_frac` is the sum. If the whole batch scores alike there is no best: a positive score passes, others fail.
    """
    metrics: dict[str, float] = {}
    episodes, finished, _ = _episodes(batch)
    if "end_reason" in batch:
        reasons = batch.end_reason[episodes.last_row].tolist()
        counts = dict.fromkeys(END_REASONS, 0) | Counter(reasons)
        metrics = {f"end_reason/{reason}": count / len(reasons) for reason, count in counts.items()}
    groups, scores = Groups(batch.uid[episodes.last_row], finished[:, None]), episodes.scores()
    counted = finished & (groups.count > 1)
    if not counted.any():
        return metrics
    worst, best = scores[counted].min(), scores[counted].max()
    tie = ~groups.differ(scores)
    all_pass = tie & is_close(scores, best) & (~is_close(worst, best) | (best > 0))
    all_fail = tie & is_close(scores, worst) & ~all_pass
    one_of_each = [*{groups.labels[row].item(): row for row in counted.nonzero()[:, 0].tolist()}.values()]
    verdicts = {"zero_std": tie, "all_fail": all_fail, "all_pass": all_pass, "tie": tie & ~all_pass & ~all_fail}
    return metrics | {f"group/{name}_frac": rows[one_of_each].double().mean().item() for name, rows in verdicts.items()}


def compute_source_metrics(batch: DataProto) -> dict[str, float]:
    """Computes `source/<data source>/score/mean`, and its share of the samples, where a batch has several sources."""
    episodes, finished, _ = _episodes(batch)
    names = batch.data_source[episodes.last_row] if "data_source" in batch else []
    sources, metrics = np.array([str(name) for name in names]), {}
    for source in sorted(set(sources)) if len(set(sources)) > 1 else []:
        of_source = torch.from_numpy(sources == source)
        metrics[f"source/{source}/share"] = of_source.float().mean().item()
        if (counted := of_source & finished).any():
            metrics[f"source/{source}/score/mean"] = episodes.scores()[counted].mean().item()
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Returns `timing_s/<stage>` in seconds, and for the stages that read tokens `timing_per_token_ms/<stage>`.

    Generation is divided by the response tokens, the other stages by the tokens of prompts and responses.
    """
    prompt_lengths, response_lengths = _lengths(batch)
    num_response_tokens = response_lengths.sum().item()
    num_tokens = num_response_tokens + prompt_lengths.sum().item()
    tokens_of = dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), num_tokens)
    tokens_of["gen"] = num_response_tokens
    return {f"timing_s/{stage}": seconds for stage, seconds in timing_raw.items()} | {
        f"timing_per_token_ms/{stage}": 1000 * seconds / tokens_of[stage]
        for stage, seconds in timing_raw.items()
        if tokens_of.get(stage)
    }


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Returns the tokens of the step, its seconds, and tokens per second and device; the name is verl's, typo included.

    Reads attention_mask and `timing_raw["step"]`. `n_gpus` counts whatever the step ran on: without GPUs, the workers.
    """
    assert n_gpus > 0, f"n_gpus is {n_gpus}: throughput is per device, so without GPUs pass the number of workers"
    num_tokens, seconds = int(batch.attention_mask.sum()), timing_raw["step"]
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * n_gpus),
    }


def compute_step_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], use_critic: bool, n_gpus: int
) -> dict[str, float]:
    """Computes all metrics of a training step: of its batch, groups, episodes, time and throughput."""
    return {
        **compute_data_metrics(batch, use_critic),
        **compute_group_metrics(batch),
        **(compute_episode_metrics(batch) if "episode" in batch else {}),
        **compute_source_metrics(batch),
        **compute_timing_metrics(batch, timing_raw),
        **compute_throughout_metrics(batch, timing_raw, n_gpus),
    }


stages_begun: dict[str, float] = {}  # by time.perf_counter(), of the stages that run now; the outermost is the first


@contextmanager
def timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds that its body takes to `timing_raw[name]`, also when the body raises."""
    start = stages_begun[name] = time.perf_counter()
    try:
        yield
    finally:
        stages_begun.pop(name, None)
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


def reduce_metrics(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns one number for each list: the largest if its name contains "max", the smallest if "min", else the mean.

    As in verl the name alone decides, wherever in it the word stands. An empty list gives NaN.
    """

    def reduce_one(name: str, values: Sequence[float]) -> float:
        reducer = np.max if "max" in name else np.min if "min" in name else np.mean
        return float(reducer(values)) if len(values) else math.nan

    return {name: reduce_one(name, values) for name, values in metrics.items()}


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[np.ufunc | Callable[[list], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Computes (mean, population std) of each reducer over `n_bootstrap` resamples of `subset_size` items.

    A reducer maps one resample, a list, to a number; a ufunc (np.maximum) is reduced over all at once, twenty times
    faster. Draws what verl draws after `np.random.seed(seed)`, and leaves numpy's global generator alone.
    Raises ValueError if `data` is empty.
    """
    if len(data) == 0:
        raise ValueError("bootstrap_metric got no data to resample: leave out prompts without samples")
    draws = np.random.RandomState(seed).choice(len(data), size=(n_bootstrap, subset_size), replace=True)

    def reduce_resamples(reduce_fn: np.ufunc | Callable[[list], float]) -> Any:
        if isinstance(reduce_fn, np.ufunc):
            return reduce_fn.reduce(np.asarray(data, dtype=np.float64)[draws], axis=1)
        return [reduce_fn([data[i] for i in row]) for row in draws.tolist()]

    results = [reduce_resamples(reduce_fn) for reduce_fn in reduce_fns]
    return [(float(np.mean(result)), float(np.std(result))) for result in results]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> Any:
    """Returns the value of the first item with the most frequent vote; of equally frequent ones the first seen wins.

    Raises ValueError if `data` is empty.
    """
    votes = Counter(item[vote_key] for item in data)
    winner = max(votes, key=votes.__getitem__)  # a Counter keeps the order of first appearance, and max the first
    return next(item[val_key] for item in data if item[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[Hashable], infos_dict: Mapping[str, Sequence], seed: int = 42
) -> NestedMetrics:
    """Maps data source -> variable -> metric, each metric computed per prompt (uid) and averaged over prompts.

    `infos_dict` maps a variable ("reward", "acc", "pred", ...) to one value a sample, or to an empty list. With N the
    samples of a prompt: `mean@N`; if N > 1 also `std@N` and, for n = 2, 4, 8 ... below N and for N itself, the
    bootstrapped `best@n/mean`, `best@n/std`, `worst@n/...` and, if "pred" holds the answers, `maj@n/...`. For a sample
    whose value is None the prompt's others stand (a None answer is a vote of its own); variables that hold anything but
    numbers have no metrics.
    """
    rows_of_prompt: dict[tuple[str, Hashable], list[int]] = defaultdict(list)
    for row, prompt in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows_of_prompt[prompt].append(row)
    columns = {name: values for name, values in infos_dict.items() if len(values)}
    for name, values in columns.items():
        assert len(values) == len(data_sources), (
            f"validation variable {name!r} has {len(values)} values for {len(data_sources)} samples"
        )
    predictions = columns.get("pred", [None] * len(data_sources))
    answers = [pred if isinstance(pred, Hashable) else repr(pred) for pred in predictions]  # such as a list of numbers
    over_prompts: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for (source, _), rows in rows_of_prompt.items():
        for name, values in columns.items():
            ballots = [{"val": values[row], "pred": answers[row]} for row in rows if values[row] is not None]
            for metric, value in _prompt_metrics(ballots, len(rows), seed).items():
                over_prompts[source][name][metric].append(value)
    return {
        source: {
            name: {metric: float(np.mean(values)) for metric, values in metrics.items()}
            for name, metrics in variables.items()
        }
        for source, variables in over_prompts.items()
    }


def flatten_validation_metrics(nested: NestedMetrics, num_turns: Sequence[int] | None = None) -> dict[str, float]:
    """Returns `{section}/{source}/{variable}/{metric}` for each metric of `process_validation_metrics`.

    The section is val-core for the mean, maj and best at the largest n of the source's core variable, the first that it
    has of `CORE_VARIABLES`, and val-aux for the rest. `num_turns`, one a sample, adds val-aux/num_turns/{mean,max,min}.
    """
    flat: dict[str, float] = {}
    for source, variables in nested.items():
        core_variable = next((name for name in CORE_VARIABLES if name in variables), None)
        for variable, metrics in variables.items():
            largest = max(map(_samples_in_name, metrics))
            for metric, value in metrics.items():
                is_headline = metric.startswith(("mean", "maj", "best")) and _samples_in_name(metric) == largest
                section = "val-core" if variable == core_variable and is_headline else "val-aux"
                flat[f"{section}/{source}/{variable}/{metric}"] = value
    if num_turns is not None:
        flat |= _mean_max_min("val-aux/num_turns", torch.tensor([float(turns) for turns in num_turns]))
    return flat


def _lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Returns the tokens of each prompt and each response, [B] float32 each."""
    mask = batch.attention_mask.float()
    prompt_width = mask.size(-1) - batch.responses.size(-1)
    return mask[:, :prompt_width].sum(-1), mask[:, prompt_width:].sum(-1)


def _episodes(batch: DataProto) -> tuple[EpisodeRows, Tensor, Tensor]:
    """Groups the batch by episode; marks those that are measurements, [E] bool, and rows that are not aborted, [B]."""
    completed = _lengths(batch)[1] > 0
    if "end_reason" in batch:
        completed &= torch.tensor([reason not in FAILED_END_REASONS for reason in batch.end_reason])
    episodes = EpisodeRows(batch)
    return episodes, episodes.total(completed.int()) > 0, completed


def _mean_max_min(name: str, values: Tensor) -> dict[str, float]:
    reducers = {"mean": torch.mean, "max": torch.max, "min": torch.min} if values.numel() else {}
    return {f"{name}/{reduction}": reducer(values).item() for reduction, reducer in reducers.items()}


def _length_metrics(name: str, lengths: Tensor, max_length: int) -> dict[str, float]:
    metrics = _mean_max_min(name, lengths)
    if metrics:
        metrics[f"{name}/clip_ratio"] = (lengths == max_length).float().mean().item()
    return metrics


def _prompt_metrics(ballots: list[dict[str, Any]], num_samples: int, seed: int) -> dict[str, float]:
    """Returns metrics of one variable over those of a prompt's samples that have it; {} unless all are numbers."""
    values = [ballot["val"] for ballot in ballots]
    if not values or not all(isinstance(value, Real | np.bool_) for value in values):
        return {}
    metrics = {f"mean@{num_samples}": float(np.mean(values))}
    if num_samples == 1:
        return metrics
    metrics[f"std@{num_samples}"] = float(np.std(values))
    has_answers = any(ballot["pred"] is not None for ballot in ballots)
    majority = partial(calc_maj_val, vote_key="pred", val_key="val")
    for n in subset_sizes(num_samples):
        results = {}
        results["best"], results["worst"] = bootstrap_metric(values, n, [np.maximum, np.minimum], seed=seed)
        if has_answers:
            [results["maj"]] = bootstrap_metric(ballots, n, [majority], seed=seed)
        for kind, (mean, std) in results.items():
            metrics |= {f"{kind}@{n}/mean": mean, f"{kind}@{n}/std": std}
    return metrics


def subset_sizes(num_samples: int) -> list[int]:
    """Lists 2, 4, 8 ... below `num_samples`, then `num_samples` itself."""
    return [2**power for power in range(1, num_samples.bit_length()) if 2**power < num_samples] + [num_samples]


def _samples_in_name(metric: str) -> int:
    """Returns the n of `best@n/mean`."""
    return int(metric.split("@")[1].split("/")[0])
