"""Tells samplers and datasets what a step has learnt from, and which rows it has left out.

Pure functions of a batch. An episode of several rows is one sample, and its score theirs together.
"""

import numpy as np
import torch

from data.protocol import DataProto
from data.sampler import Dynamic, PromptLoader, hears_metrics
from training.episode_rows import EpisodeRows
from training.losses import masked_sum

LATER = ("advantages", "returns")  # computed after rows were left out


def update_sampler(loader: PromptLoader, batch: DataProto, left_out: DataProto | None) -> None:
    """Updates the sampler and the dataset after a step, by its `batch` and the rows that it has left out.

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
