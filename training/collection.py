"""Tells samplers and datasets what a step has learnt from, and which rows it has left out.

Pure functions of a batch. An episode of several rows is one sample, and its score theirs together.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from data.protocol import DataProto
from data.sampler import Dynamic, PromptLoader, takes_metrics
from training.episode_rows import EpisodeRows

LATER = ("advantages", "returns")  # computed after rows were left out


def update_sampler(loader: PromptLoader, batch: DataProto, left_out: DataProto | None) -> None:
    """Updates the sampler and the dataset after a step, by its `batch` and the rows that it has left out.

    A sampler is called as `update(batch)`, with the rows left out last (`with_left_out`), or as
    `update(indices, metrics)`: the positions of the samples that did not fail in the dataset, [E] int64, and numbers of
    each (`SampleMetrics`). A dataset that has `on_batch_end` is called as `on_batch_end(batch)`.
    """
    rows = with_left_out(batch, left_out)
    if takes_metrics(loader.sampler):
        episodes = EpisodeRows(rows)
        is_complete = episodes.is_complete().numpy()
        positions = rows.dataset_position[episodes.last_row][is_complete].astype(np.int64)
        metrics = {name: values[is_complete] for name, values in sample_metrics(rows).items()}
        loader.sampler.update(positions, SampleMetrics(metrics, positions))
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

    A sample is a row, or an episode of several. reward: the score. length: the policy's tokens. loss: how far the score
    is below the mean of all that did not fail, which is the policy gradient's where that mean is the baseline and the
    ratio 1. The estimator's own advantages do not compare rows: in a group they may sum to 0, whatever it scored.
    """
    episodes = EpisodeRows(batch)
    scores, lengths = episodes.scores().double(), episodes.total(batch.batch["response_mask"].sum(1))
    metrics = {"reward": scores, "length": lengths, "loss": scores[episodes.is_complete()].mean() - scores}
    values = {name: numbers.double().numpy() for name, numbers in metrics.items()}
    extra = {name: batch.non_tensor_batch[name][episodes.last_row] for name in batch.meta_info["reward_extra_keys"]}
    return extra | values


class SampleMetrics(dict[str, np.ndarray]):
    """Holds numbers of samples by name, metrics["loss"] [E], and by row, metrics[7]["loss"]: the mean of its samples.

    Rows are known by their position in the dataset, if a sample of theirs is here. Iteration is over the names alone.
    """

    def __init__(self, by_name: Mapping[str, np.ndarray], positions: np.ndarray) -> None:
        super().__init__(by_name)
        numbers = {
            name: values for name, values in by_name.items() if values.dtype != object
        }  # a reward's may be texts
        of_row = {row: positions == row for row in dict.fromkeys(positions.tolist())}
        self.rows = {row: {name: float(numbers[name][its].mean()) for name in numbers} for row, its in of_row.items()}

    def __missing__(self, position: int) -> dict[str, float]:
        return self.rows[position]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.rows

    def get(self, key: str | int, default: Any = None) -> Any:
        return super().get(key, self.rows.get(key, default))
