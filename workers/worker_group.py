"""Where a worker runs: in this process, or as a Ray actor in a placement group. One interface, one behaviour.

`run(method, *args)` calls a method of the worker and returns its result; the roles of `training/roles.py` are thin
faces over it that say which method each verb is. One worker for now: the group is where more will go.
"""

import os
import re
from collections.abc import Callable
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
from data.protocol import DataProto
from workers.cpu import start_process
from workers.model_worker import ModelWorker

ROOT = Path(__file__).resolve().parents[1]
PLACEMENT_SECONDS = 60
COLOUR = re.compile(r"\x1b\[\d+m")


class WorkerGroup(Protocol):
    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        """`method(worker, *args)`, where the worker lives; an exception there is raised here."""

    def close(self) -> None:
        """Gives the worker's resources back."""


class LocalWorkerGroup:
    """The worker is an object of this process: no start-up, no serialisation, breakpoints work."""

    def __init__(self, n_threads: int, worker_class: type, *args: Any) -> None:
        start_process(n_threads)
        self.worker = worker_class(*args)

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        return method(self.worker, *args)

    def close(self) -> None:
        pass


class RayWorkerGroup:
    """The worker is a Ray actor with its CPUs and GPU reserved. Ray itself is started, and stopped by `close`, unless
    it runs already.

    Raises:
        ValueError: the cluster has less than is asked for; both figures are in the message.
    """

    def __init__(self, n_threads: int, n_gpus: int, worker_class: type, *args: Any) -> None:
        with ExitStack() as taken:  # given back if anything below fails
            if not ray.is_initialized():
                ray.init(include_dashboard=False)
                taken.callback(ray.shutdown)
            placement = reserve({"CPU": float(n_threads)} | ({"GPU": float(n_gpus)} if n_gpus else {}))
            taken.callback(remove_placement_group, placement)
            remote_class = ray.remote(
                num_cpus=n_threads,
                num_gpus=n_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement),
                runtime_env={"env_vars": worker_environment(n_threads)},
            )(RemoteWorker)
            self.worker = remote_class.remote(os.getcwd(), n_threads)
            taken.callback(ray.kill, self.worker)
            self._get(self.worker.build.remote(worker_class, *args))
            self.taken = taken.pop_all()

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        return self._get(self.worker.run.remote(method, *args))

    def _get(self, reference: ray.ObjectRef) -> Any:
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            # Its text is the worker's traceback, without the frames of Ray; ours here would only repeat it.
            raise WorkerError(f"worker rank 0 failed:\n{COLOUR.sub('', str(error))}") from None
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"worker rank 0 died: {error}. Its log is under /tmp/ray/session_latest/logs.") from error

    def close(self) -> None:
        self.taken.close()


def start_worker_group(config: Config, total_steps: int, with_ref: bool, with_critic: bool) -> WorkerGroup:
    """The run's worker, where trainer.executor says (null: in this process)."""
    n_threads, n_gpus = resources(config.trainer)
    arguments = (ModelWorker, config, total_steps, with_ref, with_critic)
    if config.trainer.executor == "ray":
        return RayWorkerGroup(n_threads, n_gpus, *arguments)
    return LocalWorkerGroup(n_threads, *arguments)


def resources(trainer: TrainerConfig) -> tuple[int, int]:
    """Threads and GPUs of the worker."""
    n_gpus = trainer.n_gpus_per_node if trainer.n_gpus_per_node is not None else int(torch.cuda.is_available())
    return trainer.n_threads or available_cores(), n_gpus


def worker_summary(trainer: TrainerConfig) -> str:
    """One line: where the worker runs, and on what."""
    n_threads, n_gpus = resources(trainer)
    where = "a Ray actor" if trainer.executor == "ray" else "this process"
    return f"the worker is {where}, with {n_threads} thread{'s'[: n_threads > 1]} and {n_gpus or 'no'} GPU."


class WorkerError(RuntimeError):
    """A worker failed; the message carries its rank and traceback."""


class RemoteWorker:
    """The Ray actor's body."""

    def __init__(self, working_directory: str, n_threads: int) -> None:
        if os.path.isdir(working_directory):
            os.chdir(working_directory)  # so that the user's relative paths mean the same here
        start_process(n_threads)

    def build(self, worker_class: type, *args: Any) -> None:
        self.worker = worker_class(*args)

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        return method(self.worker, *args)


def worker_environment(n_threads: int) -> dict[str, str]:
    """Environment of every worker process: our modules on the path, and one pool of threads of the asked size."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": str(n_threads), **VARIABLES}


def reserve(asked: dict[str, float]) -> PlacementGroup:
    """A placement group of one bundle.

    Raises:
        ValueError: the cluster does not have it, or others do not free it in time.
    """
    check_resources(asked, ray.cluster_resources())
    placement = placement_group([asked])
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
            f"asked Ray for {missing}, the cluster has {has}. "
            "Lower trainer.n_threads / trainer.n_gpus_per_node / trainer.nnodes, or add nodes with `ray start`."
        )


@dataclass
class RolloutRole:
    group: WorkerGroup

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        return self.group.run(ModelWorker.generate_sequences, prompts)

    def update_weights(self, step: int) -> None:
        self.group.run(ModelWorker.update_weights, step)


@dataclass
class ActorRole:
    group: WorkerGroup

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return self.group.run(ModelWorker.compute_log_prob, batch)

    def update_policy(self, batch: DataProto) -> dict[str, float]:
        return self.group.run(ModelWorker.update_policy, batch)

    def save(self, folder: Path) -> None:
        self.group.run(ModelWorker.save_actor, folder)

    def load(self, folder: Path) -> None:
        self.group.run(ModelWorker.load_actor, folder)


@dataclass
class ReferenceRole:
    group: WorkerGroup

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return self.group.run(ModelWorker.compute_ref_log_prob, batch)


@dataclass
class CriticRole:
    group: WorkerGroup

    def compute_values(self, batch: DataProto) -> DataProto:
        return self.group.run(ModelWorker.compute_values, batch)

    def update_critic(self, batch: DataProto) -> dict[str, float]:
        return self.group.run(ModelWorker.update_critic, batch)

    def save(self, folder: Path) -> None:
        self.group.run(ModelWorker.save_critic, folder)

    def load(self, folder: Path) -> None:
        self.group.run(ModelWorker.load_critic, folder)
