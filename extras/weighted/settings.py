"""Settings of several reward functions, whose results are summed up: reward.functions."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, setting


@dataclass
class WeightedFunctionConfig(Frozen):
    path: str | None = setting(None, "File or module of the function.")
    name: str = setting("compute_score", "Function in that file; the part of the score is logged as reward/NAME/….")
    reward_kwargs: dict[str, Any] = setting({}, "Arguments of the function; they override the caller's.")
    weight: float = setting(1.0, "Weight of the function's result in the score.")
    data_sources: list[str] = setting([], "Data sources whose rows it scores; []: all.")


@dataclass
class Settings(Frozen):
    """Stand in the section `reward`."""

    functions: list[WeightedFunctionConfig] = setting([], "Several functions, {path, name, weight, …}: a weighted sum.")

    @property
    def scorer(self) -> str:
        return "weighted" if self.functions else super().scorer

    def source(self) -> str | None:
        names = ", ".join(entry.name for entry in self.functions)
        return f"reward.functions=[{names}]" if self.functions else super().source()

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.functions and super().source():
            raise ConfigError(f"{self.source()} and {super().source()}: set one of the two.")
        for index, entry in enumerate(self.functions):
            if not entry.path:
                raise ConfigError(f"reward.functions[{index}] ({entry.name}) has no path: name its file.")
