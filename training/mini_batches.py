"""Cuts a batch into mini-batches of whole prompts, each for one step of the optimiser: its rows, counts and seed."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from configs.schema import ActorConfig, Config, CriticConfig
from data.protocol import DataProto
from data.seeding import derive_seed, numpy_generator
from training.roles import columns_made, policy_loss_of


@dataclass(frozen=True)
class Update:
    """The facts that one step of the optimiser needs beside its rows."""

    step: int  # of the learning-rate schedule, from 0
    seed: int  # for losses that draw
    temperature: float  # at which the responses were sampled
    counts: dict[str, Any]  # the whole mini-batch's, by which every loss is divided: keyword arguments of `agg_loss`


def first_policy_step(config: Config) -> int:
    """Returns the step (from 1) of the policy's first update: trainer.critic_warmup, as in verl."""
    return max(1, config.trainer.critic_warmup)


class PolicyUpdates:
    """Makes `mini_batches` for the policy.

    The first update of a batch is exactly on-policy, so it goes without old_log_probs, unless a stage made them. Only
    the first has rollout_log_probs, which its forward compares with the policy's, unless a log-prob pass has done so.
    Rows that cannot change the gradient are left out, the counts stay.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.are_made = "old_log_probs" in columns_made(config)
        self.skips_silent = skips_zero_advantages(config)
        self.first_step = first_policy_step(config)

    def __call__(self, batch: DataProto, step: int) -> Iterator[tuple[DataProto, Update]]:
        compared = "old_log_probs" in batch and not self.are_made
        pairs = mini_batches(batch, self.config, self.config.actor_rollout_ref.actor, step, self.first_step)
        for number, (mini_batch, update) in enumerate(pairs):
            if number == 0 and not self.are_made and "old_log_probs" in mini_batch:
                mini_batch.pop(["old_log_probs"])
            if (number > 0 or compared) and "rollout_log_probs" in mini_batch:
                mini_batch.pop(["rollout_log_probs"])
            yield mini_batch.select_idxs(learning_rows(mini_batch)) if self.skips_silent else mini_batch, update


def mini_batches(
    batch: DataProto, config: Config, role: ActorConfig | CriticConfig, step: int, first_step: int = 1
) -> Iterator[tuple[DataProto, Update]]:
    """Passes over `batch` `ppo_epochs` times, `ppo_mini_batch_size` prompts with all their samples at a time.

    The response_mask of a mini-batch is the loss_mask of `batch`; with PF-PPO each row is the one that was drawn for
    its place (column drawn_row). `step` counts from 1; the learning-rate schedule of `role` begins at `first_step`.
    """
    seed = derive_seed(config.trainer.seed, "update", step)
    groups = rows_by_prompt(batch)
    size = role.ppo_mini_batch_size or len(groups)
    for epoch in range(role.ppo_epochs):
        order = np.arange(len(groups))
        if role.shuffle:
            order = numpy_generator(seed, "shuffle", epoch).permutation(order)
        for start in range(0, len(groups), size):
            rows = np.concatenate([groups[index] for index in order[start : start + size]])
            mini_batch = batch.select_idxs(batch.drawn_row[rows] if "drawn_row" in batch else rows)
            mini_batch.batch["response_mask"] = mini_batch.batch.pop("loss_mask")
            update = Update(
                step=step - first_step,
                seed=derive_seed(seed, "mini_batch", epoch, start),
                temperature=config.actor_rollout_ref.rollout.temperature,
                counts=global_batch_info(mini_batch, role),
            )
            yield mini_batch, update


def rows_by_prompt(batch: DataProto) -> list[list[int]]:
    """Returns the rows of each uid, in the order in which the uids first appear."""
    rows: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        rows.setdefault(uid, []).append(row)
    return list(rows.values())


def global_batch_info(mini_batch: DataProto, role: ActorConfig | CriticConfig) -> dict[str, Any]:
    """Counts a mini-batch's tokens and its rows that have any: the one denominator of its losses (agg_loss's names)."""
    mask = mini_batch.batch["response_mask"]
    scale = role.loss_scale_factor if isinstance(role, ActorConfig) else None
    return {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": int(mask.any(1).sum()),
        "loss_scale_factor": scale or mask.shape[1],
    }


def skips_zero_advantages(config: Config) -> bool:
    """Says whether a row of advantages 0 changes nothing, neither through the loss nor by entropy or KL."""
    actor = config.actor_rollout_ref.actor
    reads_all_rows = actor.entropy_coeff or actor.calculate_entropy or actor.use_kl_loss
    return policy_loss_of(config).silent_at_zero and not reads_all_rows


def learning_rows(batch: DataProto) -> torch.Tensor:
    """Marks rows with an advantage other than 0; where there is none the first, so that the optimiser steps anyway."""
    learns = ((batch.advantages != 0) & batch.response_mask.bool()).any(1)
    learns[:1] |= ~learns.any()
    return learns
