"""Saves what each step learns from, and learns from it again by another loss or estimator, without generating.

A step's file, N.pkl, holds its `Rollouts`: scored rows with the engine's log-probs, before any pass of the trainer's
models. It is a pickle, which runs code when it is opened: replay only files you trust.
"""

import pickle
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import Config
from data.files import dispensable, replacing
from training.metric_utils import timer
from training.ray_trainer import RayPPOTrainer, Rollouts


class Saving(RayPPOTrainer):
    """Writes the rollouts of each step."""

    def collect(self, step: int, timing: dict[str, float]) -> Rollouts:
        rollouts, path = super().collect(step, timing), file_of(self.config.trainer.save_rollouts, step)
        with timer("save_rollouts", timing), dispensable(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                pickle.dump(rollouts, file)
        return rollouts


class Replaying(RayPPOTrainer):
    """Reads the rollouts of each step, and draws the prompts that it drew, so that the data's position moves on."""

    def __init__(self, config: Config, *, total_steps: int, **parts: Any) -> None:
        folder = config.trainer.replay_rollouts
        saved = sum(file_of(folder, step).exists() for step in range(1, total_steps + 1))
        if saved < total_steps:
            raise ConfigError(
                f"trainer.replay_rollouts={folder} has {saved} of {total_steps} steps: set trainer.total_training_steps"
                f"={saved}."
            )
        super().__init__(config, total_steps=total_steps, **parts)

    def collect(self, step: int, timing: dict[str, float]) -> Rollouts:
        with timer("data", timing):
            with file_of(self.config.trainer.replay_rollouts, step).open("rb") as file:
                rollouts = pickle.load(file)
            for _ in range(int(rollouts.metrics.get("train/num_gen_batches", 1))):
                self.next_rows(step)
        return rollouts


def file_of(folder: str, step: int) -> Path:
    return Path(folder) / f"{step}.pkl"


def saving(trainer_class: type[RayPPOTrainer], config: Config) -> type[RayPPOTrainer]:
    """Makes a trainer that saves of any other."""
    return type(f"Saving{trainer_class.__name__}", (Saving, trainer_class), {})


def replaying(trainer_class: type[RayPPOTrainer], config: Config) -> type[RayPPOTrainer]:
    """Makes a trainer that replays of any other."""
    return type(f"Replaying{trainer_class.__name__}", (Replaying, trainer_class), {})
