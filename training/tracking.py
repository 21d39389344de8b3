"""Watches a run: `Observers` calls its record, metrics.jsonl, then the extras' and those of trainer.logger.

An observer is a class of data/types.py: Observer; the terminal's is `ConsoleLine`.
"""

import atexit
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import mean, median
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from configs.checks import logger_names
from configs.errors import latest
from configs.extras import has, present
from configs.import_utils import asked_for, find
from configs.process import in_notebook
from data.files import FolderLost, append, headline_means, json_line, read_metrics, rewrite
from data.protocol import DataProto
from data.types import Observer
from training.metric_utils import stages_begun, timer

METRICS_FILE = "metrics.jsonl"
PLAIN_LINE_SECONDS = 10.0  # without a terminal, at most one line in so many seconds, so that logs stay short
LONG_SECONDS = 10.0  # of a stage, from which on a terminal tells how long it has run
SILENT_SECONDS = 60.0  # without a line, after which a log is told so
STAGES_IN_WORDS = {"testing": "validation", "gen": "generation"}
IN_WORDS = {"acc": "success"}  # verl's name → what people read

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


class Observers(Observer):
    """The observers of a run, which are called as one; closed as a context manager, even if one of them raises."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.record = Record(run)
        self.observers = [kind(run) for kind in observers_of(run.config)]

    def started(self, step: int) -> None:
        for observer in (self.record, *self.observers):
            observer.started(step)

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        numbers = {name: as_float(name, value) for name, value in metrics.items()}
        self.record.stepped(step, batch, numbers)
        for observer in [*self.observers]:
            try:
                observer.stepped(step, batch, numbers)
            except OSError as error:  # such as a full disk; the record has the numbers
                if observer.decides:
                    raise
                logger.warning("%s ends before step %d: %s", type(observer).__name__, step, error)
                self.observers.remove(observer)

    def validated(self, step: int, batches: Sequence[DataProto], metrics: Mapping[str, float]) -> None:
        for observer in self.observers:
            observer.validated(step, batches, metrics)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Tells on the console for how long a validation has run that is all the run does."""
        console = ConsoleLine(self.run)
        with timer("testing", {}), ExitStack() as stack:
            stack.callback(console.ended, None)
            console.started(0)
            yield

    def ended(self, error: BaseException | None) -> None:
        with ExitStack() as stack:
            for observer in (self.record, *self.observers):
                stack.callback(observer.ended, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self.ended(error)


def observers_of(config: Any) -> list[type[Observer]]:
    """Finds the observers of a run beside its record; verl's logger "file" is the record, which is always written."""
    loggers = [find("logger", name, "trainer.logger") for name in logger_names(config)]
    callbacks = dict.fromkeys(asked_for("callback", config))
    return [*callbacks, *(find("observer", name) for name in present("observer")), *loggers]


def check_observers(config: Any) -> None:
    """Raises ConfigError for observers that cannot work: a package or a folder is missing."""
    for observer in observers_of(config):
        observer.check(config)


def as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is {value!r}: log one number a name") from error


class Record(Observer):
    """metrics.jsonl: `{"step": N, "data": {name: number}}`, NaN and infinities as null, on disk when `stepped` returns.

    A run that resumes at step k continues it after step k; with k = 0 it starts empty. What that takes away is kept
    beside it as metrics.jsonl.bak-N. If the disk is full, lines are kept in memory, and every later step tries again.

    Attributes:
        last_step: the last step in it.
        seconds_before: of training, until the step at which the run started.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.path = run.folder / METRICS_FILE
        self.last_step, self.seconds_before = -1, 0.0
        self.waiting: list[bytes] = []  # lines that are not on disk

    def started(self, step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        last_step = step or -1  # a fresh start repeats step 0 as well
        entries = [entry for entry in read_metrics(self.path) if entry["step"] <= last_step]
        rewrite(self.path, b"".join(map(json_line, entries)))
        if entries:
            self.last_step = entries[-1]["step"]
            self.seconds_before = entries[-1]["data"].get("training/seconds", 0.0)

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        assert step > self.last_step, (
            f"step {step} was logged after step {self.last_step}: the record has each step once, in ascending order"
        )
        self.last_step = step
        self.waiting.append(json_line({"step": step, "data": metrics}))
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

    def ended(self, error: BaseException | None) -> None:
        """Writes the lines that still wait; raises OSError if they are lost."""
        if isinstance(error, FolderLost):
            return
        try:
            self.write()
        except OSError as problem:
            raise OSError(f"{self.path} lacks its last {len(self.waiting)} steps: {problem}") from problem


class ConsoleLine(Observer):
    """The numbers that matter: beside a progress bar on a terminal and in a notebook, else as a line now and then.

    What other code prints in the meantime appears above the bar. A thread tells of a stage that takes long: on a
    terminal by its seconds, in a log by a line after a minute without any.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.last_line = -math.inf  # by time.time(), as notices are
        self.line = ""  # of the last step, as it is beside the bar
        self.step_seconds: list[float] = []
        self.validation_seconds = 0.0
        self.validation: str | None = None
        self.progress: Progress | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._tell_of_stages, daemon=True)

    def started(self, step: int) -> None:
        console, columns = Console(), (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
        if in_notebook() or (sys.stdout.isatty() and console.is_interactive):
            kind = find("optional", "CellProgress") if in_notebook() and has("optional", "CellProgress") else Progress
            self.progress = kind(*columns, console=console, auto_refresh=False)
            self.task = self.progress.add_task("", total=self.run.total_steps, completed=step)
            atexit.register(self.progress.stop)  # a bar that is never closed would leave the cursor hidden
        self.thread.start()

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        validation = validation_headline(metrics)
        self.step_seconds += [metrics["timing_s/step"]] if "timing_s/step" in metrics else []
        self.validation_seconds = metrics.get("timing_s/testing", self.validation_seconds)
        if validation:
            self.validation = f"{validation} at step {step}"
        self.line = "  ".join(self._headlines(step, metrics))
        if self.progress:
            self._draw(self.line, completed=step)
        elif validation or step == self.run.total_steps or time.time() - self.last_line >= PLAIN_LINE_SECONDS:
            print(self.line, flush=True)
            self.last_line = time.time()

    def ended(self, error: BaseException | None) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        if self.progress:
            self.progress.stop()
            atexit.unregister(self.progress.stop)

    def _draw(self, description: str, **change: Any) -> None:
        self.progress.start()
        self.progress.update(self.task, description=description, refresh=True, **change)

    def _tell_of_stages(self) -> None:
        """Says every second, until the run is over, for how long the present stage has run, if that is long."""
        while not self.over.wait(1.0):
            stage, seconds = present_stage()
            if self.progress and not is_debugged():
                text = f"{stage} for {seconds:.0f} s" if seconds >= LONG_SECONDS else ""
                description = "  ".join(filter(None, (self.line, text)))
                if description != self.progress.tasks[0].description:
                    self._draw(description)
            last_output = max(self.last_line, latest[-1].created if latest else -math.inf)  # a notice says who waits
            if not self.progress and seconds > SILENT_SECONDS and time.time() - last_output > SILENT_SECONDS:
                print(f"step {self.run.global_step}/{self.run.total_steps}  {stage} for {seconds:.0f} s", flush=True)
                self.last_line = time.time()

    def _headlines(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        yield f"step {step}/{self.run.total_steps}"
        for template, names in HEADLINES:
            values = [metrics[name] for name in names if name in metrics]
            if values:
                yield template.format(short_number(values[0]))
        if self.validation:
            yield self.validation
        total, frequency = self.run.total_steps, self.run.config.trainer.test_freq
        if self.step_seconds and step < total:
            validations = -(-total // frequency) - step // frequency if frequency > 0 else 0
            seconds = median(self.step_seconds) * (total - step) + self.validation_seconds * validations
            yield f"eta {short_duration(seconds)}"


def present_stage() -> tuple[str, float]:
    """Returns the outermost stage of the present step, in words, and the seconds that it has run so far."""
    stages = [(name, began) for name, began in stages_begun.copy().items() if name != "step"]
    name, began = stages[0] if stages else ("", time.perf_counter())
    return STAGES_IN_WORDS.get(name, name), time.perf_counter() - began


def is_debugged() -> bool:
    """Says whether the main thread is in a debugger, over whose prompt nothing may be painted."""
    stack = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
    return any(frame.f_globals.get("__name__") == "bdb" for frame, _ in stack)


def validation_headline(data: Mapping[str, float]) -> str | None:
    """Summarises a validation among the metrics of a step: "validation success 0.85"; None: there was none."""
    means = headline_means(data)
    if not means:
        return None
    names = dict.fromkeys(name.partition("/mean@")[0].rpartition("/")[2] for name in means)
    metrics = "/".join(IN_WORDS.get(name, name) for name in names)
    several = f" (mean of {len(means)} sources)" if len(means) > 1 else ""
    return f"validation {metrics} {short_number(mean(means.values()))}{several}"


def short_number(value: float, digits: int = 2) -> str:
    """Formats a number with `digits` decimals, none if large, as many digits if small: 1234, 12.35, 0.61, 7.8e-05."""
    if value and abs(value) < 10**-digits:
        return f"{value:.{digits}g}"
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.0f}"


def short_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
