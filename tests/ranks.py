"""Processes that have joined each other over real gloo, for tests."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver, get_context
from typing import Any

import pytest
import torch

from tests.forked import ONE_THREAD
from workers.collectives import connect, join_group, open_store, rank

# Ranks are forks of one process that has these: a start of Python, and the imports, for all tests of a process.
IMPORTED = ["tests.batches", "workers.model_worker", "torch.distributed.fsdp"]


class Ranks:
    """Processes that have joined each other."""

    def __init__(self, size: int) -> None:
        self.store, self.size = open_store("127.0.0.1", size), size
        context = get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ONE_THREAD.items():
                patch.setenv(name, value)
            forkserver.ensure_running()
        self.pool = ProcessPoolExecutor(size, mp_context=context)
        # A call waits for the others, so each process gets one.
        list(self.pool.map(join, [self.store.port] * size, range(size), [size] * size))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank, which has to wait for the others in it; what it returned, by rank."""
        calls = [self.pool.submit(with_rank, function, *args) for _ in range(self.size)]
        found = dict(call.result() for call in calls)
        return [found[place] for place in range(self.size)]


def join(port: int, place: int, size: int) -> None:
    torch.set_num_threads(1)
    join_group(connect("127.0.0.1", port, size), place, size)


def with_rank(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    return rank(), function(*args)
