"""How often the optimiser steps: a batch of rollouts cut into mini-batches of whole prompts, with their counts."""

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from configs.schema import ActorConfig, CriticConfig
from data.protocol import DataProto
from data.seeding import derive_seed, numpy_generator


def mini_batches(batch: DataProto, config: ActorConfig | CriticConfig, seed: int) -> Iterator[DataProto]:
    """`ppo_epochs` passes over `batch`, `ppo_mini_batch_size` prompts at a time; the samples of a prompt stay together.

    Each mini-batch carries in `meta_info` what its update needs: `global_batch_info`, a `seed` of its own, and
    `is_first` of its batch.
    """
    for epoch, start, rows in mini_batch_rows(batch, config, seed):
        mini_batch = batch.select_idxs(rows)
        mini_batch.meta_info = {
            **batch.meta_info,
            "global_batch_info": global_batch_info(mini_batch, config),
            "seed": derive_seed(seed, "mini_batch", epoch, start),
            "is_first": epoch == start == 0,
        }
        yield mini_batch


def mini_batch_rows(
    batch: DataProto, config: ActorConfig | CriticConfig, seed: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """(epoch, place of its first prompt in the epoch, rows) of each mini-batch."""
    groups = rows_by_prompt(batch)
    size = config.ppo_mini_batch_size or len(groups)
    for epoch in range(config.ppo_epochs):
        order = np.arange(len(groups))
        if config.shuffle:
            order = numpy_generator(seed, "shuffle", epoch).permutation(order)
        for start in range(0, len(groups), size):
            yield epoch, start, np.concatenate([groups[place] for place in order[start : start + size]])


def rows_after_first(batch: DataProto, config: ActorConfig | CriticConfig, seed: int) -> list[int]:
    """The rows of every mini-batch but the first: they are learnt from by weights that they were not drawn with."""
    _, *later = (rows for _, _, rows in mini_batch_rows(batch, config, seed))
    return np.unique(np.concatenate(later)).tolist() if later else []


def rows_by_prompt(batch: DataProto) -> list[list[int]]:
    """The rows of each uid, in order of its first."""
    rows: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        rows.setdefault(uid, []).append(row)
    return list(rows.values())


def global_batch_info(mini_batch: DataProto, config: ActorConfig | CriticConfig) -> dict[str, Any]:
    """The one denominator of every loss of a mini-batch: its tokens and its rows that have any (agg_loss's names)."""
    mask = mini_batch.batch["response_mask"]
    scale = config.loss_scale_factor if isinstance(config, ActorConfig) else None
    return {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": int(mask.any(1).sum()),
        "loss_scale_factor": scale or mask.shape[1],
    }
