"""Runs any number of workers as Ray actors.

The interface that they share with a worker in this process is workers/group.py.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import Any
from uuid import uuid4

import torch

from configs.errors import ConfigError, MayPass, WorkerError, WorkerLost, notice_once, warns_of_close
from configs.import_utils import find
from configs.process import VARIABLES, children_apart
from configs.schema import Config, ModelConfig, RunConfig
from data.files import locked
from data.seeding import derive_seed, seed_everything
from workers.collectives import TIMEOUT, connect, join_group, open_store
from workers.deadlines import BEAT_SECONDS, Beat, Progress, Wait, describe_process, stacks
from workers.forward import forward_of
from workers.group import Group, LocalGroup, check_shares
from workers.model_worker import ModelWorker
from workers.models import gpu_trouble, rocm_notice
from workers.parallel import layout_of
from workers.resources import Resources, joins_cluster, reserve, resources_line
from workers.rollout import load_rollout_class
from workers.upstream import ray, ray_store

ROOT = Path(__file__).resolve().parents[1]
CLOSE_SECONDS = 5  # in which workers close what they hold; then they are killed
DEATH_SECONDS = 3  # in which Ray notices that a process is gone
WAITED = "Timed out waiting"  # gloo's words
COLOUR = re.compile(r"\x1b\[\d+m")
PLAIN_MODEL = ModelConfig()


class RayWorkerGroup:
    """Runs every worker as a Ray actor with its CPUs and GPU reserved, joined by torch.distributed. Ray itself is
    started, and stopped by `close`, unless it runs already. Ranks go by machine: the first ones share the first.

    Args:
        timeout: seconds for which a rank waits for the others, in each exchange.
        seed: of the workers' global generators; each has its own.
        folder: has to be seen by every machine, if it is given.
        stall_timeout: seconds for which a call waits for workers that get no further; None: any.

    Raises:
        ConfigError: the cluster has less than is asked for, or a machine does not see the folder.
    """

    def __init__(
        self,
        resources: Resources,
        worker_class: type,
        *args: Any,
        model: ModelConfig = PLAIN_MODEL,
        timeout: int = TIMEOUT,
        seed: int = 0,
        folder: Path | None = None,
        stall_timeout: float | None = None,
    ) -> None:
        self.size, self.stall_timeout, self.name = resources.workers, stall_timeout, uuid4().hex
        with ExitStack() as cleanup:  # given back if anything below fails
            if not ray.is_initialized():
                cleanup.callback(ray.shutdown)
                if not joins_cluster():
                    with children_apart():
                        ray.init(address="local", include_dashboard=False)
            placement = reserve(resources)
            cleanup.callback(ray.util.remove_placement_group, placement)
            cleanup.callback(ray_store().delete, self.name, del_by_prefix=True)
            self.workers, self.processes = [], []
            if folder and len(ray.nodes()) > 1:
                self._check_is_shared(folder, placement)
            for index in range(self.size):
                settings = os.getcwd(), resources.threads, model, derive_seed(seed, "process", index)
                self.workers.append(remote_class(resources, placement, index).remote(*settings, f"{self.name}/{index}"))
                cleanup.callback(ray.kill, self.workers[-1])
            ip = ray.util.get_node_ip_address()
            self.processes = self._wait("start", [worker.pid_and_host.remote(ip) for worker in self.workers])
            if self.size > 1:
                alone = resources.nodes == 1  # on a machine
                [address] = self._wait("open_store", [self.workers[0].open_store.remote(self.size, alone)])
                ranks = enumerate(self.workers)
                self._wait("join", [worker.join.remote(address, rank, self.size, timeout) for rank, worker in ranks])
            self._wait("build", [worker.build.remote(worker_class, *args) for worker in self.workers])
            self.cleanup = cleanup.pop_all()

    def _check_is_shared(self, folder: Path, placement: Any) -> None:
        """Raises ConfigError if a machine of the group does not see what the driver writes into `folder`. The tasks
        that look import nothing of ours, so they end long before a worker would have started."""
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        bundles = ray.util.placement_group_table(placement)["bundles_to_node_id"]
        strategies = [bundle_of(placement, index) for index in bundles]
        with NamedTemporaryFile(dir=folder, prefix=".seen_") as new:
            tasks = [ray.remote(num_cpus=0, scheduling_strategy=strategy)(os.path.exists) for strategy in strategies]
            answers = self._wait("look", [task.remote(new.name) for task in tasks])
        if blind := [hosts[node] for node, sees in zip(bundles.values(), answers, strict=True) if not sees]:
            raise ConfigError(f"trainer.default_local_dir: {blind} do not see {folder}: name a shared disk.")

    def submit(self, role: str, method: str, shares: Sequence[tuple]) -> "RayPending":
        check_shares(shares, self.size)
        calls = [worker.call.remote(role, method, share) for worker, share in zip(self.workers, shares, strict=True)]
        return RayPending(calls, self.wait_for(f"{role}.{method}"))

    def wait_for(self, verb: str) -> Wait:
        """Makes what watches over the workers while something is waited for."""
        return Wait(verb, self.processes, self._newest_beat, self.stall_timeout)

    def _newest_beat(self, rank: int) -> Beat | None:
        text = ray_store().get(f"{self.name}/{rank}")
        return Beat(*json.loads(text)) if text else None

    def _wait(self, verb: str, calls: list[Any]) -> list[Any]:
        return RayPending(calls, self.wait_for(verb)).result()

    def close(self) -> None:
        """Has every worker close what it holds, environments and engines, and ends them."""
        calls = [worker.close.remote() for worker in self.workers]
        for call in ray.wait(calls, num_returns=len(calls), timeout=CLOSE_SECONDS)[0]:
            with warns_of_close("a worker"), suppress(ray.exceptions.RayActorError):  # one that died holds nothing
                ray.get(call)
        self.cleanup.close()


@dataclass(frozen=True)
class RayPending:
    """The `Pending` of calls to Ray actors, in the order of their ranks."""

    calls: list[Any]
    wait: Wait

    def result(self) -> list[Any]:
        """Waits for all answers, by rank; raises the ConfigError of a worker, or WorkerError where one failed or died.
        The first failure ends the wait: others may wait for the rank that failed; so does Wait.check.
        """
        results, pending = {}, self.calls
        with self.wait as wait:
            while pending:
                wait.late = [self.calls.index(call) for call in pending]
                ended, pending = ray.wait(pending, timeout=BEAT_SECONDS)
                if not ended:
                    wait.check()
                    continue
                [call] = ended
                rank = self.calls.index(call)
                try:
                    results[rank] = ray.get(call)
                except ray.exceptions.RayActorError as error:
                    raise self._death(rank, error) from None
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, ConfigError):
                        raise error.cause from None
                    self._look_for_deaths()
                    text = COLOUR.sub("", str(error))  # it has the worker's traceback, so ours is left out
                    kind = WorkerLost if WAITED in text or isinstance(error.cause, MayPass) else WorkerError
                    raise kind(f"worker {self.wait.name(rank)} failed:\n{text}{self._missing(text)}") from None
        return [results[rank] for rank in range(len(self.calls))]

    def _busy(self) -> list[int]:
        """Lists the ranks that have not answered."""
        return [self.calls.index(call) for call in ray.wait(self.calls, num_returns=len(self.calls), timeout=0)[1]]

    def _look_for_deaths(self) -> None:
        """Raises if another rank is gone, which may be why this one failed: Ray notices it a little later."""
        seconds = DEATH_SECONDS if len(self.calls) > 1 else 0
        for call in ray.wait(self.calls, num_returns=len(self.calls), timeout=seconds)[0]:
            try:
                with suppress(ray.exceptions.RayTaskError):
                    ray.get(call)
            except ray.exceptions.RayActorError as error:
                raise self._death(self.calls.index(call), error) from None

    def _missing(self, text: str) -> str:
        """Names the ranks that still do something else, where `text` is of one that has waited in vain."""
        if WAITED not in text:
            return ""
        late = ", ".join(map(self.wait.name, self._busy()))
        return f"\nIt waited actor_rollout_ref.nccl_timeout seconds; {late} have not come. If slow, raise it."

    def _death(self, rank: int, error: Exception) -> WorkerLost:
        session = ray.get_runtime_context()
        logs = f"{session.get_temp_dir()}/{session.get_session_name()}/logs"
        process = "".join(f" ({describe_process(*ids)})" for ids in self.wait.processes[rank : rank + 1])
        cause = " ".join(line for line in str(error).splitlines() if line[:1] != "\t").rstrip(".")  # those are numbers
        name = self.wait.name(rank) + process
        return WorkerLost(f"worker {name} died in {self.wait.verb}: {cause}. Its log is there, under {logs}.")


def start_pools(config: Config, total_steps: int, roles: Sequence[str]) -> dict[str, Group]:
    """Starts the workers that play each of `roles`, where trainer.executor says."""
    check_machine(config)
    groups: dict[str, Group] = {}
    with ExitStack() as started:  # closed if a later pool cannot start
        for pool, played in pools_of(config, roles):
            group = start_workers(pool, ModelWorker, pool, total_steps, tuple(played))
            started.callback(group.close)
            groups |= dict.fromkeys(played, group)
        started.pop_all()
    return {role: groups[role] for role in roles}


def pools_of(config: Config, roles: Sequence[str] = ("actor", "rollout")) -> list[tuple[Config, list[str]]]:
    """Lists the pools of workers of a run: its settings with the pool's counts as trainer's, and who plays there."""
    if config.actor_rollout_ref.rollout.roles_apart:
        return find("pools", "split")(config, roles)
    return [(config, list(roles))]


def start_workers(config: Config, worker_class: type, *args: Any) -> Group:
    """Starts as many `worker_class(*args)` as trainer has workers, where trainer.executor says."""
    resources = Resources.from_config(config.trainer)
    if uses_ray(config.trainer):
        settings = {"timeout": config.actor_rollout_ref.nccl_timeout, "seed": config.trainer.seed}
        settings["stall_timeout"] = config.trainer.stall_timeout
        if (folder := Path(config.trainer.default_local_dir)) in locked:  # this run writes there
            settings["folder"] = folder.resolve()
        return RayWorkerGroup(resources, worker_class, *args, model=config.actor_rollout_ref.model, **settings)
    return LocalGroup(resources.threads, worker_class, *args)


def start_process(n_threads: int, model: ModelConfig) -> None:
    """Sets up a process that is ours alone, for the run's models."""
    torch.set_num_threads(n_threads)
    forward_of(model).start_process()


def check_machine(config: Config) -> None:
    """Raises ValueError where there are fewer GPUs or cores than `config` asks for, here or in the Ray cluster, or
    where layout or engine cannot work by its settings; a notice tells of a GPU that torch cannot use."""
    if (copies := int(os.environ.get("WORLD_SIZE", 1))) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            f"torchrun starts {copies} of this command, each of which would be a run: start it once, by python, with "
            f"trainer.n_gpus_per_node or, on CPUs, n_workers_per_node={copies}; it starts the workers itself."
        )
    for pool, roles in pools_of(config):
        resources = Resources.from_config(pool.trainer)
        layout_of(pool, resources.workers).check(pool, resources.workers)
        if "rollout" in roles:
            rollout = pool.actor_rollout_ref.rollout
            load_rollout_class(rollout.name).check(rollout, resources.workers_a_node, resources.gpus)
    worker_summary(config)  # or raises
    if config.trainer.n_gpus_per_node is None and (problem := gpu_trouble()):
        notice_once(f"{problem} This run uses the CPU; trainer.n_gpus_per_node=0 says that it is meant to.")
    if config.trainer.n_gpus_per_node != 0 and (text := rocm_notice()):
        notice_once(text)


def start_command(config: Config) -> None:
    """Makes this process the worker's, if that is where the run's worker is. For commands, whose process it is."""
    if not uses_ray(config.trainer):
        start_process(Resources.from_config(config.trainer).threads, config.actor_rollout_ref.model)


def uses_ray(trainer: RunConfig) -> bool:
    return trainer.executor == "ray" or Resources.from_config(trainer).workers > 1


def worker_summary(config: Config) -> str:
    """Says in a line what the run's workers ask for, and what is there; raises ConfigError where that is less."""
    pools = [pool.trainer for pool, _ in pools_of(config)]
    on_ray = any(map(uses_ray, pools))
    return resources_line([*map(Resources.from_config, pools)], on_ray, config.trainer.default_local_dir)


class RemoteWorker:
    """The Ray actor's body."""

    def __init__(self, working_directory: str, n_threads: int, model: ModelConfig, seed: int, beats: str) -> None:
        Thread(target=send_beats, args=(beats,), daemon=True).start()
        if os.path.isdir(working_directory):
            os.chdir(working_directory)  # so that the user's relative paths mean the same here
        start_process(n_threads, model)
        seed_everything(seed)

    def pid_and_host(self, driver: str) -> tuple[int, str]:
        """Returns this process, and its machine's address if the driver's is another."""
        host = ray.util.get_node_ip_address()
        return os.getpid(), "" if host == driver else host

    def open_store(self, size: int, alone: bool) -> tuple[str, int]:
        """Opens the store, on rank 0; returns where the others find it: on this machine, where it is `alone`."""
        self.store = open_store(store_host(alone), size)
        return self.store.host, self.store.port

    def join(self, address: tuple[str, int], rank: int, size: int, timeout: int) -> None:
        join_group(self.store if rank == 0 else connect(*address, size), rank, size, timeout)

    def build(self, worker_class: type, *args: Any) -> None:
        self.worker = worker_class(*args)

    def close(self) -> None:
        self.worker.close()

    def call(self, role: str, method: str, share: tuple) -> Any:
        return getattr(self.worker.roles[role], method)(*share)


def send_beats(key: str) -> None:
    """Tells the driver, by Ray's own store, that this process lives, what it has done, and where it is if that is no
    more than before: also while the thread that works is stuck."""
    for number in count():
        before = Progress.done
        time.sleep(BEAT_SECONDS)
        beat = number, Progress.done, stacks() if Progress.done == before else ""
        ray_store().put(key, json.dumps(beat))


def store_host(alone: bool) -> str:
    """Returns the address at which a store of this process is found, on this machine where it is `alone`."""
    return "127.0.0.1" if alone else ray.util.get_node_ip_address()


def remote_class(resources: Resources, placement: Any, index: int) -> Any:
    """Makes `RemoteWorker` the actor of rank `index` of the group."""
    return ray.remote(
        num_cpus=resources.threads,
        num_gpus=resources.gpus,
        scheduling_strategy=bundle_of(placement, index // resources.workers_a_node),
        runtime_env={"env_vars": worker_environment(resources.threads)},
    )(RemoteWorker)


def bundle_of(placement: Any, index: int) -> Any:
    """Has Ray place something on the machine of one bundle of a placement group."""
    return ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(placement, index)


def worker_environment(n_threads: int) -> dict[str, str]:
    """Makes the environment of every worker process: our modules on the path, one pool of threads of that size, and
    its own GPU alone, even where Ray is told to show all."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(n_threads),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
        **VARIABLES,
    }
