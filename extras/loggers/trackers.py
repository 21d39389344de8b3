"""Loggers of accelerate.tracking as observers: each gets the whole config, and the metrics of every step.

A run that is started again is a new run at the services. TensorBoard's files are in <folder>/tensorboard; what an
earlier run wrote after the resumed step is hidden there.
"""

from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

from accelerate import PartialState, tracking

from configs.errors import ConfigError
from data.protocol import DataProto
from data.types import Observer


class TensorBoard(Observer):
    package = "torch.utils.tensorboard"

    @classmethod
    def check(cls, config: Any) -> None:
        try:
            import_module(cls.package)
        except ModuleNotFoundError as error:
            name = cls.package.rpartition(".")[2]
            raise ConfigError(
                f"trainer.logger has {name!r}: {error}. `pip install {name}`, or leave it out."
            ) from error

    def make(self, step: int) -> tracking.GeneralTracker:
        """Makes the tracker of a run that goes on after `step`."""
        return tracking.TensorBoardTracker("tensorboard", self.run.folder, purge_step=step + 1 if step else 0)

    def started(self, step: int) -> None:
        self.project, self.name = self.run.config.trainer.project_name, self.run.config.trainer.experiment_name
        self.config = asdict(self.run.config)
        PartialState(cpu=True)  # trackers ask it; the GPU is the workers'
        self.tracker = self.make(step)
        self.tracker.start()

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        self.tracker.log(dict(metrics), step)

    def ended(self, error: BaseException | None) -> None:
        if self.tracker is not None:
            self.tracker.finish()

    tracker: tracking.GeneralTracker | None = None


class Wandb(TensorBoard):
    package = "wandb"

    def make(self, step: int) -> tracking.GeneralTracker:
        return tracking.WandBTracker(self.project, name=self.name, config=self.config, dir=str(self.run.folder))

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        self.tracker.log(dict(metrics), step, commit=True)  # else it holds each row back until the next one comes

    def ended(self, error: BaseException | None) -> None:
        if self.tracker is not None:
            self.tracker.tracker.finish(exit_code=int(error is not None))


class MLflow(TensorBoard):
    package = "mlflow"

    def make(self, step: int) -> tracking.GeneralTracker:
        return tracking.MLflowTracker(self.project, run_name=self.name)

    def started(self, step: int) -> None:
        super().started(step)
        import_module("mlflow").log_dict(self.config, "config.json")

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        self.tracker.log({name.replace("@", "_at_"): value for name, value in metrics.items()}, step)  # it refuses an @

    def ended(self, error: BaseException | None) -> None:
        if self.tracker is not None:
            import_module("mlflow").end_run("FINISHED" if error is None else "FAILED")


class Trackio(TensorBoard):
    package = "trackio"

    def make(self, step: int) -> tracking.GeneralTracker:
        return tracking.TrackioTracker(self.project, name=self.name, config=self.config)


class SwanLab(TensorBoard):
    package = "swanlab"

    def make(self, step: int) -> tracking.GeneralTracker:
        folder = str(self.run.folder / "swanlab")
        return tracking.SwanLabTracker(self.project, experiment_name=self.name, config=self.config, logdir=folder)
