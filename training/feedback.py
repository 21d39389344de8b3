"""What the data hear of a step: samplers that follow a curriculum, datasets that change with the run."""

import numpy as np
import torch

from data.protocol import DataProto
from data.sampler import Dynamic, PromptLoader, hears_metrics
from training.episodes import Episodes
from training.torch_functional import masked_sum

LATER = ("advantages", "returns")  # computed after rows were left out


def tell_data(loader: PromptLoader, batch: DataProto, left_out: DataProto | None) -> None:
    """Tells the sampler and the dataset of a step: its finished `batch`, and what dynamic sampling left out of it.

    The sampler by `update(batch)`, where the rows left out come last (`with_left_out`), or by
    `update(indices, metrics)`: the places of all these samples in the dataset, [E] int64, and numbers of each
    (`sample_metrics`). A dataset that has it by `on_batch_end(batch)`.
    """
    rows = with_left_out(batch, left_out)
    if hears_metrics(loader.sampler):
        places = rows.dataset_position[Episodes(rows).last_row]
        loader.sampler.update(places.astype(np.int64), sample_metrics(rows))
    else:
        loader.sampler.update(rows)
    if isinstance(loader.dataset, Dynamic):
        loader.dataset.on_batch_end(rows)


def with_left_out(batch: DataProto, left_out: DataProto | None) -> DataProto:
    """`batch`, and below it the rows that were left out; their advantages and returns are 0, as nothing was learnt.

    Columns that only the rows of `batch` have, such as old_log_probs, are left out then.
    """
    if left_out is None:
        return batch
    zeros = {name: torch.zeros_like(left_out.batch["token_level_scores"]) for name in LATER}
    below = DataProto.from_dict({**left_out.tensors, **zeros}, left_out.non_tensor_batch, left_out.meta_info)
    above = batch.select(below.tensors, below.non_tensor_batch)
    return DataProto.concat([above, below])


def sample_metrics(batch: DataProto) -> dict[str, np.ndarray]:
    """Numbers of each sample, by name, [E] float64, and the numbers that the reward returned beside the score.

    A sample is a row, or an episode of several. reward: the score. length: the policy's tokens. loss: the policy
    gradient's before the update, where the ratio is 1, which is the mean over the tokens of -advantage.
    """
    episodes, mask = Episodes(batch), batch.batch["response_mask"]
    lengths = episodes.total(mask.sum(1))
    advantages = episodes.total(masked_sum(batch.batch["advantages"], mask, axis=1))
    metrics = {"reward": episodes.scores(), "length": lengths, "loss": -advantages / lengths.clamp(min=1)}
    numbers = {name: values.double().numpy() for name, values in metrics.items()}
    said = {name: batch.non_tensor_batch[name][episodes.last_row] for name in batch.meta_info["reward_extra_keys"]}
    return said | numbers
