"""Runs a command once for each combination of settings, one after another: `python main.py -m trainer.seed=0,1,2 …`.

A run is a fork of this process, which loads neither torch nor Ray, and has a folder of its own. Its finished.json has
the settings by which it has finished.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from configs.errors import ConfigError, first_line, latest, notice, noticed, refusals
from configs.extras import is_here
from configs.loader import Arguments, options
from configs.paths import ROOT
from configs.settings import safe_settings, with_settings
from data.files import headline_means, read_metrics, replacing
from extras.restarts import restarts

DONE, DONE_BEFORE = "finished", "skipped: finished before"
LONGEST_NAME, LONGEST_REASON = 200, 1000  # letters: of a folder; of a line that fits a pipe
FOLDER = "trainer.default_local_dir"
Compose = Callable[[Arguments], Any]  # makes a checked config, or raises ConfigError


@dataclass
class SweptRun:
    """A run of a sweep: the value of each setting that differs, by a short name, its config, and how it has ended."""

    values: dict[str, str]
    arguments: Arguments
    config: Any
    state: str = "not started"

    @property
    def folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir)

    @property
    def mark(self) -> Path:
        return self.folder / "finished.json"

    @property
    def settings(self) -> str:
        return json.dumps(safe_settings(self.config), default=str)

    def is_finished(self) -> bool:
        """Says whether it has finished by these very settings, and is not to start anew."""
        is_anew = self.config.trainer.resume_mode == "disable"
        return not is_anew and self.mark.is_file() and self.mark.read_text() == self.settings

    def trains(self) -> bool:
        trainer = self.config.trainer
        return trainer.action == "train" and not trainer.get("val_only")


def sweep(arguments: Arguments, compose: Compose, start: Callable[[Any], None]) -> None:
    """Does each run that has not finished by `start`, and ends this process; returns in a child that has done one.

    Raises:
        SystemExit: 0 if all are finished, else 1; 2 if one is refused, before any has started.
    """
    with refusals():
        runs = plan(arguments, compose)
    restarts.control(restarts.PR_SET_CHILD_SUBREAPER, 1)
    for number, run in enumerate(runs, 1):
        print(f"run {number} of {len(runs)}: {title(run.values)}", flush=True)
        if run.is_finished():
            run.state = DONE_BEFORE
            continue
        reader, writer = os.pipe()
        child, signals = restarts.start_child()
        if child == 0:
            words = ["--config-path", str(arguments.config_dir), "--config-name", arguments.config_name]
            sys.orig_argv[1 - len(sys.argv) :] = sys.argv[1:] = words + run.arguments.overrides  # of this run alone
            with ExitStack() as stack:
                stack.push(partial(send_reason, writer))
                with refusals():
                    config = compose_run(run.values, run.arguments, compose)
                return start(config)
        os.close(writer)
        if not wait_for(run, child, signals, reader):
            break
    print(table(runs), flush=True)
    write_report([run.folder.resolve() for run in runs if (run.folder / "metrics.jsonl").is_file()])
    raise SystemExit(any(run.state not in (DONE, DONE_BEFORE) for run in runs))


def plan(arguments: Arguments, compose: Compose) -> list[SweptRun]:
    """Composes and checks every run. The folders of all are in that which the first would have by itself."""
    swept = {text: values for text in arguments.overrides if (values := swept_values(text, arguments.config_dir))}
    if not swept:
        raise ConfigError("--multirun: no setting has several values, as in trainer.seed=0,1,2.")
    fixed, keys = [text for text in arguments.overrides if text not in swept], short_names([*swept])
    runs: dict[str, SweptRun] = {}
    for chosen in product(*swept.values()):
        values = dict(zip(keys, (text.partition("=")[2] for text in chosen), strict=True))
        if not runs:
            first = check_run(values, replace(arguments, overrides=[*fixed, *chosen]), compose)
            if first.trainer.get("default_local_dir") is None:
                raise ConfigError("--multirun: this command writes no folder of a run, so there is none to sweep.")
        folder = f"{first.trainer.default_local_dir}/sweep/{folder_name(values)}"
        if folder in runs:
            raise ConfigError(f"--multirun: two runs would have the folder {folder}: leave out one of the values.")
        quoted = folder.replace("'", r"\'")
        of_run = replace(arguments, overrides=[*fixed, *chosen, f"{FOLDER}='{quoted}'"])
        runs[folder] = SweptRun(values, of_run, check_run(values, of_run, compose))
    return [*runs.values()]


def swept_values(text: str, folder: Path) -> list[str]:
    """Returns an override for each value of one that has several, as Hydra reads them; of others, none."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:  # the loader reads it as a text, or says what is wrong
        return []
    if not override.is_sweep_override():
        return []
    key, value = override.get_key_element(), override.value()
    if not override.is_discrete_sweep() or override.key_or_group == FOLDER:
        raise ConfigError(f"{text}: a run each cannot be made of it: name values, or the one folder of the sweep.")
    is_glob = isinstance(value, Glob)
    values = value.filter(options(override.key_or_group, folder)) if is_glob else override.sweep_string_iterator()
    overrides = [f"{key}={item}" for item in values]
    if not overrides:
        raise ConfigError(f"{text}: there is no such value.")
    return overrides


def short_names(texts: Sequence[str]) -> list[str]:
    """Shortens the keys of overrides to as many of their last parts as tell them apart."""
    parts = [text.partition("=")[0].lstrip("+").split(".") for text in texts]
    lengths = range(1, max(map(len, parts)) + 1)
    shortened = [[".".join(key[-length:]) for key in parts] for length in lengths]
    return next((names for names in shortened if len({*names}) == len(names)), shortened[-1])


def title(values: Mapping[str, str], separator: str = " ") -> str:
    return separator.join(f"{name}={value}" for name, value in values.items())


def folder_name(values: Mapping[str, str]) -> str:
    return re.sub(r"[^\w.,=+-]", "_", title(values, ","))[:LONGEST_NAME]


def compose_run(values: Mapping[str, str], arguments: Arguments, compose: Compose) -> Any:
    """Makes a run's config, with a name of its own at the loggers; folders named after the experiment stay."""
    config = compose(arguments)
    name = config.trainer.get("experiment_name")
    return config if name is None else with_settings(config, {"trainer.experiment_name": f"{name} {title(values)}"})


def check_run(values: Mapping[str, str], arguments: Arguments, compose: Compose) -> Any:
    """Makes a run's config without a notice, as the run gives them when it starts. Raises ConfigError with its name."""
    try:
        with redirect_stderr(StringIO()):
            return compose_run(values, arguments, compose)
    except ConfigError as error:
        raise ConfigError(f"run {title(values)}: {error}", error.key) from error
    finally:
        latest.clear()
        noticed.clear()


def send_reason(pipe: int, _kind: type | None, error: BaseException | None, _trace: object) -> None:
    """Writes in one line why the run in this process fails."""
    cause = error.__cause__ if isinstance(error, SystemExit) else error  # a refusal ends by SystemExit
    if cause is not None:
        reason = first_line(cause) if str(cause).strip() else type(cause).__name__
        os.write(pipe, f"{reason[:LONGEST_REASON]}\n".encode(errors="backslashreplace"))


def wait_for(run: SweptRun, child: int, signals: int, reasons: int) -> bool:
    """Notes how the run in a child ends; returns whether the next may start: nobody has asked for the end."""
    if run.trains():
        run.mark.unlink(missing_ok=True)
    code, is_asked, _ = restarts.watch(child, signals)
    os.set_blocking(reasons, False)
    *_, reason = ["", *restarts.read(reasons).decode().splitlines()]  # of the last of its restarts
    os.close(reasons)
    if code:
        restarts.end_descendants()
        how = restarts.in_words_of(code).removeprefix("was ")
        run.state = f"stopped: {how}" if is_asked else f"failed: {reason or how}"
        notice(f"run {title(run.values)} {run.state}")
        return not is_asked
    run.state = DONE
    if run.trains():
        with replacing(run.mark) as file:
            file.write(run.settings.encode())
    return not is_asked


def table(runs: Sequence[SweptRun]) -> str:
    """Lists the settings that differ, validations, steps, minutes of training, and how each run ended."""
    head = [*runs[0].values, "last validation", "best validation", "steps", "minutes", "state"]
    rows = [head, *([*run.values.values(), *figures(run.folder), run.state] for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def figures(folder: Path) -> list[str]:
    """Returns the last and the best validation in a run's record, its steps and its minutes."""
    entries = read_metrics(folder / "metrics.jsonl")
    steps, data = (entries[-1]["step"], entries[-1]["data"]) if entries else (0, {})
    validations = [means for entry in entries if (means := headline_means(entry["data"]))]
    scores = [fmean(values) for means in validations if (values := [v for v in means.values() if v is not None])]
    best = min if any("val/loss" in means for means in validations) else max
    ends = [scores[-1], best(scores)] if scores else []
    minutes = data.get("training/seconds", 0.0) / 60
    return [*(f"{score:.4g}" for score in ends), *["-"] * (2 - len(ends)), str(steps), f"{minutes:.1f}"]


def write_report(folders: Sequence[Path]) -> None:
    """Writes one page of the runs beside their folders, by the report's own command."""
    if folders and is_here("extras.report"):
        page = folders[0].with_name("report.html")
        subprocess.run([sys.executable, "-m", "extras.report", *folders, "--out", page], cwd=ROOT)
