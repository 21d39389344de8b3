"""The record of a run and what is shown of it: real files, a real terminal, failures injected."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from configs.errors import ConfigError
from configs.schema import Config, TrainerConfig
from data.files import read_metrics
from data.types import Observer
from tests.runs import files_of_at_most
from training import tracking
from training.tracking import METRICS_FILE, Observers, observers_of

ROOT = Path(__file__).parent.parent
OF_EXTRAS = ("extras.report.observer", "extras.watch.health")


class Log:
    """The observers of a run whose steps are logged as numbers."""

    def __init__(
        self, folder: str | Path, logger: Any = (), resume_step: int = 0, total_steps: int = 10, **settings: Any
    ) -> None:
        names = {"project_name": "project", "experiment_name": "experiment", "default_local_dir": str(folder)}
        self.run = Namespace(
            config=Config(trainer=TrainerConfig(logger=logger, **names, **settings)),
            folder=Path(folder),
            total_steps=total_steps,
            tokenizer=None,
            global_step=resume_step,
        )
        self.observers = Observers(self.run)
        self.observers.observers = [one for one in self.observers.observers if type(one).__module__ not in OF_EXTRAS]
        self.observers.started(resume_step)

    def log(self, step: int, data: Mapping[str, float]) -> None:
        self.observers.stepped(step, None, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.observers.__exit__(*error)


start = Log  # with start(folder) as track: …


def recorded_steps(folder: Path) -> list[int]:
    """Lists the recorded steps; every line must be whole JSON here, unlike for `read_metrics`."""
    return [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_each_step_is_one_line_with_its_numbers_in_full_precision(tmp_path):
    folder = tmp_path / "outputs" / "run"
    with start(folder) as track:
        track.log(0, {"val-core/maze/reward/mean@1": 0.1})
        track.log(1, {"a": 1 / 3, "count": 3, "np": np.float32(0.1), "tensor": torch.tensor(2.5), "flag": np.True_})
        assert (folder / METRICS_FILE).read_bytes().count(b"\n") == 2  # already there while the run goes on
    assert read_metrics(folder / METRICS_FILE) == [
        {"step": 0, "data": {"val-core/maze/reward/mean@1": 0.1}},
        {"step": 1, "data": {"a": 1 / 3, "count": 3.0, "np": float(np.float32(0.1)), "tensor": 2.5, "flag": 1.0}},
    ]


def test_non_finite_numbers_are_null_in_strict_json(tmp_path):
    start(tmp_path).log(1, {"nan": float("nan"), "inf": -np.inf, "x": 1.0})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=refuse)
    assert line["data"] == {"nan": None, "inf": None, "x": 1.0}


@pytest.mark.parametrize("value", ["high", None, [1.0, 2.0]])
def test_a_metric_that_is_no_number_is_refused_before_anything_is_written(tmp_path, value):
    track = start(tmp_path)
    with pytest.raises(TypeError, match="metric 'mood' is"):
        track.log(1, {"x": 1.0, "mood": value})
    assert not (tmp_path / METRICS_FILE).exists()


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_is_recorded_once_and_in_order(tmp_path, step):
    track = start(tmp_path)
    track.log(2, {"x": 1.0})
    with pytest.raises(AssertionError, match=f"step {step} was logged after step 2"):
        track.log(step, {"x": 2.0})
    assert recorded_steps(tmp_path) == [2]


def write_run(folder: Path, steps: range, torn: bytes = b"") -> bytes:
    with start(folder) as track:
        for step in steps:
            track.log(step, {"x": float(step)})
    with (folder / METRICS_FILE).open("ab") as file:
        file.write(torn)
    return (folder / METRICS_FILE).read_bytes()


@pytest.mark.parametrize("torn", [b"", b"{", b'{"step": 6, "data": {"x": 0.', b"\x00\x00\x00"])
def test_a_resumed_run_has_each_step_once(tmp_path, torn):
    before = write_run(tmp_path, range(6), torn)
    with start(tmp_path, resume_step=3) as track:
        assert recorded_steps(tmp_path) == [0, 1, 2, 3]
        track.log(4, {"x": 40.0})
    assert recorded_steps(tmp_path) == [0, 1, 2, 3, 4]
    assert read_metrics(tmp_path / METRICS_FILE)[-1]["data"] == {"x": 40.0}
    assert (tmp_path / f"{METRICS_FILE}.bak-1").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [METRICS_FILE, f"{METRICS_FILE}.bak-1"]


def test_a_fresh_start_sets_earlier_records_aside(tmp_path):
    first = write_run(tmp_path, range(3))
    second = write_run(tmp_path, range(2))
    third = write_run(tmp_path, range(1))
    assert (tmp_path / f"{METRICS_FILE}.bak-1").read_bytes() == first
    assert (tmp_path / f"{METRICS_FILE}.bak-2").read_bytes() == second
    assert (tmp_path / METRICS_FILE).read_bytes() == third


def test_metrics_that_a_full_disk_does_not_take_wait_and_none_is_lost(tmp_path, caplog):
    with start(tmp_path) as track:
        track.log(1, {"x": 1.0})
        with files_of_at_most((tmp_path / METRICS_FILE).stat().st_size + 5):
            track.log(2, {"x": 2.0})
            track.log(3, {"x": 3.0})
        assert recorded_steps(tmp_path) == [1]
        assert caplog.text.count("metrics wait in memory from step 2 on") == 1
        track.log(4, {"x": 4.0})
        assert recorded_steps(tmp_path) == [1, 2, 3, 4]
        with files_of_at_most((tmp_path / METRICS_FILE).stat().st_size):
            track.log(5, {"x": 5.0})
    assert recorded_steps(tmp_path) == [1, 2, 3, 4, 5]  # written as the run ended


def test_a_run_that_ends_on_a_full_disk_says_which_metrics_are_lost(tmp_path):
    track = start(tmp_path)
    track.log(1, {"x": 1.0})
    with (
        files_of_at_most((tmp_path / METRICS_FILE).stat().st_size),
        pytest.raises(OSError, match=rf"{METRICS_FILE} lacks its last 2 steps: .*File too large"),
        track,
    ):
        track.log(2, {"x": 2.0})
        track.log(3, {"x": 3.0})
    assert recorded_steps(tmp_path) == [1]


def test_an_unknown_logger_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.logger has 'comet': choose from console, .*mlflow, .*file"):
        start(tmp_path / "run", ["console", "comet"])
    assert not (tmp_path / "run").exists()


def test_an_observer_that_the_disk_fails_ends_and_the_others_go_on(tmp_path, caplog):
    class Counting(Observer):
        def __init__(self, last_step: int) -> None:
            self.last_step, self.steps = last_step, []

        def stepped(self, step, batch, metrics) -> None:
            if step > self.last_step:
                raise OSError("No space left on device")
            self.steps.append(step)

    track, short, long = start(tmp_path), Counting(1), Counting(9)
    track.observers.observers = [short, long]
    for step in (1, 2, 3):
        track.log(step, {"x": 1.0})
    assert (short.steps, long.steps, recorded_steps(tmp_path)) == ([1], [1, 2, 3], [1, 2, 3])
    assert caplog.text.count("Counting ends before step 2: No space left on device") == 1
    track.observers.observers, long.last_step, long.decides = [long], 3, True
    with pytest.raises(OSError, match="No space left"):  # the run depends on it
        track.log(4, {"x": 1.0})
    assert recorded_steps(tmp_path) == [1, 2, 3, 4]


def test_an_observer_that_cannot_close_does_not_keep_the_others_open(tmp_path):
    class Closing(Observer):
        def __init__(self, problem: Exception | None) -> None:
            self.problem, self.error = problem, None

        def ended(self, error) -> None:
            self.error = error
            if self.problem:
                raise self.problem

    for failing in (0, 1):
        track = start(tmp_path / str(failing))
        track.observers.observers = both = [Closing(OSError("gone") if place == failing else None) for place in (0, 1)]
        with pytest.raises(OSError, match="gone"), track:
            raise KeyError
        assert all(isinstance(one.error, KeyError) for one in both)


def test_an_observer_of_the_users_is_named_by_its_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from data.types import Observer\nclass Mine(Observer):\n    pass\n")
    *_, mine = observers_of(Config(trainer=TrainerConfig(logger=["file", f"{file}:Mine"])))
    assert mine.__name__ == "Mine"


STEP = {
    "critic/score/mean": 0.614,
    "actor/entropy": 0.8312,
    "actor/grad_norm": 0.00091,
    "response_length/mean": 1234.4,
    "timing_s/step": 2.149,
    "response_length/max": 2000.0,
}


def test_without_a_terminal_the_console_prints_plain_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tracking, "PLAIN_LINE_SECONDS", 0.0)
    with start(tmp_path, ["console"], total_steps=2) as track:
        track.log(0, {"val-core/maze/reward/mean@4": 0.25, "val-core/maze/reward/best@4/mean": 0.5})
        print("a line of other code")
        track.log(1, STEP)
        track.log(2, {"actor/entropy_loss": 1.0, "val-core/a/acc/mean@1": 0.25, "val-core/b/acc/mean@1": 0.75})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["step 0/2  validation reward 0.25 at step 0", "a line of other code"]
    headline = (
        "step 1/2  reward 0.61 (mean of the batch)  entropy 0.83  grad_norm 0.00091  length 1234 tokens  2.15 s/step  "
        "validation reward 0.25 at step 0  eta "
    )
    assert re.fullmatch(re.escape(headline) + r"\d+ s", lines[2])
    assert lines[3:] == ["step 2/2  entropy 1.00  validation success 0.50 (mean of 2 sources) at step 2"]


def test_the_time_left_is_that_of_the_median_step_and_of_the_validations_to_come(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tracking, "PLAIN_LINE_SECONDS", 0.0)
    with start(tmp_path, ["console"], total_steps=5, test_freq=2) as track:
        track.log(0, {"timing_s/start": 600.0, "timing_s/testing": 10.0})
        for step, seconds in ((1, 2.0), (2, 40.0), (3, 2.0)):
            track.log(step, {"timing_s/step": seconds})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("eta ")[2] for line in lines] == ["", "38 s", "83 s", "24 s"]  # after step 1: 4 · 2 + 3 · 10


def test_plain_lines_are_rare_but_show_validations_and_the_last_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tracking, "PLAIN_LINE_SECONDS", float("inf"))
    with start(tmp_path, "console", total_steps=6) as track:
        for step in range(1, 7):
            track.log(step, {"val-core/maze/reward/mean@1": 0.5} if step == 3 else STEP)
    steps = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1/6", "3/6", "6/6"]


def run_on_a_terminal(program: str) -> tuple[int, str]:
    """Exit status and output of a python program that runs on a terminal."""
    ours, theirs = pty.openpty()
    given = {"cwd": ROOT, "env": {**os.environ, "TERM": "xterm", "COLUMNS": "120"}}
    process = subprocess.Popen([sys.executable, "-c", program], **given, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    while chunk := read_terminal(ours):
        output += chunk
    os.close(ours)
    return process.wait(), output.decode()


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the program on the other side has ended
        return b""


HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def test_on_a_terminal_there_is_a_bar_that_survives_prints_and_exceptions(tmp_path):
    """The bar is taken down even if a run ends by an exception and nobody closes it."""
    program = f"""
import sys
from tests.test_tracking import STEP, start
from rich.console import Console
track = start({str(tmp_path)!r}, "console")
track.log(1, STEP)
print("a line of other code")
print("and one on stderr", file=sys.stderr)
Console().print("left [/INST]", markup=False, highlight=False)
track.log(2, STEP)
raise RuntimeError("out of memory")
"""
    status, output = run_on_a_terminal(program)
    assert status == 1
    for text in ("step 1/10", "a line of other code\r\n", "and one on stderr\r\n", "left [/INST]", "step 2/10"):
        assert text in output
    assert "━" in output
    assert "RuntimeError: out of memory" in output
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1
    assert output.rindex(SHOW_CURSOR) > output.rindex("step 2/10")


def test_on_a_terminal_a_stage_that_takes_long_says_so_until_it_is_over_but_not_over_a_debugger(tmp_path):
    program = f"""
import bdb, time
from tests.test_tracking import start
from training import tracking
from training.metric_utils import timer
tracking.LONG_SECONDS = 1.0
track = start({str(tmp_path)!r}, "console")
with timer("testing", {{}}), timer("gen", {{}}):
    time.sleep(2.5)
track.log(1, {{"x": 1.0}})
with timer("step", {{}}), timer("gen", {{}}):
    time.sleep(2.5)
with timer("reward", {{}}):
    exec("import time; time.sleep(2.5)", {{"__name__": "bdb"}})
track.observers.ended(None)
"""
    status, output = run_on_a_terminal(program)
    assert status == 0 and output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1
    assert re.search(r"validation for \d s.*step 1/10 .*step 1/10  generation for \d s", output, re.DOTALL)
    assert "reward for" not in output


def test_a_run_that_only_validates_tells_of_it_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tracking, "SILENT_SECONDS", 0.5)
    with start(tmp_path).observers.validating():
        time.sleep(1.3)
    assert re.fullmatch(r"(step 0/10  validation for \d s\n)+", capsys.readouterr().out)
