"""Tells samplers and datasets what a step has learnt from, and which rows it has left out."""

import torch

from configs.import_utils import find
from data.protocol import DataProto
from data.sampler import Dynamic, PromptLoader, takes_metrics

LATER = ("advantages", "returns")  # computed after rows were left out


def update_sampler(loader: PromptLoader, batch: DataProto, left_out: DataProto | None) -> None:
    """Updates the sampler and the dataset after a step, by its `batch` and the rows that it has left out.

    A sampler is called as `update(batch)`, with the rows left out last (`with_left_out`), or as
    `update(indices, metrics)`: the positions of the samples that did not fail in the dataset, [E] int64, and numbers of
    each (extras/curriculum/curriculum.py). A dataset that has `on_batch_end` is called as `on_batch_end(batch)`.
    """
    rows = with_left_out(batch, left_out)
    if takes_metrics(loader.sampler):
        loader.sampler.update(*find("optional", "positions_and_metrics")(rows))
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
