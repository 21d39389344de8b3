"""Loggers of accelerate.tracking as observers: each gets the whole config, and the metrics of every step.

A run that goes on is the same run at W&B, MLflow and Trackio, by its id in <folder>/SERVICE.id. TensorBoard's files are
in <folder>/tensorboard; what an earlier run wrote after the resumed step is hidden there.
"""

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from accelerate import PartialState, tracking

from configs.errors import ConfigError
from configs.settings import safe_settings, words_without_secrets
from data.protocol import DataProto
from data.types import Observer
from training.checkpoint import flatten


class TensorBoard(Observer):
    package = "torch.utils.tensorboard"

    def make(self, step: int, known: str | None) -> tracking.GeneralTracker:
        """Makes the tracker of a run that goes on after `step`, and is `known` to the service by this id."""
        return tracking.TensorBoardTracker("tensorboard", self.run.folder, purge_step=step + 1 if step else 0)

    def started(self, step: int) -> None:
        self.project, self.name = self.run.config.trainer.project_name, self.run.config.trainer.experiment_name
        self.config = safe_settings(self.run.config)
        PartialState(cpu=True)  # trackers ask it; the GPU is the workers'
        sys.argv = words_without_secrets(sys.argv, type(self.run.config))  # which services note
        path = self.run.folder / f"{self.package}.id"
        known = path.read_text() if step and path.exists() else None
        try:
            tracker = self.make(step, known)
            tracker.start()
        except Exception as error:  # each service has errors of its own
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            again = f" Without {path} it is a new run there." if known else ""
            raise ConfigError(f"trainer.logger has {self.package!r}, which does not start: {reason}.{again}") from error
        self.tracker = tracker
        if known is None:
            self.describe()
        if (name := self.id()) is not None:
            path.write_text(str(name))

    def describe(self) -> None:
        """Tells the service the settings of a new run, beyond what `make` does."""

    def id(self) -> Any:
        """Returns the name by which the service knows the run; None: it cannot go on there."""
        return None

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        self.tracker.log(dict(metrics), step)

    def ended(self, error: BaseException | None) -> None:
        if self.tracker is not None:
            self.tracker.finish()

    tracker: tracking.GeneralTracker | None = None


class Wandb(TensorBoard):
    package = "wandb"

    def make(self, step: int, known: str | None) -> tracking.GeneralTracker:
        more = {"id": known, "resume": "allow"} if known else {}
        return tracking.WandBTracker(self.project, name=self.name, config=self.config, dir=str(self.run.folder), **more)

    def id(self) -> Any:
        return self.tracker.tracker.id

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        self.tracker.log(dict(metrics), step, commit=True)  # else it holds each row back until the next one comes

    def ended(self, error: BaseException | None) -> None:
        if self.tracker is not None:
            self.tracker.tracker.finish(exit_code=int(error is not None))


class MLflow(TensorBoard):
    package = "mlflow"
    logged = -1  # the last step that the run of this id has; W&B itself leaves out steps that it has

    def make(self, step: int, known: str | None) -> tracking.GeneralTracker:
        if known:
            history = import_module("mlflow").MlflowClient().get_metric_history(known, "training/seconds")
            self.logged = max((entry.step for entry in history), default=-1)
        return tracking.MLflowTracker(self.project, run_name=self.name, run_id=known)

    def describe(self) -> None:
        import_module("mlflow").log_dict(self.config, "config.json")
        settings = {re.sub(r"[^\w./ -]", "_", key): value for key, value in flatten(self.config)}
        self.tracker.store_init_configuration(settings)

    def id(self) -> Any:
        return self.tracker.tracker.info.run_id

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        if step > self.logged:
            self.tracker.log({name.replace("@", "_at_"): value for name, value in metrics.items()}, step)  # not an @

    def ended(self, error: BaseException | None) -> None:
        if self.tracker is not None:
            import_module("mlflow").end_run("FINISHED" if error is None else "FAILED")


class Trackio(TensorBoard):
    package = "trackio"

    def make(self, step: int, known: str | None) -> tracking.GeneralTracker:
        resume = "allow" if known else "never"
        return tracking.TrackioTracker(self.project, name=known or self.name, config=self.config, resume=resume)

    def id(self) -> Any:
        return self.name


class SwanLab(TensorBoard):
    package = "swanlab"

    def make(self, step: int, known: str | None) -> tracking.GeneralTracker:
        folder = str(self.run.folder / "swanlab")
        return tracking.SwanLabTracker(self.project, experiment_name=self.name, config=self.config, logdir=folder)

    def ended(self, error: BaseException | None) -> None:
        if self.tracker is not None:
            failure = {"state": "crashed", "error": type(error).__name__} if error is not None else {}
            self.tracker.tracker.finish(**failure)
