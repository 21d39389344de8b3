"""Texts and plots for people: printed samples, curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from data.files import read_metrics
from extras.report.charts import curve_name, curve_rows, curve_spec, write_png
from training.tracking import short_number

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
