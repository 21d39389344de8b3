"""Printed samples as they are, and curves as a PNG."""

from collections import Counter

import numpy as np
import pytest

from extras.report import charts as reports
from extras.report.charts import plot_metric
from extras.report.show_episodes import print_records
from tests.test_tracking import start
from training.tracking import METRICS_FILE


def test_samples_are_printed_as_they_are(capsys):
    samples = [
        {"prompt": "\x1b[31mS\x1b[0mFFF \x1b[2J[bold]go[/INST]", "output": "left\nright", "score": 1.0},
        {"prompt": "x" * 10_000 + "END", "response": "", "score": np.float32(0.5), "ground_truth": None},
    ]
    print_records("validation rows at step 4", samples)
    output = capsys.readouterr().out
    for text in (
        "validation rows at step 4 · 1 of 2",
        "2 of 2",
        "SFFF [bold]go[/INST]",
        "prompt",
        "left",
        "1.00",
        "0.50",
    ):
        assert text in output
    assert "\x1b" not in output
    assert "8003 characters" in output and "END" in output
    assert output.count("x") < 2_100


def test_plot_draws_a_png_and_steps_over_gaps(tmp_path):
    with start(tmp_path) as track:
        for step in range(40):
            track.log(
                step, {"reward": float("nan") if step == 3 else step / 40} | ({"val": 0.5} if step % 9 == 0 else {})
            )
    plot_metric(tmp_path / METRICS_FILE, ["reward", "val"], tmp_path / "curve.png")
    content = (tmp_path / "curve.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 5_000


def test_plot_of_an_unknown_metric_names_the_known_ones(tmp_path):
    start(tmp_path).log(1, {"reward": 1.0, "broken": float("nan")})
    for key in ("rewrad", "broken"):
        with pytest.raises(ValueError, match=rf"no numbers for '{key}'; plot one of \['broken', 'reward'\]"):
            plot_metric(tmp_path / METRICS_FILE, [key], tmp_path / "curve.png")


def test_a_plot_says_what_it_shows(tmp_path, monkeypatch):
    acc = "val-core/maze/acc/mean@1"
    with start(tmp_path / "lake") as track:
        for step in range(40):
            track.log(step, {"critic/score/mean": step / 40} | ({acc: step / 50} if step % 10 == 0 else {}))
    drawn = []
    monkeypatch.setattr(reports, "write_png", lambda *arguments: drawn.append(arguments))
    plot_metric(tmp_path / "lake" / METRICS_FILE, ["critic/score/mean", acc], tmp_path / "curve.png")
    [(spec, rows, path)] = drawn
    assert spec["title"] == "lake" and path == tmp_path / "curve.png"
    assert {layer["encoding"]["y"]["title"] for layer in spec["layer"][:4]} == {"mean reward / success"}
    assert Counter(row["series"] for row in rows) == {"training: mean reward": 40, "validation on maze: success": 4}
