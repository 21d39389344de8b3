"""Keeps the checkpoint of the best validation, and ends a run whose validations stop improving.

The values of a resumed run are read from its metrics.jsonl.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from statistics import mean
from typing import Any

from configs.errors import ConfigError, notice_once
from data.files import headline_means, read_metrics
from data.protocol import DataProto
from data.types import Observer
from extras.best.settings import HEADLINE
from training.checkpoint import saved_steps
from training.tracking import METRICS_FILE, short_number

LINK = "best"


class Best(Observer):
    """Watches a metric for trainer.save_best, and one for trainer.early_stop."""

    decides = True

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        trainer, self.settings = run.config.trainer, run.config.trainer.early_stop
        self.saving = Scores("trainer.save_best", trainer.save_best, self.settings.mode)
        self.stopping = Scores("trainer.early_stop.metric", self.settings.metric, self.settings.mode)
        run.saver.kept_steps = self.best_saved

    def started(self, step: int) -> None:
        for entry in read_metrics(self.run.folder / METRICS_FILE):
            self.take(entry["step"], entry["data"])
        self.run.stop_reason = self.run.stop_reason or self.verdict()

    def validated(self, step: int, batches: Sequence[DataProto], metrics: Mapping[str, float]) -> None:
        self.take(step, metrics)
        for scores in (self.saving, self.stopping):
            scores.check(step, metrics)
        if self.saving.metric:
            saved = self.saving.best({*saved_steps(self.run.folder)} - {step})
            self.run.save_requested |= saved is None or self.saving[step] > self.saving[saved]
        self.run.stop_reason = self.run.stop_reason or self.verdict()

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        self.take(step, metrics)  # also of a step that was saved just before a kill
        link, new = self.run.folder / LINK, self.run.folder / f".{LINK}"
        for best in self.best_saved():
            try:
                new.unlink(missing_ok=True)
                new.symlink_to(f"global_step_{best}")
                new.replace(link)
            except OSError as error:  # there are no links here, or a folder is in its place, as in a copy of a run
                with suppress(OSError):
                    new.unlink(missing_ok=True)
                text = f"{link} cannot name the best checkpoint, global_step_{best} now, and is left as it is"
                notice_once(f"{text}: {error.strerror}. The run goes on without it.", link)

    def ended(self, error: BaseException | None) -> None:
        for step in self.best_saved() if error is None else ():
            why = f"{self.saving.key}={self.saving.metric}: {self.saving.in_words(step)}"
            print(f"{LINK}: {self.run.folder / f'global_step_{step}'} ({why}).")

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        self.saving.take(step, metrics)
        self.stopping.take(step, metrics)

    def best_saved(self) -> list[int]:
        """Lists the step of the best checkpoint on disk, if there is one."""
        best = self.saving.best(saved_steps(self.run.folder))
        return [] if best is None else [best]

    def verdict(self) -> str:
        """Returns why the run ends; "": it continues."""
        scores, (patience, target) = self.stopping, (self.settings.patience, self.settings.target)
        if (best := scores.best(scores)) is None:
            return ""
        later, text = sum(step > best for step in scores), f"{scores.metric} {scores.in_words(best)} at step {best}"
        if target is not None and scores[best] >= scores.sign * target:
            return f"ended early: {text} has reached trainer.early_stop.target={target:g}."
        if patience is not None and later >= patience:
            more = f"To go on, raise trainer.early_stop.patience={patience}."
            return f"ended early: {text} was the best, and {later} validations since were no better. {more}"
        return ""


class Scores(dict[int, float]):
    """The values of a metric by step, signed so that larger ones are better; empty without a metric."""

    def __init__(self, key: str, metric: str | None, mode: str | None) -> None:
        super().__init__()
        self.key, self.metric, self.mode, self.sign = key, metric, mode, 1.0

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the value from the metrics of a step, if they have it; NaN counts as the worst."""
        names = headline_means(metrics) if self.metric == HEADLINE else {self.metric}.intersection(metrics)
        if names:
            is_loss = any("loss" in name for name in names)
            self.sign = -1.0 if self.mode == "min" or (self.mode is None and is_loss) else 1.0
            value = mean(math.nan if metrics[name] is None else metrics[name] for name in names)
            self[step] = -math.inf if math.isnan(value) else self.sign * value

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises ConfigError if the validation of a step has not measured the metric."""
        if self.metric and step not in self:
            names = ", ".join(name for name in metrics if not name.startswith("val-aux/"))
            raise ConfigError(f"{self.key}={self.metric} is not measured: choose {HEADLINE}, {names}.")

    def best(self, steps: Collection[int]) -> int | None:
        """Returns the first of `steps` with the best value; None if no step has one."""
        return max((step for step in sorted(steps) if step in self), key=self.__getitem__, default=None)

    def in_words(self, step: int) -> str:
        return short_number(self.sign * self[step], 4)
