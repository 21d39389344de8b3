"""The settings by which validations decide what is kept of a run, and when it ends."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, group, setting

HEADLINE = "headline"


@dataclass
class EarlyStop(Frozen):
    metric: str | None = setting(None, "A metric of validations that may end the run, or headline.", filled=True)
    patience: int | None = setting(None, "End after so many validations in a row without a better value.", ge=1)
    target: float | None = setting(None, "End once the metric has reached this.")
    mode: str | None = setting(
        None, "Which values are better, for save_best as well; null: max, of a loss min.", choices=("max", "min")
    )


@dataclass
class Settings(Frozen):
    save_best: str | None = setting(
        None,
        "Save after validations that are the best so far by this metric, or headline; the best stays.",
        filled=True,
    )
    early_stop: EarlyStop = group(EarlyStop, "When a run ends before its last step.")

    @property
    def also_saved(self) -> tuple[str, ...]:
        return (f"after each validation with the best {self.save_best} so far",) if self.save_best else ()

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        stop = self.early_stop
        has_limit = stop.patience is not None or stop.target is not None
        if has_limit != (stop.metric is not None):
            raise ConfigError(
                f"{key}.early_stop.metric={stop.metric or 'null'} needs patience or target beside it, and they need "
                f"it: set {key}.early_stop.metric=headline (or a metric of validations) and one of them."
            )
        if (self.save_best or stop.metric) and self.test_freq in (-1, 0):
            raise ConfigError(f"{key}.test_freq={self.test_freq}: save_best and early_stop need it above 0.")
