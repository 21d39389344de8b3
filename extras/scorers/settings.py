"""Settings of the processes that call a reward function."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    """Stand in the section `reward`."""

    num_workers: int = setting(16, "Processes that call a reward function, at most; slow functions get them.", ge=1)
    memory_limit_mb: int | None = setting(
        2048, "MiB of memory that such a process may take beyond what loading your file takes; null: any.", ge=1
    )
    in_process: bool = setting(
        False, "Call reward functions in the run's own process, for breakpoints: none is killed, and an error ends it."
    )
    max_rpm: int | None = setting(None, "Calls of a reward function a minute, at most; null: any.", ge=1)
    max_tpm: int | None = setting(None, "Tokens a minute that they may take together, by the estimate.", ge=1)
    estimated_tokens_per_request: int = setting(2000, "Tokens that a call is counted as for max_tpm.", ge=1)

    @property
    def caller(self) -> str:
        return "here" if self.in_process else "scorers"

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.in_process and (self.max_rpm or self.max_tpm):
            raise ConfigError(
                "reward.max_rpm, max_tpm: calls in this process are not counted: reward.in_process=false."
            )
