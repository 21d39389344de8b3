"""Chooses the number of threads of a process: the user's, or the number of cores that the process may use."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from configs.errors import ConfigError

VARIABLE = "OMP_NUM_THREADS"


class Threads(NamedTuple):
    """A number of threads, and where it comes from."""

    number: int
    origin: str

    def __str__(self) -> str:
        return f"{self.number} thread{'s'[: self.number > 1]} ({self.origin})"


def worker_threads(n_threads: int | None, workers: int = 1) -> Threads:
    """Chooses the threads of each of a machine's `workers`: trainer.n_threads (`n_threads`) if it is set, else
    OMP_NUM_THREADS, else an equal share of the available cores.

    Raises:
        ConfigError: OMP_NUM_THREADS is no number of threads.
    """
    if n_threads is not None:
        return Threads(n_threads, "trainer.n_threads")
    declared = os.environ.get(VARIABLE, "").strip()
    if not declared:
        cores, origin = available_cores()
        return Threads(max(1, cores // workers), origin)
    first = declared.partition(",")[0].strip()  # of a list, the outermost level
    if not first.isdecimal() or int(first) == 0:
        raise ConfigError(
            f"{VARIABLE}={declared} is no number of threads, which it has to be where trainer.n_threads is "
            "null: set it to a whole number above 0, or unset it to use the available cores."
        )
    return Threads(int(first), VARIABLE)


def available_cores() -> tuple[int, str]:
    """Counts the cores that this process may use, and says what limits them: the affinity mask, or a lower CPU quota.

    A quota is rounded down, because all threads wait for one that the quota holds up."""
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else machine
    quota = cpu_quota()
    if quota is not None and quota < allowed:
        return max(1, int(quota)), f"a CPU quota of {quota:g}"
    return allowed, "the machine's cores" if allowed == machine else f"{allowed} of the machine's {machine} cores"


def cpu_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Reads the CPU limit of this process from its control groups, by which Linux limits containers; None: no limit.

    Args:
        groups: the kernel's list of control groups, of either version.
        root: the folder where their settings are mounted.
    """
    if not groups.is_file():
        return None
    quotas = [group_quota(folder) for folder in group_folders(groups.read_text(), root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def group_folders(groups: str, root: Path) -> Iterator[Path]:
    """Yields the folder of each group that may limit CPU time, and those of its parents. In a container the first may
    be missing: the container's own group is then the outermost."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            mount = root / "cpu" if controllers else root  # version 1 has a mount for each controller
            inner = mount / path.lstrip("/")
            yield from (folder for folder in [inner, *inner.parents] if folder.is_relative_to(mount))


def group_quota(folder: Path) -> float | None:
    """Reads a group's limit from cpu.max (version 2) or cpu.cfs_*_us (version 1): time divided by period."""
    both, quota, period = (folder / name for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    if both.is_file():
        time, length = both.read_text().split()
    elif quota.is_file():
        time, length = quota.read_text().strip(), period.read_text().strip()
    else:
        return None
    return None if time in ("max", "-1") else int(time) / int(length)
