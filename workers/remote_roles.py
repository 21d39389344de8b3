"""Plays the roles of training/roles.py by groups of workers: deals out rows, and joins the answers.

A call names a role and a method of it: every worker calls `ModelWorker.roles[role].method(*share)`.
Every worker gets a share of every call, if need be one without rows, as it may have to take part in a sum over all of
them. Rows go out as neighbours, so that the samples of a prompt stay together as far as the shares allow, and results
come back in the rows' order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from torch import Tensor

from configs.schema import ActorRolloutRefConfig, workers_per_engine
from data.padding import prompt_width, repeats_prompt
from data.protocol import DataProto, join_rows
from data.seqlen_balancing import calculate_workload, neighbour_shares
from data.types import SamplingParams
from training.environment import are_episodes
from training.mini_batches import Update
from training.reward_function import Loadable
from training.roles import Roles
from workers.local_group import WorkerGroup, distinct_groups


def remote_roles(pools: Mapping[str, WorkerGroup], policy: ActorRolloutRefConfig) -> Roles:
    """Makes the roles that the loop calls, one for each of `pools`, which names the group that plays it."""
    peers, per_engine = policy.actor.tensor_parallel_size, workers_per_engine(policy.rollout)
    samples_together = peers if policy.rollout.name == "hf" else 1  # by the layers that are split
    return Roles(
        rollout=RemoteRollout(pools["rollout"], "rollout", samples_together, per_engine),
        actor=RemoteActor(pools["actor"], "actor", peers),
        ref=RemoteScorer(pools["ref"], "ref", peers) if "ref" in pools else None,
        critic=RemoteCritic(pools["critic"], "critic", peers) if "critic" in pools else None,
        rm=RemoteRewardModel(pools["rm"], "rm") if "rm" in pools else None,
        num_workers=sum(group.size for group in distinct_groups(pools)),
    )


@dataclass
class RemoteRole:
    """A role of `group`'s workers, under the name that it has there; `peers` neighbours in rank get the same rows."""

    group: WorkerGroup
    name: str
    peers: int = 1

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Makes the same call to all workers. Returns their answers by rank."""
        return self.group.submit(self.name, method, [arguments] * self.group.size).result()

    def share_out(self, method: str, batch: DataProto, *arguments: Any) -> list[Any]:
        """Calls all workers with their rows of `batch`. Returns the answers by share."""
        shares = shares_of(batch, self.group.size // self.peers)
        calls = [(share, *arguments) for share in shares for _ in range(self.peers)]
        return self.group.submit(self.name, method, calls).result()[:: self.peers]


@dataclass
class RemoteRollout(RemoteRole):
    """Generates by engines that are each split over `workers_per_engine` neighbours in rank; the first gets rows."""

    workers_per_engine: int = 1

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        """As many rows for each engine, or one more: how long the responses will be is not known."""
        parts = prompts.chunk_uneven(self.group.size // self.workers_per_engine // self.peers)
        none = [prompts[0:0]] * (self.workers_per_engine - 1)
        first_rows, episodes = accumulate(map(len, parts), initial=0), are_episodes(prompts)
        engines = zip(parts, first_rows, strict=False)
        shares = [(rows, sampling, seed, first, episodes) for part, first in engines for rows in (part, *none)]
        calls = [share for share in shares for _ in range(self.peers)]
        answers = self.group.submit(self.name, "generate_sequences", calls).result()[:: self.peers]
        return join_rows([*filter(len, answers)] or answers[:1])

    def update_weights(self, version: int) -> dict[str, float]:
        certificate, *others = self.call("update_weights", version)
        for other, name in product(others, certificate):
            certificate[name] = max(certificate[name], other[name])
        return certificate

    def score_early(self, functions: Sequence[Loadable]) -> None:
        self.call("score_early", functions)


class RemoteScorer(RemoteRole):
    def compute_log_prob(self, batch: DataProto, temperature: float, columns: Sequence[str]) -> DataProto:
        return DataProto.concat(self.share_out("compute_log_prob", batch, temperature, columns))


class RemoteRewardModel(RemoteRole):
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        read = batch.select(["input_ids", "responses", "attention_mask"], ["raw_prompt"])
        shares = [(read[rows],) for rows in rows_of_shares(read.batch["attention_mask"], self.group.size)]
        return DataProto.concat(self.group.submit(self.name, "compute_rm_score", shares).result())


class RemoteTrained(RemoteRole):
    def save(self, folder: Path, contents: Sequence[str], background: bool) -> None:
        self.call("save", folder, contents, background)

    def is_saved(self) -> bool:
        return all(self.call("is_saved"))

    def load(self, folder: Path) -> None:
        self.call("load", folder)

    def checkpoint_bytes(self, contents: Sequence[str]) -> int:
        return self.call("checkpoint_bytes", contents)[0]


class RemoteActor(RemoteScorer, RemoteTrained):
    def update_policy(self, mini_batch: DataProto, update: Update) -> dict[str, float]:
        return self.share_out("update_policy", mini_batch, update)[0]

    def compute_loss(self, batch: DataProto, update: Update) -> dict[str, float]:
        return self.share_out("compute_loss", batch, update)[0]


class RemoteCritic(RemoteTrained):
    def compute_values(self, batch: DataProto) -> DataProto:
        return DataProto.concat(self.share_out("compute_values", batch))

    def update_critic(self, mini_batch: DataProto, update: Update) -> dict[str, float]:
        return self.share_out("update_critic", mini_batch, update)[0]


def shares_of(batch: DataProto, count: int) -> list[DataProto]:
    """Cuts the tensors of `batch` into `count` shares of about equal work; a prompt like the row before's is free."""
    mask = batch.batch["attention_mask"].clone()
    mask[repeats_prompt(batch), : prompt_width(batch)] = 0
    tensors = batch.select(non_tensor_batch_keys=[], meta_info_keys=[])
    return [tensors[rows] for rows in rows_of_shares(mask, count)]


def rows_of_shares(mask: Tensor, count: int) -> list[slice]:
    """Returns the rows of `count` shares of about equal work; `mask` [B, S] has a 1 for each token that is computed."""
    return neighbour_shares([*map(calculate_workload, mask.sum(1).tolist())], count)
