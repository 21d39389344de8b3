"""Computes numbers of a step's samples, an episode's together, for samplers with update(indices, metrics)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from data.protocol import DataProto
from training.episode_rows import EpisodeRows


def positions_and_metrics(batch: DataProto) -> tuple[np.ndarray, "SampleMetrics"]:
    """Returns the places in the dataset of the samples that did not fail, [E] int64, and numbers of each."""
    episodes = EpisodeRows(batch)
    is_complete = episodes.is_complete().numpy()
    positions = batch.dataset_position[episodes.last_row][is_complete].astype(np.int64)
    metrics = {name: values[is_complete] for name, values in sample_metrics(batch).items()}
    return positions, SampleMetrics(metrics, positions)


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
        numbers = {name: values for name, values in by_name.items() if values.dtype != object}  # a reward's may be text
        of_row = {row: positions == row for row in dict.fromkeys(positions.tolist())}
        self.rows = {row: {name: float(numbers[name][its].mean()) for name in numbers} for row, its in of_row.items()}

    def __missing__(self, position: int) -> dict[str, float]:
        return self.rows[position]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.rows

    def get(self, key: str | int, default: Any = None) -> Any:
        return super().get(key, self.rows.get(key, default))
