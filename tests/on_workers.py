"""Workers for tests: in a file that worker processes can import."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.errors import MayPass
from training.model_shards import distinct_tensors
from workers.collectives import gather, rank
from workers.deadlines import beat
from workers.model_worker import ModelWorker


class Echo:
    """A role that answers, fails or dies."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hear(self, text: str) -> list[str]:
        """Adds `text`, and returns all that it has heard."""
        self.heard.append(text)
        return self.heard

    def gathered_ranks(self) -> list[int]:
        return gather(rank())

    def draw(self) -> list[float]:
        """Draws one number from each global generator."""
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def sleep_in_pieces(self, seconds: float, pieces: int) -> str:
        for _ in range(pieces):
            time.sleep(seconds / pieces)
            beat()
        return "done"

    def fail(self) -> None:
        raise KeyError("missing")

    def fail_on_the_second(self) -> None:
        """Raises on rank 1, while rank 0 waits for it."""
        if rank() == 1:
            raise MayPass("only the second")
        gather(None)

    def die_on_the_second(self) -> None:
        if rank() == 1:
            os._exit(1)
        gather(None)


class EchoWorker:
    """A worker of that one role; leaves a file `closed` in the folder when it is closed."""

    def __init__(self, folder: Path | None = None) -> None:
        self.roles, self.folder = {"echo": Echo()}, folder

    def close(self) -> None:
        if self.folder is not None:
            (self.folder / "closed").touch()
            raise OSError("the door is stuck")


class InspectedWorker(ModelWorker):
    """A worker with one more role, `inspector`, which adds up the policy's weights."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.roles["inspector"] = Inspector(self)


class Inspector:
    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker

    def weight_sum(self) -> float:
        return weight_sum(distinct_tensors(self.worker.policy.module), self.worker.policy.parallel.full)


def weight_sum(weights: dict[str, Tensor], full: Callable[[Tensor], Tensor] = lambda weight: weight) -> float:
    return sum(full(weights[name]).double().sum().item() for name in sorted(weights))
