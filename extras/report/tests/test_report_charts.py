"""Charts of a report, as Vega draws them: read off its scene graph, and as PNGs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import vl_convert

from extras.report.charts import curve_rows, plot_metric, specs
from tests.test_tracking import start
from training.tracking import METRICS_FILE


def marks(mark: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a mark of a scene graph and all that are inside its items."""
    yield mark
    for item in mark["items"]:
        for inner in item.get("items", []):
            yield from marks(inner)


def layers(spec: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, list[list[dict[str, Any]]]]:
    """Draws a chart; the items of its marks, by the mark's name or role."""
    scene = vl_convert.vegalite_to_scenegraph(spec | {"width": 600, "height": 300, "data": {"values": rows}})
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for mark in marks(scene["scenegraph"]):
        found.setdefault(mark.get("name") or mark.get("role"), []).append(mark["items"])
    return found


def heights(items: list[dict[str, Any]]) -> np.ndarray:
    return np.array([item["y"] for item in items])


def test_the_mean_is_over_a_tenth_of_the_points_and_begins_with_the_first():
    values = np.arange(40.0) ** 2
    drawn = layers(specs()["metric"], curve_rows({"a": [*enumerate(values)]}))
    [raw], [smooth] = drawn["layer_0_marks"], drawn["layer_3_marks"]
    slope, offset = np.polyfit(heights(raw), values, 1)
    smoothed = slope * heights(smooth) + offset
    assert smoothed[20] == pytest.approx(np.mean([18**2, 19**2, 20**2, 21**2, 22**2]))
    assert smoothed[[0, 1, 2]] == pytest.approx([0, np.mean([0, 1, 4]), np.mean([0, 1, 4, 9, 16])])
    assert smoothed[[-1, -2, -3]] == pytest.approx([np.mean(values[-5:])] * 3)  # not the last raw point
    assert [item["opacity"] for item in drawn["legend-symbol"][0]] == [1]


def test_runs_of_one_series_are_a_mean_in_a_band_of_a_standard_deviation():
    rows = [
        {"step": step, "value": step + 2.0 * run, "series": "lr=0.5 [a]", "run": f"seed {run}"}
        for run in range(2)
        for step in range(30 - 10 * run)
    ]
    drawn = layers(specs()["metric"], rows)
    assert len(drawn["layer_0_marks"]) == 2  # the runs, faint
    [band], [mean] = drawn["layer_2_marks"], drawn["layer_3_marks"]
    assert (len(band), len(mean)) == (20, 30)  # of the steps that both have; the mean goes on alone
    [first, *_] = band
    assert (first["y"] + first["y2"]) / 2 == pytest.approx(mean[0]["y"])
    assert abs(first["y"] - first["y2"]) == pytest.approx(2 * abs(mean[1]["y"] - mean[2]["y"]))  # ± 1


def test_plot_of_an_unknown_metric_names_the_known_ones(tmp_path):
    start(tmp_path).log(1, {"reward": 1.0, "broken": float("nan")})
    for key in ("rewrad", "broken"):
        with pytest.raises(ValueError, match=rf"no numbers for '{key}'; plot one of \['broken', 'reward'\]"):
            plot_metric(tmp_path / METRICS_FILE, [key], tmp_path / "curve.png")
