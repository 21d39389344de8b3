"""Calls a role of the run: every worker of its group gets a share of the rows (`Role.rows`), or the same (`Role.all`).

`LocalGroup` is the one worker of this process, workers/ray_group.py has those of Ray. Every worker gets a share of each
call, if need be one without rows, as it may have to take part in a sum over all. Rows go out as neighbours, so that the
samples of a prompt stay together, and answers come back in the rows' order. Calls to one group are carried out in the
order in which they were submitted; calls to two overlap.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch

from configs.import_utils import find
from configs.schema import Config
from data.padding import prompt_width, repeats_prompt
from data.protocol import DataProto, join_rows
from data.seqlen_balancing import calculate_workload, neighbour_shares
from data.types import SamplingParams
from training.environment import are_episodes
from training.roles import ROLES, SEQUENCES, RoleSpec
from workers.deadlines import Wait, own_beat
from workers.rollout import load_rollout_class


class Pending(Protocol):
    """A call that workers are busy with."""

    def result(self) -> list[Any]:
        """Waits for what the workers return, by rank; raises what the first to fail raised."""


class Group(Protocol):
    """`size` workers, each an object with `roles`: by its name, the object that plays each role."""

    size: int

    def submit(self, role: str, method: str, shares: Sequence[tuple]) -> Pending:
        """Calls `roles[role].method(*share)` in every worker, with the share of its rank."""

    def close(self) -> None:
        """Gives the workers' resources back."""


@dataclass(frozen=True)
class Done:
    """The `Pending` of a call that is over."""

    results: list[Any]

    def result(self) -> list[Any]:
        return self.results


class LocalGroup:
    """Runs the one worker as an object of this process: no start-up, no serialisation, breakpoints work."""

    size = 1

    def __init__(self, n_threads: int, worker_class: type, *args: Any) -> None:
        torch.set_num_threads(n_threads)
        self.worker = worker_class(*args)

    def submit(self, role: str, method: str, shares: Sequence[tuple]) -> Done:
        check_shares(shares, self.size)
        with Wait(f"{role}.{method}", [(os.getpid(), "")], own_beat):
            return Done([getattr(self.worker.roles[role], method)(*shares[0])])

    def close(self) -> None:
        self.worker.close()


@dataclass
class Role:
    """A role that `group` plays; `peers` neighbours in rank compute a layer together, and get the same rows. Methods
    that have an entry in `reads` are given those tensors beside `SEQUENCES`, others every tensor."""

    group: Group
    spec: RoleSpec
    peers: int = 1
    reads: Mapping[str, Collection[str]] = field(default_factory=dict, kw_only=True)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Makes the same call to all workers; returns their answers by rank."""
        return self.group.submit(self.spec.name, method, [arguments] * self.group.size).result()

    def rows(self, method: str, batch: DataProto, *arguments: Any) -> Any:
        """Calls all workers with their shares of `batch`; joins the rows that they answer, or returns the answer that
        all agree on, such as metrics."""
        if method in self.reads:
            columns = {*SEQUENCES, *self.reads[method]}
            batch = batch.select([name for name in batch.tensors if name in columns])
        shares = shares_of(batch, self.group.size // self.peers, self.spec.objects, self.spec.like_policy)
        answers = self._deal(method, [(share, *arguments) for share in shares])
        return DataProto.concat(answers) if isinstance(answers[0], DataProto) else answers[0]

    def compute(self, batch: DataProto, columns: Sequence[str], temperature: float) -> DataProto:
        """Makes `columns`, which are some of the role's, of each row of `batch`."""
        facts = {"columns": columns, "temperature": temperature}
        return self.rows(self.spec.compute, batch, *[facts[name] for name in self.spec.arguments])

    def _deal(self, method: str, shares: Sequence[tuple]) -> list[Any]:
        calls = [share for share in shares for _ in range(self.peers)]
        return self.group.submit(self.spec.name, method, calls).result()[:: self.peers]


@dataclass
class RolloutRole(Role):
    """Generates by engines that are each split over `workers_per_engine` neighbours in rank; the first gets rows."""

    workers_per_engine: int = 1

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        """Answers each row of `prompts` (column raw_prompt_ids); returns the columns of a rollout beside its own."""
        return join_rows(self._answers(self.shares(prompts, sampling, seed)))

    def shares(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> list[tuple]:
        """Deals out prompts, as many to each engine, or one more, as how long responses will be is not known."""
        parts = prompts.chunk_uneven(self.group.size // self.workers_per_engine // self.peers)
        no_rows = [prompts[0:0]] * (self.workers_per_engine - 1)
        first_rows, episodes = accumulate(map(len, parts), initial=0), are_episodes(prompts)
        engines = zip(parts, first_rows, strict=False)
        return [(rows, sampling, seed, first, episodes) for part, first in engines for rows in (part, *no_rows)]

    def _answers(self, shares: Sequence[tuple]) -> list[DataProto]:
        return self._deal("generate_sequences", shares)

    def update_weights(self, version: int) -> dict[str, float]:
        """Makes the engines sample from the actor's present weights, which have this number; returns the certificate
        that they do: rollout/weight_version, and, if it was probed, rollout/sync_max_logprob_diff."""
        certificates = self.all("update_weights", version)
        return {name: max(certificate[name] for certificate in certificates) for name in certificates[0]}


def roles_of(pools: Mapping[str, Group], config: Config) -> dict[str, Role]:
    """Makes the roles that the loop calls, one for each of `pools`, which names the group that plays it."""
    policy, peers = config.actor_rollout_ref, config.actor_rollout_ref.actor.peers
    specs = [ROLES[name] for name in pools]
    counts = {spec.name: peers if spec.like_policy else 1 for spec in specs}
    roles = {spec.name: Role(pools[spec.name], spec, counts[spec.name], reads=spec.reads(config)) for spec in specs}
    if "rollout" in roles:
        engine = load_rollout_class(policy.rollout.name)
        engine_peers = 1 if engine.own_weights else peers  # by the layers that are split
        parts = engine.workers_per_engine(policy.rollout)
        apart = policy.rollout.roles_apart
        kind = partial(find("pools", "rollout"), learners=pools["actor"]) if apart else RolloutRole
        roles["rollout"] = kind(pools["rollout"], ROLES["rollout"], engine_peers, parts)
    return roles


def distinct_groups(pools: Mapping[str, Group]) -> list[Group]:
    """Lists the groups behind some roles, each once."""
    return list({id(group): group for group in pools.values()}.values())


def check_shares(shares: Sequence[tuple], size: int) -> None:
    assert len(shares) == size, f"{len(shares)} shares for {size} workers: each gets one, if need be without rows"


def shares_of(
    batch: DataProto, count: int, objects: Sequence[str] = (), repeats_are_free: bool = True
) -> list[DataProto]:
    """Cuts the tensors of `batch`, and these columns of objects, into `count` shares of about equal work, in which a
    prompt like the row before's may be free."""
    mask = batch.batch["attention_mask"].clone()
    if repeats_are_free:
        mask[repeats_prompt(batch), : prompt_width(batch)] = 0
    workloads = [calculate_workload(tokens) for tokens in mask.sum(1).tolist()]
    inputs = batch.select(non_tensor_batch_keys=[*objects], meta_info_keys=[])
    return [inputs[rows] for rows in neighbour_shares(workloads, count)]
