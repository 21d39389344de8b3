"""What tests have workers do: in a file that worker processes can import."""

import os
from typing import Any

from torch import Tensor

from workers.collectives import gather, rank
from workers.model_worker import ModelWorker


def gathered_ranks(_: Any) -> list[int]:
    return gather(rank())


def fail_on_the_second(_: Any) -> None:
    """The first waits for it."""
    if rank() == 1:
        raise RuntimeError("only the second")
    gather(None)


def die_on_the_second(_: Any) -> None:
    if rank() == 1:
        os._exit(1)
    gather(None)


def weight_sum(weights: ModelWorker | dict[str, Tensor]) -> float:
    """Of the actor, or of a file of weights."""
    weights = weights if isinstance(weights, dict) else weights.actor.engine.module.state_dict()
    return sum(tensor.double().sum().item() for tensor in weights.values())
