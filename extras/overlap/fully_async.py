"""Generates up to trainer.max_staleness steps ahead, by weights that change meanwhile (async_mode=fully_async).

The order is strict: step k learns from the prompts that the synchronous run learns from in step k, and batch k may
begin once step k − 1 − max_staleness is learnt. So no token is older than that, whatever the clock does, and with 0 the
run is the synchronous one. Each batch is collected by the trainer's own `collect`, in a thread.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any

from data.protocol import DataProto
from extras.overlap.pools import ApartRollout
from training.metric_utils import timer
from training.ray_trainer import Metrics, RayPPOTrainer, Rollouts


@dataclass
class AsyncRollout(ApartRollout):
    """Generates for several calls at once."""

    calls: Any = field(default_factory=count)

    def _answers(self, shares: Sequence[tuple]) -> list[DataProto]:
        call, answers = next(self.calls), [None] * self.group.size
        self.group.submit("generator", "begin", [(call, *share) for share in shares]).result()
        while any(rows is None for rows in answers):
            taken = self.group.submit("generator", "take", [(call,)] * self.group.size).result()
            answers = [rows if new is None else new for rows, new in zip(answers, taken, strict=True)]
        return answers

    def update_weights(self, version: int) -> dict[str, float]:
        certificates = self.move_weights("generator", "reload", version)
        return {name: max(certificate[name] for certificate in certificates) for name in certificates[0]}


def fully_async(trainer_class: type[RayPPOTrainer]) -> type[RayPPOTrainer]:
    """Makes a trainer that generates ahead of any other one."""
    return type(f"FullyAsync{trainer_class.__name__}", (FullyAsync, trainer_class), {})


class FullyAsync(RayPPOTrainer):
    """Trains while several batches are under way.

    Attributes:
        learnt: the step whose update made the present weights.
        coming: the rollouts of steps that have begun, with the seconds of their stages.
        positions, rows: of the data that these steps answer; rows until they are taken.
    """

    def __init__(self, *args: Any, roles: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, roles={**roles, "rollout": AsyncRollout(**vars(roles["rollout"]))}, **kwargs)
        self.learnt, self.scoring = 0, Lock()
        self.coming: dict[int, Future] = {}
        self.positions: dict[int, list[int]] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        self.threads = ThreadPoolExecutor(1 + self.config.trainer.max_staleness)

    def collect(self, step: int, timing: dict[str, float]) -> Rollouts:
        """Has all batches begun that may be, and returns that of this step."""
        last = min(step + self.config.trainer.max_staleness, self.total_steps)
        for later in range(step, last + 1):
            if later not in self.coming:
                self.begin(later)
        with timer("wait", timing):
            rollouts, seconds = self.coming.pop(step).result()
        del self.positions[step]
        timing |= seconds
        return rollouts

    def begin(self, step: int) -> None:
        """Draws the rows of a step, or those that were drawn before a checkpoint, and has them answered."""
        if step in self.positions:
            self.rows[step] = self.train_loader.batch_of(self.positions[step])
        else:
            self.rows[step] = self.train_loader.next_batch()
            self.positions[step] = self.rows[step]["dataset_position"].tolist()
        self.coming[step] = self.threads.submit(self.collect_timed, step)

    def collect_timed(self, step: int) -> tuple[Rollouts, dict[str, float]]:
        timing: dict[str, float] = {}
        return super().collect(step, timing), timing

    def next_rows(self, step: int) -> dict[str, Any]:
        return self.rows.pop(step) if step in self.rows else super().next_rows(step)

    def score(self, batch: DataProto, timing: dict[str, float]) -> tuple[DataProto, Metrics]:
        with self.scoring:  # a reward need not know of threads
            return super().score(batch, timing)

    def sync(self, timing: dict[str, float]) -> Metrics:
        if self.policy_learns:
            self.learnt = self.global_step
        return super().sync(timing)

    def state(self) -> dict[str, Any]:
        return super().state() | {"positions": self.positions, "learnt": self.learnt}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.positions, self.learnt = state.get("positions", {}), state.get("learnt", self.global_step)
