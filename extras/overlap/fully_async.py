"""Generates up to trainer.max_staleness steps ahead, by weights that change meanwhile (async_mode=fully_async).

By default the order is strict: step k learns from the prompts that the synchronous run learns from in step k, and batch
k may begin once step k − 1 − max_staleness is learnt. So no token is older than that, whatever the clock does, and with
0 the run is the synchronous one. Each batch is collected by the trainer's own `collect`, in a thread.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from configs.errors import ConfigError
from configs.schema import Config
from data.files import read_metrics
from data.protocol import DataProto, join_rows
from data.seeding import derive_seed
from data.types import SamplingParams
from extras.overlap.pools import ApartRollout
from extras.overlap.record import GROUPS, REMEDY, Record
from training.checkpoint import checkpoint_to_resume
from training.episode_rows import check_failures
from training.metric_utils import timer
from training.ray_trainer import Metrics, RayPPOTrainer, Rollouts
from training.reward import reward_metrics
from workers.deadlines import Wait

LEARNS = ContextVar("the step that is not learnt before this thread has the answers that it waits for", default=1)


@dataclass
class AsyncRollout(ApartRollout):
    """Generates for several calls at once."""

    calls: Any = field(default_factory=count)
    answered: dict[int, dict[int, DataProto]] = field(default_factory=dict)  # by call and rank

    def _answers(self, shares: Sequence[tuple]) -> list[DataProto]:
        call, done = self.begin(shares), {}
        with self.watch() as wait:
            while not done:
                done = self.take_finished([call], wait)
        return done[call]

    def watch(self) -> Wait:
        """Makes what watches over the workers that answer: each call of theirs comes back at once."""
        return self.group.wait_for("generator.answer")

    def begin(self, shares: Sequence[tuple]) -> int:
        """Has shares answered; returns the number of the call."""
        call = next(self.calls)
        self.answered[call] = {}
        self.group.submit("generator", "begin", [(call, *share) for share in shares]).result()
        return call

    def take_finished(self, calls: Sequence[int], wait: Wait) -> dict[int, list[DataProto]]:
        """Waits a moment; returns the answers to those of `calls` that are whole, once, by rank; raises as `wait`."""
        parts = self.group.submit("generator", "take", [(calls, LEARNS.get())] * self.group.size).result()
        for rank, call, rows in ((rank, *item) for rank, part in enumerate(parts) for item in part.items()):
            self.answered[call][rank] = rows
        wait.late = [rank for rank in range(self.group.size) if any(rank not in self.answered[call] for call in calls)]
        wait.check()
        complete = [call for call in calls if len(self.answered[call]) == self.group.size]
        return {call: [rows for _, rows in sorted(self.answered.pop(call).items())] for call in complete}

    def update_weights(self, version: int) -> dict[str, float]:
        with self.watch() as wait:
            while not all(ready := self.group.submit("generator", "expects", [(version,)] * self.group.size).result()):
                wait.late = [rank for rank, is_next in enumerate(ready) if not is_next]
                wait.check()
        certificates = self.move_weights("generator", "reload", version)
        return {name: max(certificate[name] for certificate in certificates) for name in certificates[0]}


class Ahead(RayPPOTrainer):
    """Trains while the rows of several steps are answered.

    Attributes:
        learnt: the step whose update made the present weights.
        positions: of the rows that a step has drawn, until it takes their answers, or `groups` has them.
        epochs: of the steps that have drawn their rows, and are not learnt.
        record, plan: names of the groups that each step learns from, and those of the run that is played again.
        stops: steps after which that run was resumed.
    """

    record: Record | None = None

    def __init__(self, *args: Any, roles: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, roles={**roles, "rollout": AsyncRollout(**vars(roles["rollout"]))}, **kwargs)
        self.learnt = 0
        self.positions: dict[int, list[int]] = {}
        self.epochs: dict[int, int] = {}
        self.plan: dict[int, list[str]] = {}
        self.stops: Collection[int] = ()

    def last_begun(self, step: int) -> int:
        """Returns the last step whose rows may be under way when `step` begins."""
        return min(step + self.config.trainer.max_staleness, self.total_steps)

    def rows_of(self, step: int) -> dict[str, Any]:
        """Draws the rows of a step, or those of them that were under way at a checkpoint."""
        if step in self.positions:
            return self.train_loader.batch_of(self.positions[step])
        rows = self.train_loader.next_batch()
        self.positions[step] = rows["dataset_position"].tolist()
        self.epochs[step] = self.train_loader.epoch  # later: rows of other steps have been drawn meanwhile
        return rows

    def sync(self, timing: dict[str, float]) -> Metrics:
        if self.policy_learns:
            self.learnt = self.global_step
        return super().sync(timing)

    def after_step(self, batch: DataProto) -> None:
        super().after_step(batch)
        if self.global_step in self.stops:
            step, self.save_requested = self.global_step, True
            self.stop_reason = f"trainer.replay: that run was resumed after step {step}. Give this command again."

    def state(self) -> dict[str, Any]:
        ahead = {"positions": self.positions, "epochs": self.epochs, "learnt": self.learnt}
        return super().state() | ahead | {"batch_order": self.config.trainer.batch_order}

    def resume(self) -> None:
        """Begins the record behind the checkpoint that the run goes on from, and reads that of trainer.replay."""
        trainer, folder = self.config.trainer, checkpoint_to_resume(self.config)
        if not trainer.val_only:
            step = int(folder.name.rpartition("_")[2]) if folder else 0
            self.stops = self.roles["generator"].all("start", step)[0]
            self.record = Record(self.folder / GROUPS, step, lambda entry: entry["step"])
        if trainer.replay:
            self.plan = {entry["step"]: entry["groups"] for entry in read_metrics(Path(trainer.replay) / GROUPS)}
        super().resume()

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        order = self.config.trainer.batch_order
        if (saved := state.get("batch_order", order)) != order and state["positions"]:
            raise ConfigError(
                f"trainer.batch_order={order}: rows under way at the checkpoint are {saved}. Set that again."
            )
        self.positions, self.epochs = state.get("positions", {}), state.get("epochs", {})
        self.learnt = state.get("learnt", self.global_step)


class Strict(Ahead):
    """Learns from the rows that each step has drawn.

    Attributes:
        coming: the rollouts of steps that have begun, with the seconds of their stages.
        rows: that these steps answer, until they are taken.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scoring = Lock()
        self.coming: dict[int, Future] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        self.threads = ThreadPoolExecutor(1 + self.config.trainer.max_staleness)

    def collect(self, step: int, timing: dict[str, float]) -> Rollouts:
        """Has all batches begun that may be, and returns that of this step."""
        for later in range(step, self.last_begun(step) + 1):
            if later not in self.coming:
                self.rows[later] = self.rows_of(later)
                self.coming[later] = self.threads.submit(self.collect_timed, later)
        with timer("wait", timing):
            rollouts, seconds = self.coming.pop(step).result()
        del self.positions[step]
        timing |= seconds
        rollouts.metrics["training/epoch"] = self.epochs.pop(step, self.train_loader.epoch)
        return rollouts

    def collect_timed(self, step: int) -> tuple[Rollouts, dict[str, float]]:
        timing: dict[str, float] = {}
        LEARNS.set(step)
        return super().collect(step, timing), timing

    def next_rows(self, step: int) -> dict[str, Any]:
        return self.rows.pop(step) if step in self.rows else super().next_rows(step)

    def score(self, batch: DataProto, timing: dict[str, float]) -> tuple[DataProto, Metrics]:
        with self.scoring:  # a reward need not know of threads
            return super().score(batch, timing)


class FirstCome(Ahead):
    """Learns from the groups of samples that are finished first, whichever step has drawn their prompts: no long answer
    holds up a step, but one that takes long may be older than trainer.max_staleness.

    Attributes:
        groups: step and position of the row of each group that is not learnt from yet, by name.
        coming: names of the groups that are under way, by call.
        done: those that are finished, by name, in the order in which they were.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups: dict[str, tuple[int, int]] = {}
        self.coming: dict[int, str] = {}
        self.done: dict[str, DataProto] = {}

    def collect(self, step: int, timing: dict[str, float]) -> Rollouts:
        """Has the groups of all steps begun that may be, and returns the first that are finished."""
        undrawn = {*range(step, self.last_begun(step) + 1)}.difference(self.epochs)
        for later in sorted(undrawn.union(self.positions)):
            self.begin(later)
        with timer("wait", timing), self.rollout.watch() as wait:
            names = self.plan.get(step) or self.first_done(wait)
            if absent := {*names}.difference(self.groups):
                raise ValueError(f"trainer.replay: no group is called {absent}. {REMEDY}")
            while not self.done.keys() >= {*names}:
                self.look(wait, [call for call, name in self.coming.items() if name in names])
        if self.record:
            self.record.write({"step": step, "groups": names})
        batch, metrics = self.score(join_rows([self.done.pop(name) for name in names]), timing)
        if "episode" in batch:
            check_failures(batch, self.config.env.max_failed_fraction)
        self.groups = {name: row for name, row in self.groups.items() if name not in names}
        epoch = {"training/epoch": self.epochs.pop(step, self.train_loader.epoch)}
        return Rollouts(batch, metrics | reward_metrics(batch) | epoch)

    def begin(self, step: int) -> None:
        """Draws the rows of a step, and has the samples of each begun by themselves."""
        prompts, rollout = self.as_prompts(self.rows_of(step), str(step)), self.config.actor_rollout_ref.rollout
        sampling = SamplingParams.from_config(rollout, rollout.response_length)
        del self.positions[step]  # `groups` has them
        for index, name in enumerate(prompts.uid):
            samples = prompts[index : index + 1].repeat(rollout.n, interleave=True)
            seed = derive_seed(self.config.trainer.seed, "group", step, int(prompts.dataset_position[index]))
            self.coming[self.rollout.begin(self.rollout.shares(samples, sampling, seed))] = name
            self.groups[name] = step, int(prompts.dataset_position[index])

    def first_done(self, wait: Wait) -> list[str]:
        """Returns the names of the first groups that are finished, as many as a batch has."""
        while len(self.done) < self.train_loader.batch_size:
            self.look(wait, [*self.coming])
        return [*self.done][: self.train_loader.batch_size]

    def look(self, wait: Wait, calls: Sequence[int]) -> None:
        """Waits a moment, and notes which groups of these calls are finished."""
        for call, answers in self.rollout.take_finished(calls, wait).items():
            self.done[self.coming.pop(call)] = join_rows(answers)

    def state(self) -> dict[str, Any]:
        positions: dict[int, list[int]] = {}
        for step, position in self.groups.values():
            positions.setdefault(step, []).append(position)
        return super().state() | {"positions": positions}


ORDERS = {"strict": Strict, "first_come": FirstCome}


def fully_async(trainer_class: type[RayPPOTrainer], config: Config) -> type[RayPPOTrainer]:
    """Makes a trainer that generates ahead of any other one, in the order that its settings say."""
    order = ORDERS[config.trainer.batch_order]
    return type(f"{order.__name__}{trainer_class.__name__}", (order, trainer_class), {})
