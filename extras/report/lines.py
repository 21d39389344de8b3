"""Texts and plots for people: where a run's files are, printed samples, curves."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from configs.schema import TrainerConfig
from data.files import json_line, read_metrics
from extras.report.charts import curve_name, curve_rows, curve_spec, write_png
from training.checkpoint import CONFIG_FILE, find_checkpoint
from training.metric_utils import CORE_VARIABLES

METRICS_FILE = "metrics.jsonl"
SAMPLE_CHARACTERS = 2000  # longer texts of a printed sample lose their middle


def fields_table(fields: Mapping[str, Any]) -> Table:
    """Lays names and values out as two columns; colours in texts are shown."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        text = short_number(value) if isinstance(value, float | np.floating) else without_middle(str(value))
        # Not a plain string: [INST] in a text is no markup, and an escape sequence must not reach the terminal.
        table.add_row(name, Text.from_ansi(text))
    return table


def message_fields(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Turns chat messages into fields of a printed sample: role → content, numbered where a role repeats."""
    roles = [message["role"] for message in messages]
    names = [role if roles.count(role) == 1 else f"{role} {place}" for place, role in enumerate(roles, start=1)]
    return {name: message.get("content", "") for name, message in zip(names, messages, strict=True)}


def short_number(value: float) -> str:
    """Formats a number: two decimals, none if large, two digits if small: 1234, 12.35, 0.61, 0.0078, 7.8e-05."""
    if value and abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def plot_metric(metrics_jsonl_path: str | Path, keys: Sequence[str], png_path: str | Path) -> None:
    """Draws the metrics called `keys` over the steps of a record, under names for people, into a PNG.

    Raises ValueError for a key that the record does not have.
    """
    curves = {curve_name(key): read_curve(metrics_jsonl_path, key) for key in keys}
    quantities = dict.fromkeys(name.partition(":")[2].strip() or name for name in map(curve_name, keys))
    plot_curves(curves, " / ".join(quantities), png_path, title=Path(metrics_jsonl_path).absolute().parent.name)


def read_curve(metrics_jsonl_path: str | Path, key: str) -> np.ndarray:
    """Reads one metric as [points, 2], step and value. Raises ValueError if the record does not have it."""
    entries = read_metrics(metrics_jsonl_path)
    points = [(entry["step"], entry["data"][key]) for entry in entries if entry["data"].get(key) is not None]
    if not points:
        known = sorted({name for entry in entries for name in entry["data"]})
        raise ValueError(f"{metrics_jsonl_path} has no numbers for {key!r}; plot one of {known}")
    return np.array(points, dtype=float)


def plot_curves(curves: Mapping[str, np.ndarray], ylabel: str, png_path: str | Path, title: str) -> None:
    """Draws [points, 2] arrays of step and value, each under its name, into a PNG, as a report draws its curves."""
    write_png(curve_spec(ylabel, title), curve_rows(curves), png_path)


def without_middle(text: str) -> str:
    """Cuts a `text` that is longer than SAMPLE_CHARACTERS to its beginning and its end."""
    left_out = len(text) - SAMPLE_CHARACTERS
    if left_out <= 0:
        return text
    half = SAMPLE_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out} characters …\n{text[-half:]}"


def nothing_left(step: int, total_steps: int, validation: dict[str, float]) -> str:
    """Returns the lines of a run that was finished before it began: its last validation, and how to go on."""
    lines = [
        f"step {step} of {total_steps} is done, so nothing is left to do. To go on, raise trainer.total_training_steps "
        "(or total_epochs); to start afresh, set trainer.resume_mode=disable."
    ]
    lines += [f"  {name}: {short_number(value)}" for name, value in validation.items() if name.startswith("val-core/")]
    return "\n".join(lines)


def validation_summary(step: int, metrics: Mapping[str, float]) -> str:
    """Summarises a validation, a line for each data source: the means of acc, reward and return, where it has them.

    `acc` is the share of right answers or successful episodes, `reward` of an answer, `return` of an episode.
    """
    found: dict[str, list[str]] = {}
    names = re.compile(rf"val-\w+/(?P<source>.+)/(?P<variable>{'|'.join(CORE_VARIABLES)})/mean@\d+")
    for name, value in metrics.items():
        if match := names.fullmatch(name):
            found.setdefault(match["source"], []).append(f"{match['variable']} {value:.4g}")
    return "\n".join(f"validation at step {step}: {source}: {', '.join(means)}" for source, means in found.items())


def report_validation(step: int, metrics: dict[str, float], folder: str | None) -> dict[str, float]:
    """Prints every metric of a run that only validates, and adds a line to `folder`/validation_metrics.jsonl, if given.

    Returns `metrics`. The run's own folder is left alone: the run itself may be writing there.
    """
    print("\n".join(f"  {name}: {value:.6g}" for name, value in metrics.items()))
    if folder:
        with (Path(folder) / "validation_metrics.jsonl").open("ab") as record:
            record.write(json_line({"step": step, "data": metrics}))
    return metrics


def files_to_come(trainer: TrainerConfig, contents: Sequence[str]) -> str:
    """Returns the line that a run prints at its start: where its files will be, and which will be missing."""
    folder = trainer.default_local_dir
    if trainer.val_only:
        return f"trainer.val_only=true: nothing is written to {folder}."
    if trainer.dry_run:
        return f"trainer.dry_run=true: one small step without a weight change, and nothing is written to {folder}."
    written = f"files go to {folder}: {METRICS_FILE}, {CONFIG_FILE}"
    if trainer.save_freq <= 0:
        return (
            f"{written}. No checkpoint will be written, and the trained model is gone when the run ends: "
            "trainer.save_freq=N saves every N steps and after the last."
        )
    lacking = [part for part in ("model", "optimizer", "extra") if part not in contents]
    resume = f" (without {', '.join(lacking)} it cannot be resumed from)" if lacking else ""
    often = "step" if trainer.save_freq == 1 else f"{trainer.save_freq} steps and after the last"
    return f"{written}, and every {often} a checkpoint of {', '.join(contents)}{resume}."


def steps_lost(saved: int, step: int) -> str:
    """Says which steps are lost if a run whose step `saved` is its newest checkpoint ends after `step`."""
    return f"step {step} is lost" if step == saved + 1 else f"steps {saved + 1} to {step} are lost"


def ended_early(resume_mode: str, signal: str, step: int, total_steps: int, saved: int) -> str:
    """Returns the line that a run prints when a `signal` has ended it after `step`: how it goes on, or what is lost."""
    text = f"stopped by {signal} after step {step} of {total_steps}"
    if saved < step:
        return f"{text}, which could not be saved: {steps_lost(saved, step)}."
    again = "the same command" if resume_mode == "auto" else "the same command with trainer.resume_mode=auto"
    return f"{text}, which is saved: {again} goes on from it." if step < total_steps else f"{text}."


def files_left(folder: Path, saved: int, step: int) -> str:
    """Returns the line that a run prints at its end, after `step`: which of its files are there, where its model is,
    and what it has learnt since `saved`, its newest checkpoint."""
    there = [name for name in (METRICS_FILE, CONFIG_FILE, "samples", "tensorboard") if (folder / name).exists()]
    newest = find_checkpoint(folder, "auto", None)
    if newest is None:
        return f"{folder} has {', '.join(there)}, and no checkpoint."
    models = [newest / "actor" / "huggingface", newest / "huggingface"]  # where RL has it, and supervised training
    from_pretrained = [f" from_pretrained loads {model}." for model in models if any(model.glob("*.safetensors"))]
    unsaved = f" They are older than the run's end: {steps_lost(saved, step)}." if saved < step else ""
    return f"{folder} has {', '.join([*there, newest.name])}." + "".join(from_pretrained) + unsaved
