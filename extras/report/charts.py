"""Draws charts of runs: the Vega-Lite specs of charts.yaml, by charts.js in the page and by `write_png` into a file."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.files import read_metrics
from training.tracking import IN_WORDS

Spec = dict[str, Any]
Rows = list[dict[str, Any]]


@cache
def specs() -> dict[str, Any]:
    """Reads charts.yaml, whose entries nobody may change."""
    return yaml.load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def chart_specs(metrics: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the page's charts as {"id", "title", "names", "spec"}: the first to look at, of those of `metrics`, the
    names that the runs have; "metric", the spec of any metric; and "stages", the spec of the time by stage."""
    known = sorted(set(metrics))
    of_chart = {
        (chart, title): [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]
        for chart, title, patterns in specs()["first"]
    }
    charts = [(chart, title, names, "metric") for (chart, title), names in of_chart.items() if names]
    charts += [("metric", "", [], "metric"), ("stages", "Seconds of a step, by stage", [], "stages")]
    return [
        {"id": chart, "title": title, "names": names, "spec": specs()[kind]} for chart, title, names, kind in charts
    ]


def curve_spec(ylabel: str, title: str) -> Spec:
    """Returns the spec of curves with a title and a label of their values."""
    spec = deepcopy(specs()["metric"]) | {"title": title}
    for layer in spec["layer"]:
        layer["encoding"].get("y", {})["title"] = ylabel
    return spec


def curve_name(key: str) -> str:
    """Names a metric in words: "validation on FrozenLake-v1: success"; other keys stay as they are."""
    match key.split("/"):
        case ["critic", "score", "mean"]:
            return "training: mean reward"
        case ["val-core" | "val-aux", *source, measured, statistic]:
            among = "" if statistic == "mean@1" else f" ({statistic})"
            return f"validation on {'/'.join(source)}: {IN_WORDS.get(measured, measured)}{among}"
    return key


def curve_rows(curves: Mapping[str, Sequence[Sequence[float]]]) -> Rows:
    """Makes rows of curves: [points, 2], step and value, under the name of each."""
    return [
        {"step": float(step), "value": float(value), "series": name, "run": name}
        for name, points in curves.items()
        for step, value in points
        if value == value  # JSON has no NaN
    ]


def write_png(spec: Spec, rows: Rows, path: str | Path) -> None:
    """Draws a spec with its rows into a PNG; needs no browser. A width of "container" is one of 640 pixels."""
    import vl_convert  # 84 MB, and only needed here

    sized = {}
    if spec.get("width") == "container":  # as charts.js sets it
        series = {row["series"] for row in rows}
        columns = max(1, 640 // (40 + 6 * max(map(len, series), default=0)))
        scheme = {"category": {"scheme": "tableau10" if len(series) <= 10 else "tableau20"}}
        height = 290 + 14 * -(-len(series) // columns)
        sized = {"width": 640, "height": height, "config": {"legend": {"columns": columns}, "range": scheme}}
    drawn = {"background": "white", "padding": 10} | spec | sized | {"data": {"values": rows}}
    Path(path).write_bytes(vl_convert.vegalite_to_png(drawn, scale=1.5))


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
