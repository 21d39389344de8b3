"""Defines worker groups, and plays the one worker that lives in this process. Knows nothing of Ray.

A group is asked for things by `submit`, which gives every worker its share of a call to one of its roles, and answered
by `Pending.result`. Who gets which rows is workers/remote_roles.py's business. Calls to a group are carried out in the
order in which they were submitted; calls to two groups overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Pending(Protocol):
    """A call that workers are busy with."""

    def result(self) -> list[Any]:
        """Waits for what the workers return, by rank; raises what the first to fail raised."""


class WorkerGroup(Protocol):
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


class LocalWorkerGroup:
    """Runs the one worker as an object of this process: no start-up, no serialisation, breakpoints work.

    It has a `close`, which gives back what would outlive it.
    """

    size = 1

    def __init__(self, n_threads: int, worker_class: type, *args: Any) -> None:
        torch.set_num_threads(n_threads)
        self.worker = worker_class(*args)

    def submit(self, role: str, method: str, shares: Sequence[tuple]) -> Done:
        check_shares(shares, self.size)
        return Done([getattr(self.worker.roles[role], method)(*shares[0])])

    def close(self) -> None:
        self.worker.close()


def distinct_groups(pools: Mapping[str, WorkerGroup]) -> list[WorkerGroup]:
    """Lists the groups behind some roles, each once."""
    return list({id(group): group for group in pools.values()}.values())


def check_shares(shares: Sequence[tuple], size: int) -> None:
    assert len(shares) == size, f"{len(shares)} shares for {size} workers: each gets one, if need be without rows"
