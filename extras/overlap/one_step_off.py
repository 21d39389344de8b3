"""Generates the next step's batch while the trainer learns from this step's (trainer.async_mode=one_step_off).

Step k begins with batch k complete. The engines get the weights of step k − 1 and begin batch k + 1, the trainer
learns from batch k, and the step ends when batch k + 1 is complete: between two steps nothing is under way, so that a
checkpoint holds everything, and validation, saving and signals find the engines idle.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch

from configs.schema import Config
from data.protocol import DataProto, object_array
from data.types import Row, Stage
from training.metric_utils import timer
from training.ray_trainer import Metrics, RayPPOTrainer, Rollouts

PLAIN = (bool, int, float, str, bytes, type(None), np.generic, torch.Tensor)


class Staleness(Stage):
    """Measures how many updates the policy is ahead of the weights that drew each token."""

    at = "prepared"

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        behind = (self.trainer.learnt - batch.batch["weight_versions"])[batch.batch["response_mask"].bool()]
        if not behind.numel():  # all rows failed
            return {}
        return {"staleness/mean": behind.float().mean().item(), "staleness/max": float(behind.max())}


def one_step_off(trainer_class: type[RayPPOTrainer], config: Config) -> type[RayPPOTrainer]:
    """Makes a one-step-off trainer of any other."""
    return type(f"OneStepOff{trainer_class.__name__}", (OneStepOff, trainer_class), {})


class OneStepOff(RayPPOTrainer):
    """Trains weights that are one step ahead of those that generated the batch.

    Attributes:
        learnt: the step whose update made the present weights.
        coming, next: rollouts of the next step: under way during a step, and complete between two steps.
    """

    learnt = 0
    coming: Future | None = None
    next: tuple[Rollouts, dict[str, float]] | None = None  # with the seconds of their stages

    def collect(self, step: int, timing: dict[str, float]) -> Rollouts:
        """Returns the rollouts of this step, and begins those of the next by the newest weights."""
        self.catch_up(timing)
        rollouts, seconds = self.next or self.collect_timed(step)
        timing |= seconds
        self.coming = self.thread.submit(self.collect_timed, step + 1) if step < self.total_steps else None
        return rollouts

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        """Starts the thread that collects; closing the workers ends its wait."""
        return ThreadPoolExecutor(1)

    def collect_timed(self, step: int) -> tuple[Rollouts, dict[str, float]]:
        timing: dict[str, float] = {}
        return super().collect(step, timing), timing

    def sync(self, timing: dict[str, float]) -> Metrics:
        """Waits for the next step's rollouts; the engines get this step's weights when the next step begins."""
        if self.policy_learns:
            self.learnt = self.global_step
        with timer("wait", timing):
            self.next = self.coming and self.coming.result()
        return self.certificate

    def catch_up(self, timing: dict[str, float]) -> None:
        """Hands the present weights to the engines, unless they have them."""
        if self.certificate.get("rollout/weight_version", 0) != self.learnt:
            with timer("update_weights", timing):
                self.certificate = self.rollout.update_weights(self.learnt)

    def validate(self) -> Metrics:
        self.catch_up(self.timing)
        return super().validate()

    def state(self) -> dict[str, Any]:
        if self.next is None:
            return super().state() | {"learnt": self.learnt}
        rollouts, seconds = self.next
        remade = self.train_loader.row(int(rollouts.batch.dataset_position[0])).keys()
        parts = [part and pack(part, remade) for part in (rollouts.batch, rollouts.left_out)]
        return super().state() | {"learnt": self.learnt, "next": (parts, rollouts.metrics, seconds)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.learnt = state.get("learnt", self.global_step)
        if "next" in state:
            parts, metrics, seconds = state["next"]
            batch, left_out = [part and unpack(part, self.train_loader.row) for part in parts]
            self.next = Rollouts(batch, metrics, left_out), seconds


def pack(batch: DataProto, remade: Iterable[str]) -> dict[str, Any]:
    """Returns a batch as a checkpoint holds it: without the columns of objects that the data makes again."""
    columns = {name: values.tolist() for name, values in batch.non_tensor_batch.items()}
    saved_columns = {name: values for name, values in columns.items() if name not in remade or is_plain(values)}
    return {"tensors": batch.tensors, "columns": saved_columns, "names": [*columns], "meta_info": batch.meta_info}


def unpack(parts: dict[str, Any], row_of: Callable[[int], Row]) -> DataProto:
    """Returns the batch that `pack` turned into `parts`."""
    columns = parts["columns"]
    if missing := [name for name in parts["names"] if name not in columns]:
        rows = [row_of(position) for position in columns["dataset_position"]]
        columns |= {name: [row[name] for row in rows] for name in missing}
    arrays = {name: object_array(columns[name]) for name in parts["names"]}
    return DataProto.from_dict(parts["tensors"], arrays, parts["meta_info"])


def is_plain(value: Any) -> bool:
    """Returns whether a value can be saved in a file without code."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return is_plain([*value, *value.values()])
    return isinstance(value, PLAIN)
