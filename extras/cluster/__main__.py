"""Measures the machines of the Ray cluster before a run: what they have, what they exchange in a second, their clocks.

    python -m extras.cluster --nodes 2 --folder outputs

A worker on each machine (without a cluster: on this one) exchanges bytes with this process, and with the others by
torch.distributed, as the workers of a run do. It waits until so many machines have joined.
"""

from configs.errors import ConfigError, refusals  # isort: skip

import argparse
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from workers.ray_group import RayWorkerGroup
from workers.resources import Resources, joins_cluster, machines

MIB = 1 << 20
TIMEOUT = 60  # seconds for ranks that cannot reach each other
MOST_SECONDS = 1.0  # by which clocks may differ: a run's files have the times of several
HEADER = f"rank  {'machine':24}  CPUs  {'GPU':24}  sends  takes   sums    clock  folder"
LEGEND = "MiB/s to this process, from it, and summed over all ranks; the clock's seconds ahead of this machine's."


class Machine:
    """Plays a worker's only role: tells of its machine, and exchanges bytes."""

    def describe(self, mark: Path) -> tuple[str, int, str, bool, float]:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        return platform.node(), os.cpu_count() or 1, gpu, mark.exists(), time.time()

    def exchange(self, data: bytes, answer_bytes: int) -> bytes:
        return bytes(answer_bytes)

    def sum_all(self, size: int) -> float:
        """Sums so many bytes over all ranks; returns how many bytes it was a second."""
        numbers = torch.zeros(size // 4, device="cuda" if torch.cuda.is_available() else "cpu")
        began = time.perf_counter()
        dist.all_reduce(numbers)
        numbers[0].item()  # waits for a GPU
        return size / (time.perf_counter() - began)


class Worker:
    """Runs on each rank."""

    def __init__(self) -> None:
        self.roles = {"machine": Machine()}

    def close(self) -> None:
        """Has nothing open."""


class Row(NamedTuple):
    """Holds what is found of a rank's machine: its clock is `ahead` seconds; it `sends` and `takes` bytes a second."""

    host: str
    cpus: int
    gpu: str
    sees_folder: bool
    ahead: float
    sends: float
    takes: float


def join(nodes: int, seconds: float) -> Resources:
    """Returns a worker for each machine when `nodes` have joined; raises ConfigError after `seconds`, or at once if no
    cluster is named."""
    deadline = time.monotonic() + seconds
    while nodes > 1:
        with suppress(ConfigError):  # the first machine may still start
            if not joins_cluster() or len(machines()) >= nodes:
                break
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    present = machines() if joins_cluster() else [{}]
    if len(present) < nodes:
        raise ConfigError(f"--nodes {nodes}: only {len(present)} joined. `ray start` the others (docs/cluster.md).")
    gpus = int(all(machine.get("GPU") for machine in present))
    return Resources(len(present), threads=1, gpus=gpus, nodes=len(present))


def measure(group: RayWorkerGroup, rank: int, mark: Path, size: int) -> Row:
    """Measures the machine of a rank, while the others idle."""
    seconds, idle = [], (b"", 0)
    for call in [(b"", size), (bytes(size), 0)] * 2:  # the first ones open connections
        began = time.perf_counter()
        group.submit("machine", "exchange", [call if other == rank else idle for other in range(group.size)]).result()
        seconds.append(time.perf_counter() - began)
    sent_at = time.time()
    *facts, clock = group.submit("machine", "describe", [(mark,)] * group.size).result()[rank]
    return Row(*facts, clock - (sent_at + time.time()) / 2, size / seconds[2], size / seconds[3])


def check(resources: Resources, folder: Path, size: int) -> str:
    """Starts the workers, and returns the table of what is found."""
    group, mark = RayWorkerGroup(resources, Worker, timeout=TIMEOUT), folder / f".seen_{uuid4().hex}"
    try:
        mark.touch()
        rows, sums = [measure(group, rank, mark, size) for rank in range(group.size)], [nan]
        for _ in range(2 if group.size > 1 else 0):  # the first one opens connections
            sums = group.submit("machine", "sum_all", [(size,)] * group.size).result()
    finally:
        mark.unlink(missing_ok=True)
        group.close()
    return table(rows, sums, folder)


def table(rows: Sequence[Row], sums: Sequence[float], folder: Path) -> str:
    """Writes a line for each rank, and one for each thing that a run would stumble over."""
    lines = [HEADER]
    for rank, (row, summed) in enumerate(zip(rows, sums, strict=True)):
        speeds = "".join(f"{speed / MIB:7.0f}" for speed in (row.sends, row.takes, summed)).replace("nan", "  -")
        sees = "yes" if row.sees_folder else "no"
        lines.append(f"{rank:<4}  {row.host:24.24}{row.cpus:6}  {row.gpu:24.24}{speeds}{row.ahead:+9.3f}  {sees}")
    lines.append(LEGEND)
    if blind := [row.host for row in rows if not row.sees_folder]:
        lines.append(f"{', '.join(blind)}: no {folder} of this machine's; trainer.default_local_dir has to be shared.")
    if apart := [row.host for row in rows if abs(row.ahead) > MOST_SECONDS]:
        lines.append(f"{', '.join(apart)}: another time than this machine's; let NTP set the clocks.")
    if len({row.host for row in rows}) < len(rows):
        lines.append("Ranks share a machine, as others had no CPU or GPU free.")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measures by a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1, help="wait for so many machines (1)")
    parser.add_argument("--wait", type=float, default=300, help="for so many seconds at most (300)")
    parser.add_argument("--folder", type=Path, default=Path("outputs"), help="the run's, that all should see (outputs)")
    parser.add_argument("--mib", type=int, default=64, help="to exchange (64)")
    arguments = parser.parse_args(argv)
    folder = arguments.folder.resolve()
    with refusals():
        resources = join(arguments.nodes, arguments.wait)
        folder.mkdir(parents=True, exist_ok=True)
        print(check(resources, folder, arguments.mib * MIB))


if __name__ == "__main__":
    main()
