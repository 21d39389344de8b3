"""Writes the metrics of a run to metrics.jsonl, and shows them in views.

The record is `metrics.jsonl` in the run's folder, one line a step, and the source of truth: it is written first and
needs no network. The views (a console line or progress bar, tensorboard, and services) are told the same numbers
afterwards, and those that have tables the samples that are kept of a validation.
Left out: artifacts at the services, which get a new run each time training is started.
"""

import atexit
import importlib
import inspect
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import pandas
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from configs.schema import Config
from data.files import append, json_line, read_metrics, rewrite
from extras.report.charts import IN_WORDS
from extras.report.lines import METRICS_FILE, short_number

SAMPLES = "validation_samples"  # the name of their table
SAMPLE_COLUMNS = ("input", "output", "gts", "score", "end_reason")
PLAIN_LINE_SECONDS = 10.0  # without a terminal, at most one line in so many seconds, so that logs stay short

# What the console shows of a step: a template, and the metric or metrics that fill it.
HEADLINES = (
    ("reward {} (mean of the batch)", ("critic/score/mean",)),
    ("loss {} (per token)", ("train/loss",)),
    ("entropy {}", ("actor/entropy", "actor/entropy_loss")),
    ("grad_norm {}", ("actor/grad_norm", "train/grad_norm")),
    ("length {} tokens", ("response_length/mean",)),
    ("{} s/step", ("timing_s/step",)),
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run that a view opens with."""

    folder: Path
    project_name: str
    experiment_name: str
    config: Mapping[str, Any]  # all of it as plain dicts, for the services that store it
    resume_step: int  # the last step that is kept; 0: a fresh start
    total_steps: int  # the last step, for the progress and the time left


@runtime_checkable
class SampleView(Protocol):
    """Is a view that has tables: it is given the samples that are kept of a validation, before that step's `log`."""

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Shows records of samples (extras/report/transcripts.py)."""


class Tracking:
    """Sends each step's metrics to the record and then to the views. Use it as a context manager, or `close()` it.

    A run that resumes at step k continues the record after step k; with k = 0 the record starts empty. The record as
    it was is kept beside it as metrics.jsonl.bak-N whenever that takes anything away.

    Args:
        run: its folder is made if it does not exist.
        logger: names of views, from `VIEWS`, or none; verl's "file" is the record, which is always written.

    Raises:
        ValueError: an unknown name in `logger`, or one whose package is not installed.
    """

    def __init__(self, run: RunInfo, logger: str | Sequence[str] | None) -> None:
        names = check_loggers(logger)
        run.folder.mkdir(parents=True, exist_ok=True)
        self.views = [VIEWS[name](run) for name in names]
        self.record = MetricsFile(run.folder, run.resume_step)

    @classmethod
    def of_run(cls, config: Config, resume_step: int, total_steps: int) -> Self:
        """Opens the tracking of a run in its folder, from `resume_step` on."""
        trainer = config.trainer
        run = RunInfo(
            folder=Path(trainer.default_local_dir),
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            config=asdict(config),
            resume_step=resume_step,
            total_steps=total_steps,
        )
        return cls(run, trainer.logger)

    def log(self, step: int, data: Mapping[str, float]) -> None:
        """Records the metrics of `step`, once and in ascending order; step 0 is what was known before training.

        Raises AssertionError for a step that is not after the last one, TypeError for a value that is no number.
        """
        numbers = {name: _as_float(name, value) for name, value in data.items()}
        self.record.log(step, numbers)
        shown = [view for view in self.views if isinstance(view, SampleView)]
        samples = read_metrics(self.record.path.parent / f"samples/validation/{step}.jsonl") if shown else []
        for view in [*self.views]:
            try:
                if samples and view in shown:
                    view.log_samples(step, samples)
                view.log(step, numbers)
            except OSError as error:  # a full disk, for one: the numbers are in the record
                logger.warning("%s ends before step %d: %s", type(view).__name__, step, error)
                self.views.remove(view)

    def close(self, failed: bool = False) -> None:
        """Closes the record and every view, even if one of them raises; `failed` marks the run so at the services."""
        with ExitStack() as stack:
            stack.callback(self.record.close)
            for view in self.views:
                stack.callback(view.close, failed)
        self.views = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self.close(failed=error_type is not None)


class MetricsFile:
    """metrics.jsonl: `{"step": N, "data": {name: number}}`, NaN and infinities as null, on disk when `log` returns.

    If the disk is full, lines are kept in memory, and every later `log` tries again.

    Args:
        folder: of the run.
        resume_step: the last step that is kept; 0: none, a fresh start.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        self.path = folder / METRICS_FILE
        last_kept = resume_step or -1  # a fresh start repeats step 0 as well
        kept = [entry for entry in read_metrics(self.path) if entry["step"] <= last_kept]
        rewrite(self.path, b"".join(map(json_line, kept)))
        last = kept[-1] if kept else {"step": -1, "data": {}}
        self.last_step = last["step"]
        self.seconds_before = last["data"].get("training/seconds", 0.0)  # of training, until that step
        self.waiting: list[bytes] = []  # lines that are not on disk

    def log(self, step: int, data: Mapping[str, float]) -> None:
        assert step > self.last_step, (
            f"step {step} was logged after step {self.last_step}: the record has each step once, in ascending order; "
            "gather all metrics of a step and log them together"
        )
        self.last_step = step
        self.waiting.append(json_line({"step": step, "data": data}))
        try:
            self.write()
        except OSError as error:
            if len(self.waiting) == 1:
                logger.warning("metrics wait in memory from step %d on, until they can be written: %s", step, error)

    def write(self) -> None:
        """Writes the waiting lines to disk, in order; raises OSError at the first that fails."""
        while self.waiting:
            append(self.path, self.waiting[0])
            del self.waiting[0]

    def close(self) -> None:
        """Writes the lines that still wait; raises OSError if they are lost."""
        try:
            self.write()
        except OSError as error:
            raise OSError(f"{self.path} lacks its last {len(self.waiting)} steps: {error}") from error


class ConsoleView:
    """The numbers that matter: under a progress bar on a terminal, else as a plain line now and then.

    The bar is drawn by `log` alone (no thread that would paint over a debugger), and what other code prints in the
    meantime appears above it.
    """

    module = "rich"

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.start = time.monotonic()
        self.last_line = -math.inf
        self.validation: str | None = None
        self.progress: Progress | None = None
        console = Console()
        if sys.stdout.isatty() and console.is_interactive:
            columns = BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
            self.progress = Progress(*columns, console=console, auto_refresh=False)
            self.task = self.progress.add_task("", total=run.total_steps)
            atexit.register(self.progress.stop)  # a bar that is never closed would leave the cursor hidden

    def log(self, step: int, data: Mapping[str, float]) -> None:
        validation = validation_headline(data)
        if validation:
            self.validation = f"{validation} at step {step}"
        line = "  ".join(self._headlines(step, data))
        now = time.monotonic()
        if self.progress:
            self.progress.start()
            self.progress.update(self.task, completed=step, description=line, refresh=True)
        elif validation or step == self.run.total_steps or now - self.last_line >= PLAIN_LINE_SECONDS:
            print(line, flush=True)
            self.last_line = now

    def close(self, failed: bool) -> None:
        if self.progress:
            self.progress.stop()
            atexit.unregister(self.progress.stop)

    def _headlines(self, step: int, data: Mapping[str, float]) -> Iterator[str]:
        yield f"step {step}/{self.run.total_steps}"
        for template, names in HEADLINES:
            values = [data[name] for name in names if name in data]
            if values:
                yield template.format(short_number(values[0]))
        if self.validation:
            yield self.validation
        done, left = step - self.run.resume_step, self.run.total_steps - step
        if done > 0 and left > 0:
            yield f"eta {_duration((time.monotonic() - self.start) / done * left)}"


def validation_headline(data: Mapping[str, float]) -> str | None:
    """Summarises a validation among the metrics of a step: "validation success 0.85"; None: there was none."""
    if "val/loss" in data:
        return f"validation loss {short_number(data['val/loss'])}"
    means = {name: value for name, value in data.items() if name.startswith("val-core/") and "/mean@" in name}
    if not means:
        return None
    names = dict.fromkeys(name.split("/")[-2] for name in means)
    measured = "/".join(IN_WORDS.get(name, name) for name in names)
    several = f" (mean of {len(means)} sources)" if len(means) > 1 else ""
    return f"validation {measured} {short_number(sum(means.values()) / len(means))}{several}"


class TensorBoardView:
    """Scalars in <folder>/tensorboard; what an earlier run logged after the resumed step is hidden."""

    module = "torch.utils.tensorboard"

    def __init__(self, run: RunInfo) -> None:
        first_step = run.resume_step + 1 if run.resume_step else 0
        tensorboard = importlib.import_module(self.module)
        self.writer = tensorboard.SummaryWriter(str(run.folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, data: Mapping[str, float]) -> None:
        for name, value in data.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, failed: bool) -> None:
        self.writer.close()


def sample_table(records: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Lays records of samples out as columns of texts."""
    return {name: [str(record.get(name, "")) for record in records] for name in SAMPLE_COLUMNS}


class WandbView:
    """A new W&B run with the whole config."""

    module = "wandb"

    def __init__(self, run: RunInfo) -> None:
        self.wandb = importlib.import_module(self.module)
        self.wandb_run = self.wandb.init(
            project=run.project_name, name=run.experiment_name, config=dict(run.config), dir=str(run.folder)
        )

    def log(self, step: int, data: Mapping[str, float]) -> None:
        # With a step but no commit, W&B holds each row back until the next one comes.
        self.wandb_run.log(dict(data), step=step, commit=True)

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        rows = [*map(list, zip(*sample_table(records).values(), strict=True))]
        table = self.wandb.Table(columns=[*SAMPLE_COLUMNS], data=rows)
        self.wandb_run.log({SAMPLES: table}, step=step, commit=False)

    def close(self, failed: bool) -> None:
        self.wandb_run.finish(exit_code=int(failed))


class MlflowView:
    """A new MLflow run, at the server or folder that MLflow itself is set to; the config is its config.json."""

    module = "mlflow"

    def __init__(self, run: RunInfo) -> None:
        self.mlflow = importlib.import_module(self.module)
        self.mlflow.set_experiment(run.project_name)
        self.mlflow.start_run(run_name=run.experiment_name)
        self.mlflow.log_dict(dict(run.config), "config.json")

    def log(self, step: int, data: Mapping[str, float]) -> None:
        # MLflow refuses names with an @.
        self.mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in data.items()}, step=step)

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        self.mlflow.log_table(sample_table(records), f"{SAMPLES}/{step}.json")

    def close(self, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


class TrackioView:
    """A new Trackio run with the whole config."""

    module = "trackio"

    def __init__(self, run: RunInfo) -> None:
        self.trackio = importlib.import_module(self.module)
        self.trackio.init(project=run.project_name, name=run.experiment_name, config=dict(run.config))

    def log(self, step: int, data: Mapping[str, float]) -> None:
        self.trackio.log(dict(data), step=step)

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        table = self.trackio.Table(dataframe=pandas.DataFrame(sample_table(records)))
        self.trackio.log({SAMPLES: table}, step=step)

    def close(self, failed: bool) -> None:
        self.trackio.finish()


class SwanLabView:
    """A new SwanLab experiment with the whole config."""

    module = "swanlab"

    def __init__(self, run: RunInfo) -> None:
        self.swanlab = importlib.import_module(self.module)
        names = {"project": run.project_name, "experiment_name": run.experiment_name}
        self.swanlab.init(**names, config=dict(run.config), logdir=str(run.folder / "swanlab"))

    def log(self, step: int, data: Mapping[str, float]) -> None:
        self.swanlab.log(dict(data), step=step)

    def close(self, failed: bool) -> None:
        self.swanlab.finish()


VIEWS = {
    "console": ConsoleView,
    "tensorboard": TensorBoardView,
    "wandb": WandbView,
    "mlflow": MlflowView,
    "trackio": TrackioView,
    "swanlab": SwanLabView,
}


def check_loggers(logger: str | Sequence[str] | None) -> list[str]:
    """Checks that each name in `logger` is known and its package installed; returns them once each, without "file"."""
    names = dict.fromkeys([logger] if isinstance(logger, str) else logger or ())
    names.pop("file", None)
    for name in names:
        if name not in VIEWS:
            raise ValueError(f"trainer.logger has {name!r}: choose from {', '.join([*VIEWS, 'file'])}")
        try:
            importlib.import_module(inspect.getattr_static(VIEWS[name], "module", "rich"))  # yours may need none
        except ModuleNotFoundError as error:
            raise ValueError(
                f"trainer.logger has {name!r}, which needs a package that is not installed ({error}): "
                f"`pip install {name}`, or take it out of trainer.logger ({METRICS_FILE} is written in any case)"
            ) from error
    return list(names)


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is {value!r}: log one number a name, texts go into dump_jsonl") from error


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
