"""Generates in a pool of workers of its own. The weights of each step go there from the trainer's first worker, tensor
by tensor, by torch.distributed: never through the driver, and never all of them at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.process import worker_threads
from configs.schema import Config
from configs.settings import with_settings
from workers.collectives import connect, open_store, rank
from workers.group import Group, RolloutRole
from workers.model_worker import ModelWorker
from workers.ray_group import RayPending, store_host


def split(config: Config, roles: Sequence[str]) -> list[tuple[Config, list[str]]]:
    """Lists the trainer's pool and that of the rollout, each as the settings of a run on its workers, and its roles."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    gpus = trainer.n_gpus_per_node if rollout.n_gpus_per_node is None else rollout.n_gpus_per_node
    workers = (trainer.n_gpus_per_node or trainer.n_workers_per_node) + (gpus or rollout.n_workers_per_node)
    threads = worker_threads(trainer.n_threads, workers).number
    both = with_settings(config, {"trainer.executor": "ray", "trainer.n_threads": threads})
    counts = {f"trainer.{name}": rollout[name] for name in ("nnodes", "n_workers_per_node")}
    counts["trainer.n_gpus_per_node"] = gpus
    apart = [role for role in roles if role in rollout.roles_apart]
    return [(both, [role for role in roles if role not in apart]), (with_settings(both, counts), apart)]


@dataclass
class ApartRollout(RolloutRole):
    """Generates in a pool of its own, by the weights of `learners`, the trainer's."""

    learners: Group | None = None
    is_linked: bool = False

    def link(self) -> None:
        """Joins the first learner and all workers of this pool."""
        alone = not any(host for group in (self.learners, self.group) for _, host in group.processes)  # on one machine
        wire = [(1 + self.group.size, alone)] * self.learners.size
        address = self.learners.submit("sender", "open", wire).result()[0]
        ends = [(address, index + 1, 1 + self.group.size) for index in range(self.group.size)]
        self.together("join", "receiver", "join", ends)
        self.is_linked = True

    def together(self, method: str, role: str, role_method: str, shares: Sequence[tuple]) -> tuple[list, list]:
        """Calls both ends of the wire, each of which waits for the other: the senders, and `role` in this pool."""
        sending = self.learners.submit("sender", method, [()] * self.learners.size)
        taking = self.group.submit(role, role_method, shares)
        answers = RayPending(sending.calls + taking.calls, sending.wait.beside(taking.wait)).result()
        return answers[: self.learners.size], answers[self.learners.size :]

    def move_weights(self, role: str, method: str, *arguments: Any) -> list[Any]:
        """Sends the weights of the learners to `role`; returns what else it answers than the sum of their bits."""
        if not self.is_linked:
            self.link()
        [sent, *_], answers = self.together("move", role, method, [arguments] * self.group.size)
        received, results = zip(*answers, strict=True)
        assert {*received} == {sent}, f"weights of bits {sent} were sent, and {received} came"
        return [*results]

    def update_weights(self, version: int) -> dict[str, float]:
        self.move_weights("receiver", "move")
        return super().update_weights(version)


class WireEnd:
    """Sends or receives the weights that are trained: rank 0 of the wire is the trainer's first worker."""

    def __init__(self, worker: ModelWorker) -> None:
        self.policy = worker.policy
        self.timeout = timedelta(seconds=worker.config.actor_rollout_ref.nccl_timeout)

    def connect(self, store: dist.Store, place: int, size: int) -> None:
        """Makes this process number `place` on the wire of `size`."""
        kind = dist.ProcessGroupNCCL if self.policy.device.type == "cuda" else dist.ProcessGroupGloo
        self.wire = kind(store, place, size, self.timeout)

    def broadcast(self, tensor: Tensor) -> int:
        """Sends a tensor, or fills it with what is sent; returns the sum of its bits."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.wire.broadcast([tensor], options).wait()
        return int(tensor.flatten().view(torch.int16).sum(dtype=torch.int64))

    def trained_weights(self) -> Iterator[nn.Parameter]:
        return (weight for weight in self.policy.module.parameters() if weight.requires_grad)


class Sender(WireEnd):
    """The end of the trainer's workers: all of them gather each weight, and the first sends it."""

    def open(self, size: int, alone: bool) -> tuple[str, int] | None:
        """Opens the store of a wire of `size` ends on the first worker; returns its address. `alone`: all ends are on
        this machine."""
        if rank() > 0:
            return None
        self.size, self.store = size, open_store(store_host(alone), size)
        return self.store.host, self.store.port

    def join(self) -> None:
        if rank() == 0:
            self.connect(self.store, 0, self.size)

    @torch.no_grad()
    def move(self) -> int:
        """Sends the weights; returns the sum of their bits."""
        bits, parallel = 0, self.policy.parallel
        with self.policy.on_device():
            for weight in self.trained_weights():
                full = parallel.full(weight.detach())
                if rank() == 0:
                    bits += self.broadcast(full.contiguous())
        return bits


class Receiver(WireEnd):
    """The end of the workers that generate: each takes its part of every weight."""

    def join(self, address: tuple[str, int], place: int, size: int) -> None:
        self.connect(connect(*address, size), place, size)

    @torch.no_grad()
    def move(self) -> tuple[int, None]:
        """Takes the weights that are sent; returns the sum of their bits."""
        bits, policy = 0, self.policy
        with policy.on_device():
            for weight in self.trained_weights():
                full = torch.empty(weight.shape, dtype=weight.dtype, device=policy.device)
                bits += self.broadcast(full)
                weight.copy_(policy.parallel.part(full, weight))
        return bits, None
