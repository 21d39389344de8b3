"""Says what the workers of a run ask for and what the machines have, and reserves it in the Ray cluster."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from configs.checks import plural
from configs.errors import ConfigError, first_line, notice, notice_once
from configs.process import Threads, available_cores, children_apart, memory_and_disk, worker_threads
from configs.schema import RunConfig
from workers.collectives import check_speaks_http2
from workers.models import gpu_trouble
from workers.upstream import ray, ray_address_file, take_ray_token

PLACEMENT_SECONDS = 60  # for others to free what is asked for; between two lines about it
KINDS = "CPU", "GPU"  # of what Ray reserves


@dataclass(frozen=True)
class Resources:
    """Counts workers and machines, and the CPU threads and GPUs that each worker has."""

    workers: int
    threads: int
    gpus: int
    nodes: int = 1
    threads_from: str = field(default="", compare=False)  # where their number comes from
    patience: float = field(default=0.0, compare=False)  # seconds to wait for machines that the cluster lacks

    @classmethod
    def from_config(cls, trainer: RunConfig) -> "Resources":
        gpus = trainer.n_gpus_per_node if trainer.n_gpus_per_node is not None else int(torch.cuda.is_available())
        workers_a_node, nodes = gpus or trainer.n_workers_per_node, trainer.nnodes
        threads = worker_threads(trainer.n_threads, workers_a_node)
        return cls(nodes * workers_a_node, threads.number, min(gpus, 1), nodes, threads.origin, trainer.patience)

    def __str__(self) -> str:
        worker = f"{Threads(self.threads, self.threads_from)}, {self.gpus or 'no'} GPU"
        return f"{plural(self.workers, 'worker')} × ({worker}) on {plural(self.nodes, 'machine')}"

    @property
    def workers_a_node(self) -> int:
        return self.workers // self.nodes

    def bundle(self) -> dict[str, float]:
        """Lists the resources that Ray reserves on one machine, for all its workers."""
        cpus, gpus = float(self.workers_a_node * self.threads), float(self.workers_a_node * self.gpus)
        return {"CPU": cpus} | ({"GPU": gpus} if gpus else {})


def reserve(resources: Resources) -> Any:
    """Reserves a placement group of one bundle a machine, on machines apart where there are as many; raises ConfigError
    if the cluster does not have it, or others do not free it in time."""
    line, waited = resources_line([resources], on_ray=True), 0.0
    placement = ray.util.placement_group([resources.bundle()] * resources.nodes, strategy="SPREAD")
    while not placement.wait(PLACEMENT_SECONDS):
        waited += PLACEMENT_SECONDS
        line = f"{resources_line([resources], on_ray=True)}: not there, or not free, for {waited:.0f} s."
        if waited >= resources.patience:
            ray.util.remove_placement_group(placement)
            raise ConfigError(f"{line} Stop other jobs, or lower trainer.n_threads.", "trainer.n_threads")
        notice(line)
    if (joined := len(machines())) < resources.nodes:
        notice(f"workers of {resources.nodes} machines run on {joined}: no more have joined Ray (docs/cluster.md).")
    return placement


def resources_line(pools: Sequence[Resources], on_ray: bool, folder: str = ".") -> str:
    """Says in a line what `pools` of workers ask for, and what is there: on this machine, or in the cluster that a run
    `on_ray` joins; what is too little has a ✗, and is refused by that line, unless there is patience for machines."""
    joined = on_ray and joins_cluster()
    present = machines() if joined else [{"CPU": available_cores()[0], "GPU": torch.cuda.device_count()}]
    marks = dict.fromkeys(KINDS, "") | dict.fromkeys(lacking(pools, present, on_ray), "✗ ")
    texts = Counter(", ".join(f"{marks[key]}{machine.get(key, 0):g} {key}" for key in KINDS) for machine in present)
    available = " + ".join(f"{plural(count, 'machine')} × ({text})" for text, count in texts.items())
    if joined:
        free = ", ".join(f"{ray.available_resources().get(name, 0):g} {name}" for name in KINDS)
        available = f"Ray at {ray.get_runtime_context().gcs_address}, {available}, free: {free}"
    requested = f"{' and '.join(map(str, pools))}, {'Ray actors' if on_ray else 'this process'}"
    line = f"asked: {requested} · there: {available}; here {memory_and_disk(folder)}"
    if "✗" in line and not (joined and any(pool.patience for pool in pools)):
        remedy = "Lower trainer.n_threads, n_workers_per_node, n_gpus_per_node or nnodes, or `ray start` machines."
        raise ConfigError(f"{line}. {remedy} {gpu_trouble() or ''}".strip(), "trainer.n_workers_per_node")
    return line


def lacking(pools: Sequence[Resources], present: Sequence[dict[str, float]], on_ray: bool) -> list[str]:
    """Names what the machines `present` have too little of for the bundles of all pools; only Ray reserves cores."""
    names, free = KINDS if on_ray else ["GPU"], [dict.fromkeys(KINDS, 0.0) | machine for machine in present]
    bundles = [dict.fromkeys(KINDS, 0.0) | pool.bundle() for pool in pools for _ in range(pool.nodes)]
    for bundle in sorted(bundles, key=lambda amounts: (amounts["GPU"], amounts["CPU"]), reverse=True):
        fitting = [machine for machine in free if all(machine[name] >= bundle[name] for name in names)]
        if not fitting:
            return [name for name in names if max(machine[name] for machine in free) < bundle[name]] or [*names]
        tightest = min(fitting, key=lambda amounts: (amounts["GPU"], amounts["CPU"]))
        tightest.update({name: tightest[name] - bundle[name] for name in names})
    return []


def joins_cluster() -> bool:
    """Connects this process to the Ray cluster that RAY_ADDRESS or `ray start` names, if one does, and says so: others
    that run here are other people's. Raises ConfigError if it is not there."""
    address, origin, file = os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS", ray_address_file()
    if address in ("", "auto") and file.is_file():
        address, origin = file.read_text().strip(), f"{file}, of user {file.stat().st_uid}"
    if ray.is_initialized() or address in ("", "auto", "local"):
        return ray.is_initialized()
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "/" not in host:  # for a wrong one Ray takes minutes
            check_speaks_http2(host.strip("[]"), int(port))
        take_ray_token()
        with children_apart():
            ray.init(address=address)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{origin}: no Ray cluster answers at {address} ({first_line(error)}). `ray start` it, or set RAY_ADDRESS "
            "to another, or to local, which starts one for this run."
        ) from error
    notice_once(f"this run joins the Ray cluster at {address}, which {origin} names.")
    return True


def machines() -> list[dict[str, float]]:
    """Lists the resources of each machine of the Ray cluster, taken or not."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
