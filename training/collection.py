"""Chooses groups of samples that teach something (dynamic sampling, DAPO), and tells samplers and datasets of a step.

Pure functions of a batch. An episode of several rows is one sample, and its score theirs together.
"""

import numpy as np
import torch
from torch import Tensor

from data.protocol import DataProto
from data.sampler import Dynamic, PromptLoader, hears_metrics
from training.core_algos import Groups
from training.episode_rows import EpisodeRows
from training.losses import masked_sum
from training.mini_batches import rows_by_prompt

TOLERANCE = 1e-6  # float32 sums of the same rewards of several turns may differ in the last bit
LATER = ("advantages", "returns")  # computed after rows were left out


def groups_by_signal(batch: DataProto, metric: str, *bounds: float | None) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the rows of each group with signal (`rows_with_signal`), and those of each of the others."""
    groups, has_signal = rows_by_prompt(batch), rows_with_signal(batch, metric, *bounds).tolist()
    return [rows for rows in groups if has_signal[rows[0]]], [rows for rows in groups if not has_signal[rows[0]]]


def rows_with_signal(batch: DataProto, metric: str, low: float | None = None, high: float | None = None) -> Tensor:
    """Returns [B] bool: rows of the groups (rows of one uid) whose completed samples differ in `metric`, and whose mean
    of it is from `low` to `high`.

    `metric` is "score" (or "reward", or of a reward that returns a lone number "acc", as in verl), the sum of
    token_level_scores, or a numeric column such as what the reward returned beside the score. Raises ValueError if
    there is no such column, or it holds anything but numbers.
    """
    episodes = EpisodeRows(batch)
    values = metric_of_episodes(episodes, metric)
    groups = Groups(batch.uid[episodes.last_row], episodes.is_complete()[:, None])
    spread = groups.reduce(values, "amax") - groups.reduce(values, "amin")
    has_signal = spread > TOLERANCE * groups.reduce(values.abs(), "amax").clamp(min=1)
    for bound, sign in ((low, 1), (high, -1)):
        has_signal &= bound is None or sign * (groups.mean(values) - bound) >= -TOLERANCE
    return has_signal[episodes.of_row]


def metric_of_episodes(episodes: EpisodeRows, metric: str) -> Tensor:
    """Returns what `rows_with_signal` compares, [E] float32; a column's numbers are those of an episode's last row."""
    batch = episodes.batch
    returned, is_column = batch.meta_info.get("reward_extra_keys"), metric in batch.non_tensor_batch
    if metric in ("score", "reward") or (metric == "acc" and not returned and not is_column):
        return episodes.scores()
    key = f"algorithm.filter_groups.metric={metric}"
    if not is_column:
        choices = f", or one of {returned}" if returned else ", or let it return a dict with score and others"
        raise ValueError(f"{key}: the reward returns no such number. Use score{choices}.")
    try:
        return torch.tensor([float(value) for value in batch.non_tensor_batch[metric][episodes.last_row]])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: the reward must return a number under that name in every row; {error}.") from error


def update_sampler(loader: PromptLoader, batch: DataProto, left_out: DataProto | None) -> None:
    """Updates the sampler and the dataset after a step, by its `batch` and the rows that dynamic sampling left out.

    A sampler is called as `update(batch)`, with the rows left out last (`with_left_out`), or as
    `update(indices, metrics)`: the positions of the samples that did not fail in the dataset, [E] int64, and numbers of
    each (`sample_metrics`). A dataset that has `on_batch_end` is called as `on_batch_end(batch)`.
    """
    rows = with_left_out(batch, left_out)
    if hears_metrics(loader.sampler):
        episodes = EpisodeRows(rows)
        is_complete = episodes.is_complete().numpy()
        metrics = {name: values[is_complete] for name, values in sample_metrics(rows).items()}
        loader.sampler.update(rows.dataset_position[episodes.last_row][is_complete].astype(np.int64), metrics)
    else:
        loader.sampler.update(rows)
    if isinstance(loader.dataset, Dynamic):
        loader.dataset.on_batch_end(rows)


def with_left_out(batch: DataProto, left_out: DataProto | None) -> DataProto:
    """Returns `batch`, and below it the rows that were left out, with advantages and returns of 0: nothing was learnt.

    Columns that only the rows of `batch` have, such as old_log_probs, are left out then.
    """
    if left_out is None:
        return batch
    zeros = {name: torch.zeros_like(left_out.batch["token_level_scores"]) for name in LATER}
    below = DataProto.from_dict({**left_out.tensors, **zeros}, left_out.non_tensor_batch, left_out.meta_info)
    above = batch.select(below.tensors, below.non_tensor_batch)
    return DataProto.concat([above, below])


def sample_metrics(batch: DataProto) -> dict[str, np.ndarray]:
    """Computes numbers of each sample, by name, [E] float64, beside those that the reward returned.

    A sample is a row, or an episode of several. reward: the score. length: the policy's tokens. loss: the policy
    gradient's before the update, where the ratio is 1, which is the mean over the tokens of -advantage.
    """
    episodes, mask = EpisodeRows(batch), batch.batch["response_mask"]
    lengths = episodes.total(mask.sum(1))
    advantages = episodes.total(masked_sum(batch.batch["advantages"], mask, axis=1))
    metrics = {"reward": episodes.scores(), "length": lengths, "loss": -advantages / lengths.clamp(min=1)}
    numbers = {name: values.double().numpy() for name, values in metrics.items()}
    extra = {name: batch.non_tensor_batch[name][episodes.last_row] for name in batch.meta_info["reward_extra_keys"]}
    return extra | numbers
