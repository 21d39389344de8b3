"""The setting by which a run is started again, and how long one that was waits for its machines."""

from dataclasses import dataclass
from typing import Any, ClassVar

from configs.errors import ConfigError
from configs.settings import EACH_EPOCH, LAST, Frozen, setting

LONG = 1800  # seconds: for a machine to come back
NEEDED = ("model", "optimizer", "extra")  # parts of a checkpoint


@dataclass
class Settings(Frozen):
    restarted: ClassVar[list[int]] = []  # exit codes of the starts before the one in this process

    max_restarts: int = setting(
        0, "Most restarts between two checkpoints (in all: 20 times it), after passing failures (a kill).", ge=0
    )

    @property
    def patience(self) -> float:
        return LONG if self.restarted else super().patience

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if not self.max_restarts:
            return
        if self.save_freq == LAST or (self.save_freq != EACH_EPOCH and self.save_freq <= 0):
            raise ConfigError(
                f"{key}.max_restarts={self.max_restarts} needs checkpoints to go on from: set {key}.save_freq above 0."
            )
        checkpoint = config.get("checkpoint") or config.actor_rollout_ref.actor.checkpoint
        if lacking := [part for part in NEEDED if part not in checkpoint.save_contents]:
            raise ConfigError(
                f"{key}.max_restarts={self.max_restarts} needs whole checkpoints to go on from: add "
                f"{', '.join(lacking)} to checkpoint.save_contents."
            )
