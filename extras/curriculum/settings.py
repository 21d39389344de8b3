"""Declares the settings of mixtures."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    source_weights: dict[str, Any] = setting({}, "Proportions by which sources are drawn; {}: each row once an epoch.")

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.source_weights and self.sampler.class_path:
            path = f"{key}.sampler.class_path={self.sampler.class_path}"
            raise ConfigError(f"{path} and {key}.source_weights are both set: take one back.")
