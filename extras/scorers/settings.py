"""Settings of the processes that call a reward function."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    """Stand in the section `reward`."""

    switches = "max_tpm: estimated_tokens_per_request"
    num_workers: int = setting(16, "Most processes that call a reward function; only slow functions get many.", ge=1)
    memory_limit_mb: int | None = setting(2048, "MiB that such a process may take beyond your file; null: any.", ge=1)
    in_process: bool = setting(
        False, "Call reward functions in the run's own process, for breakpoints: no deadline; an error ends the run."
    )
    max_rpm: int | None = setting(None, "Most calls of a reward function per minute; null: any.", ge=1)
    max_tpm: int | None = setting(None, "Most estimated tokens of these calls per minute; null: any.", ge=1)
    estimated_tokens_per_request: int = setting(2000, "Estimated tokens of one call, for max_tpm.", ge=1)

    @property
    def caller(self) -> str:
        return "here" if self.in_process else "scorers"

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.in_process and (self.max_rpm or self.max_tpm):
            raise ConfigError("reward.max_rpm, max_tpm: calls here are not counted: reward.in_process=false.")
