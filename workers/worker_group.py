"""Where the workers run: one in this process, or any number as Ray actors in a placement group. One interface, one
behaviour.

`run` has every worker do the same; `map` gives each its share. The roles of `workers/roles.py` are thin faces over the
two that say which method each verb is, and who gets what.
"""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.process import VARIABLES, available_cores
from configs.schema import Config, TrainerConfig
from workers.collectives import connect, join_group, open_store
from workers.kernels import start_process
from workers.model_worker import ModelWorker

ROOT = Path(__file__).resolve().parents[1]
PLACEMENT_SECONDS = 60
DEATH_SECONDS = 3  # in which Ray has noticed that a process is gone
COLOUR = re.compile(r"\x1b\[\d+m")


@dataclass(frozen=True)
class Resources:
    """So many workers, with so many CPU threads and GPUs each."""

    workers: int
    threads: int
    gpus: int

    @classmethod
    def of(cls, trainer: TrainerConfig) -> "Resources":
        gpus = trainer.n_gpus_per_node if trainer.n_gpus_per_node is not None else int(torch.cuda.is_available())
        workers_a_node = gpus or trainer.n_workers_per_node
        threads = trainer.n_threads or max(1, available_cores() // workers_a_node)
        return cls(trainer.nnodes * workers_a_node, threads, min(gpus, 1))

    def bundle(self) -> dict[str, float]:
        """What Ray reserves for one worker."""
        return {"CPU": float(self.threads)} | ({"GPU": float(self.gpus)} if self.gpus else {})


class WorkerGroup(Protocol):
    """`size` workers, called by rank; an exception in any of them is raised here."""

    size: int

    def run(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """`method(worker, *args)` of every worker."""

    def map(self, method: Callable[[Any, Any], Any], shares: Sequence[Any]) -> list[Any]:
        """`method(worker, share)` of the first workers, each with its share."""

    def close(self) -> None:
        """Gives the workers' resources back."""


class LocalWorkerGroup:
    """The one worker is an object of this process: no start-up, no serialisation, breakpoints work."""

    size = 1

    def __init__(self, n_threads: int, worker_class: type, *args: Any) -> None:
        torch.set_num_threads(n_threads)
        self.worker = worker_class(*args)

    def run(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [method(self.worker, *args)]

    def map(self, method: Callable[[Any, Any], Any], shares: Sequence[Any]) -> list[Any]:
        return [method(self.worker, share) for share in shares]

    def close(self) -> None:
        pass


class RayWorkerGroup:
    """Every worker is a Ray actor with its CPUs and GPU reserved, and knows the others by torch.distributed. Ray itself
    is started, and stopped by `close`, unless it runs already.

    Raises:
        ValueError: the cluster has less than is asked for; both figures are in the message.
    """

    def __init__(self, resources: Resources, worker_class: type, *args: Any, kernels: str = "auto") -> None:
        self.size = resources.workers
        with ExitStack() as taken:  # given back if anything below fails
            if not ray.is_initialized():
                ray.init(include_dashboard=False)
                taken.callback(ray.shutdown)
            placement = reserve(resources)
            taken.callback(remove_placement_group, placement)
            self.workers = []
            for place in range(self.size):
                worker = remote_class(resources, placement, place).remote(os.getcwd(), resources.threads, kernels)
                taken.callback(ray.kill, worker)
                self.workers.append(worker)
            if self.size > 1:
                [address] = self._results([self.workers[0].open_store.remote(self.size)])
                joined = enumerate(self.workers)
                self._results([worker.join.remote(address, place, self.size) for place, worker in joined])
            self._results([worker.build.remote(worker_class, *args) for worker in self.workers])
            self.taken = taken.pop_all()

    def run(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self._results([worker.run.remote(method, *args) for worker in self.workers])

    def map(self, method: Callable[[Any, Any], Any], shares: Sequence[Any]) -> list[Any]:
        assert len(shares) <= self.size, f"{len(shares)} shares for {self.size} workers"
        return self._results([self.workers[place].run.remote(method, share) for place, share in enumerate(shares)])

    def _results(self, calls: list[ray.ObjectRef]) -> list[Any]:
        """By rank. The first failure ends the wait, as the others may wait for the rank that failed."""
        results, pending = {}, calls
        while pending:
            [done], pending = ray.wait(pending)
            place = calls.index(done)
            try:
                results[place] = ray.get(done)
            except ray.exceptions.RayActorError as error:
                raise self._death(place, error) from error
            except ray.exceptions.RayTaskError as error:
                self._look_for_deaths(calls)
                # Its text is the worker's traceback, without the frames of Ray; ours here would only repeat it.
                raise WorkerError(f"worker rank {place} failed:\n{COLOUR.sub('', str(error))}") from None
        return [results[place] for place in range(len(calls))]

    def _look_for_deaths(self, calls: list[ray.ObjectRef]) -> None:
        """What failed may have failed because another rank is gone, which Ray notices a little later."""
        ended, _ = ray.wait(calls, num_returns=len(calls), timeout=DEATH_SECONDS if len(calls) > 1 else 0)
        for call in ended:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError as error:
                raise self._death(calls.index(call), error) from None
            except ray.exceptions.RayTaskError:
                continue

    @staticmethod
    def _death(place: int, error: Exception) -> "WorkerError":
        return WorkerError(f"worker rank {place} died: {error}. Its log is under /tmp/ray/session_latest/logs.")

    def close(self) -> None:
        self.taken.close()


def start_worker_group(config: Config, total_steps: int, with_ref: bool, with_critic: bool) -> WorkerGroup:
    """The run's workers, where trainer.executor says (null: one worker in this process, several as Ray actors)."""
    resources = Resources.of(config.trainer)
    arguments = (ModelWorker, config, total_steps, with_ref, with_critic)
    if uses_ray(config.trainer):
        return RayWorkerGroup(resources, *arguments, kernels=config.actor_rollout_ref.model.kernels)
    return LocalWorkerGroup(resources.threads, *arguments)


def start_command(config: Config) -> None:
    """Makes this process the worker's, if that is where the run's worker is. For commands, whose process it is."""
    if not uses_ray(config.trainer):
        start_process(Resources.of(config.trainer).threads, config.actor_rollout_ref.model.kernels)


def uses_ray(trainer: TrainerConfig) -> bool:
    return trainer.executor == "ray" or Resources.of(trainer).workers > 1


def worker_summary(trainer: TrainerConfig) -> str:
    """One line: where the workers run, and on what."""
    resources = Resources.of(trainer)
    having = f"with {resources.threads} thread{'s'[: resources.threads > 1]} and {resources.gpus or 'no'} GPU"
    if resources.workers > 1:
        return (
            f"{resources.workers} workers are Ray actors, {having} each: all hold the whole model, and each takes a "
            "share of every batch."
        )
    return f"the worker is {'a Ray actor' if uses_ray(trainer) else 'this process'}, {having}."


class WorkerError(RuntimeError):
    """A worker failed; the message carries its rank and traceback."""


class RemoteWorker:
    """The Ray actor's body."""

    def __init__(self, working_directory: str, n_threads: int, kernels: str) -> None:
        if os.path.isdir(working_directory):
            os.chdir(working_directory)  # so that the user's relative paths mean the same here
        start_process(n_threads, kernels)

    def open_store(self, size: int) -> tuple[str, int]:
        """Rank 0's: the address at which the others find it."""
        self.store = open_store(ray.util.get_node_ip_address(), size)
        return self.store.host, self.store.port

    def join(self, address: tuple[str, int], rank: int, size: int) -> None:
        join_group(self.store if rank == 0 else connect(*address, size), rank, size)

    def build(self, worker_class: type, *args: Any) -> None:
        self.worker = worker_class(*args)

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        return method(self.worker, *args)


def remote_class(resources: Resources, placement: PlacementGroup, place: int) -> Any:
    """`RemoteWorker` as an actor in this place of the group."""
    return ray.remote(
        num_cpus=resources.threads,
        num_gpus=resources.gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=place),
        runtime_env={"env_vars": worker_environment(resources.threads)},
    )(RemoteWorker)


def worker_environment(n_threads: int) -> dict[str, str]:
    """Environment of every worker process: our modules on the path, and one pool of threads of the asked size."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": str(n_threads), **VARIABLES}


def reserve(resources: Resources) -> PlacementGroup:
    """A placement group of one bundle a worker.

    Raises:
        ValueError: the cluster does not have it, or others do not free it in time.
    """
    bundles = [resources.bundle()] * resources.workers
    asked = {name: resources.workers * amount for name, amount in resources.bundle().items()}
    check_resources(asked, ray.cluster_resources())
    placement = placement_group(bundles)
    if not placement.wait(PLACEMENT_SECONDS):
        remove_placement_group(placement)
        raise ValueError(
            f"the Ray cluster has {asked} but did not free it within {PLACEMENT_SECONDS} s; "
            f"available now: {ray.available_resources()}. Stop other jobs or ask for less (trainer.n_threads)."
        )
    return placement


def check_resources(asked: dict[str, float], present: dict[str, float]) -> None:
    missing = {name: amount for name, amount in asked.items() if present.get(name, 0) < amount}
    if missing:
        has = {name: present.get(name, 0) for name in missing}
        raise ValueError(
            f"asked Ray for {missing}, the cluster has {has}. Lower trainer.n_threads / trainer.n_workers_per_node / "
            "trainer.n_gpus_per_node / trainer.nnodes, or add nodes with `ray start`."
        )
