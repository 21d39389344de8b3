"""The roles of training/roles.py, played by a group of workers: which method each verb is, and which rows each worker
gets.

Rows go out as neighbours, so that the samples of a prompt stay together as far as the shares allow, and results come
back in the rows' order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from configs.checks import policy_loss_name
from configs.schema import Config
from data.padding import repeats_prompt
from data.protocol import DataProto
from data.seqlen_balancing import calculate_workload, neighbour_shares
from training.core_algos import SILENT_AT_ZERO
from training.roles import SamplingParams
from workers.model_worker import ModelWorker
from workers.worker_group import WorkerGroup


@dataclass
class RolloutRole:
    group: WorkerGroup

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        shares = [share for share in prompts.chunk_uneven(self.group.size) if len(share)]
        first_rows = accumulate(map(len, shares), initial=0)
        arguments = [(share, sampling, seed, first) for share, first in zip(shares, first_rows, strict=False)]
        return DataProto.concat(self.group.map(generate_share, arguments))

    def update_weights(self, step: int) -> None:
        self.group.run(ModelWorker.update_weights, step)


def generate_share(worker: ModelWorker, arguments: tuple[DataProto, SamplingParams, int, int]) -> DataProto:
    return worker.generate_sequences(*arguments)


@dataclass
class ActorRole:
    group: WorkerGroup
    config: Config

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return scored(self.group, ModelWorker.compute_log_prob, batch)

    def update_policy(self, batch: DataProto) -> dict[str, float]:
        """Rows that could not change the gradient are left out (the counts stay), of metrics such as ppo_kl as well."""
        if skips_zero_advantages(self.config):
            batch = without_zero_advantages(batch)
        return updated(self.group, ModelWorker.update_policy, batch)

    def save(self, folder: Path) -> None:
        self.group.run(ModelWorker.save_actor, folder)

    def load(self, folder: Path) -> None:
        self.group.run(ModelWorker.load_actor, folder)


@dataclass
class ReferenceRole:
    group: WorkerGroup

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return scored(self.group, ModelWorker.compute_ref_log_prob, batch)


@dataclass
class CriticRole:
    group: WorkerGroup

    def compute_values(self, batch: DataProto) -> DataProto:
        return scored(self.group, ModelWorker.compute_values, batch)

    def update_critic(self, batch: DataProto) -> dict[str, float]:
        return updated(self.group, ModelWorker.update_critic, batch)

    def save(self, folder: Path) -> None:
        self.group.run(ModelWorker.save_critic, folder)

    def load(self, folder: Path) -> None:
        self.group.run(ModelWorker.load_critic, folder)


def skips_zero_advantages(config: Config) -> bool:
    """Whether rows whose advantages are all 0 cannot change the actor's gradient."""
    actor = config.actor_rollout_ref.actor
    reads_all_rows = actor.entropy_coeff or actor.calculate_entropy or actor.use_kl_loss
    loss = policy_loss_name(actor.policy_loss, config.algorithm.rollout_correction)
    return loss in SILENT_AT_ZERO and not reads_all_rows


def without_zero_advantages(batch: DataProto) -> DataProto:
    """The rows that have an advantage other than 0; one row if none has, so that the optimiser steps all the same."""
    counts = ((batch.batch["advantages"] != 0) & batch.batch["response_mask"].bool()).any(1)
    return batch.select_idxs(counts if counts.any() else [0])


def scored(group: WorkerGroup, method: Callable[[ModelWorker, DataProto], DataProto], batch: DataProto) -> DataProto:
    """`method`'s columns of all rows."""
    return DataProto.concat(group.map(method, [share for share in shares_of(batch, group.size) if len(share)]))


def updated(
    group: WorkerGroup, method: Callable[[ModelWorker, DataProto], dict[str, Any]], batch: DataProto
) -> dict[str, Any]:
    """`method`'s metrics. All workers take part, one without rows too: they sum their gradients."""
    return group.map(method, shares_of(batch, group.size))[0]


def shares_of(batch: DataProto, count: int) -> list[DataProto]:
    """The tensors of `batch` in `count` shares of about equal work; a prompt that the row before has too is free."""
    prompt_width = batch.batch["input_ids"].shape[1] - batch.batch["responses"].shape[1]
    mask = batch.batch["attention_mask"].clone()
    mask[repeats_prompt(batch), :prompt_width] = 0
    workloads = [calculate_workload(tokens) for tokens in mask.sum(1).tolist()]
    tensors = batch.select(non_tensor_batch_keys=[])
    return [tensors[rows] for rows in neighbour_shares(workloads, count)]
