"""A sweep does one run after another, past one that fails, and does again only what has not finished."""

import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from configs.checks import check_config
from configs.errors import ConfigError
from configs.loader import CONFIG_DIR, Arguments, checked_config
from configs.schema import Config
from extras.sweep.sweep import SweptRun, figures, plan, swept_values
from tests.forked import Run
from tests.processes import children_of, until
from tests.runs import short_run

PATIENCE = 240  # seconds
RATE = "actor_rollout_ref.actor.optim.lr"
LIBRARY = """
import os, sys, time
from pathlib import Path
from training.ray_trainer import RayPPOTrainer as Trainer

FOLDER, step = Path({folder!r}), Trainer.step

def slipping(self):
    settings = self.config.trainer
    (FOLDER / f"started_{{time.time()}}").write_text(settings.default_local_dir)
    if settings.seed == 1 and self.config.actor_rollout_ref.actor.optim.lr == 3e-3 and not (FOLDER / "mended").exists():
        raise ValueError("a slip\\nin two lines")
    if (FOLDER / "waits").exists():
        (FOLDER / "here").touch()
        time.sleep(2)
    return step(self)

Trainer.step = slipping
"""


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Callable[..., Run]:
    """start(settings…): a sweep of runs of two steps below tmp_path/lake; seed 1 with a rate of 3e-3 slips, until there
    is a file "mended"."""

    def started(*more: str) -> Run:
        library = tmp_path / "library.py"
        library.write_text(LIBRARY.format(folder=str(tmp_path)))
        settings = short_run(tiny_model, tmp_path / "lake", "trainer.total_training_steps=2", "trainer.test_freq=2")
        library_setting = f"actor_rollout_ref.model.external_lib={library}"
        return Run("main.py", "-m", "--config-name", "frozenlake", *settings, library_setting, *more)

    return started


def states(output: str) -> dict[str, str]:
    """Returns the ends of the runs, by the name of their folder."""
    head, *lines = output[output.rindex("\nseed ") :].strip().splitlines()
    rows = [line for line in lines if line[:1].isdigit()]
    return {"seed={},lr={}".format(*row.split()[:2]): row[head.index("state") :] for row in rows}


def begun(folder: Path) -> list[str]:
    """Names the runs that have begun a step since the last call."""
    marks = [*folder.glob("started_*")]
    names = {Path(mark.read_text()).name for mark in marks}
    for mark in marks:
        mark.unlink()
    return sorted(names)


def planned(*overrides: str, name: str = "frozenlake") -> list[SweptRun]:
    arguments = Arguments(name, CONFIG_DIR, list(overrides), print_config=False, multirun=True)
    return plan(arguments, partial(checked_config, schema=Config, check=check_config))


@pytest.mark.slow
def test_a_sweep_goes_past_a_failure_and_the_same_command_does_only_that_run_again(start, tmp_path):
    swept = "trainer.seed=range(2)", f"{RATE}=1e-3,3e-3"
    names, failing = [f"seed={seed},lr={rate}" for seed in range(2) for rate in (0.001, 0.003)], "seed=1,lr=0.003"
    first = start(*swept).wait(PATIENCE)
    assert first.returncode == 1 and begun(tmp_path) == names, first.stderr
    assert states(first.stdout) == dict.fromkeys(names, "finished") | {failing: "failed: a slip"}
    assert first.stderr.count("notice: run seed=1 lr=0.003 failed: a slip\n") == 1
    assert "run 2 of 4: seed=0 lr=0.003\n" in first.stdout

    (tmp_path / "mended").touch()
    again = start(*swept).wait(PATIENCE)
    assert again.returncode == 0 and begun(tmp_path) == [failing], again.stderr
    assert states(again.stdout) == dict.fromkeys(names, "skipped: finished before") | {failing: "finished"}
    folder = tmp_path / "lake/sweep"
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", *names]
    info = json.loads((folder / failing / "run.json").read_text())
    assert f"trainer.default_local_dir='{folder / failing}'" in info["starts"][-1]["command"]
    assert not {"-m", *swept} & {*info["starts"][-1]["command"]}


def test_one_signal_ends_the_run_after_its_step_and_the_sweep_with_its_table(start, tmp_path):
    (tmp_path / "waits").touch()
    sweep = start("trainer.seed=0,1", f"{RATE}=1e-3,2e-3", "trainer.save_freq=100")
    until((tmp_path / "here").exists)
    for pid in [sweep.pid, *children_of(sweep.pid)]:  # as a terminal does
        os.kill(pid, signal.SIGINT)
    done = sweep.wait(PATIENCE)
    assert done.returncode == 1 and begun(tmp_path) == ["seed=0,lr=0.001"], done.stderr
    assert (tmp_path / "lake/sweep/seed=0,lr=0.001/global_step_1").is_dir()
    assert [*states(done.stdout).values()] == ["stopped: ended by Ctrl-C", *["not started"] * 3]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.seed=0,1,-1"], "run seed=-1: trainer.seed=-1 must be at least 0"),
        (["trainer.seeds=0,1"], "run seeds=0: unknown key 'trainer.seeds'. Did you mean 'trainer.seed'?"),
        (["recipe=dapo,dappo"], "run recipe=dappo: recipe=dappo: no such recipe"),
        (["trainer.seed=0,0"], "two runs would have the folder outputs/frozenlake/sweep/seed=0"),
        (["trainer.seed=1"], "--multirun: no setting has several values"),
        ([f"{RATE}=interval(0,1)"], "a run each cannot be made of it"),
        (["trainer.default_local_dir=a,b"], "a run each cannot be made of it"),
        (["recipe=glob(x*)"], "there is no such value"),
    ],
)
def test_all_runs_are_checked_before_one_starts(overrides, said, capsys):
    with pytest.raises(ConfigError, match=re.escape(said)):
        planned(*overrides)
    assert capsys.readouterr() == ("", "")


def test_runs_have_the_names_of_what_differs():
    runs = planned("trainer.seed=0,1", "critic.optim.lr=1e-3,2e-3", f"{RATE}=0.1,0.2", "algorithm.adv_estimator=gae")
    assert len(runs) == 8 and [*runs[1].values] == ["trainer.seed", "critic.optim.lr", "actor.optim.lr"]
    run = planned("trainer.seed=0,1", "env.kwargs.map_name=4x4,8x8")[1]
    assert run.config.trainer.default_local_dir == "outputs/frozenlake/sweep/seed=0,map_name=8x8"
    assert run.config.trainer.experiment_name == "frozenlake seed=0 map_name=8x8"
    assert run.config.env.kwargs["map_name"] == "8x8" and run.config.trainer.seed == 0


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("trainer.seed=range(0,6,3)", ["trainer.seed=0", "trainer.seed=3"]),
        ("trainer.logger=[a],[b,console]", ["trainer.logger=[a]", "trainer.logger=[b,console]"]),
        ("recipe=glob(dr*)", ["recipe=dr_grpo"]),
        ("+data.own='a,b','c'", ["+data.own='a,b'", "+data.own='c'"]),
        ("trainer.logger=[console,tensorboard]", []),
        ("data.train_files=~/a (1).jsonl", []),
    ],
)
def test_values_are_read_as_hydra_reads_them(text, values):
    assert swept_values(text, CONFIG_DIR) == values


def test_a_run_is_finished_by_its_settings_only(tmp_path):
    def run(*overrides: str) -> SweptRun:
        return planned("trainer.seed=0,1", f"trainer.default_local_dir={tmp_path}", *overrides)[0]

    run().folder.mkdir(parents=True)
    run().mark.write_text(run().settings)
    assert run().is_finished()
    assert not any(run(more).is_finished() for more in ("trainer.total_epochs=9", "trainer.resume_mode=disable"))
    assert run().trains() and not run("trainer.val_only=true").trains()


def test_a_loss_is_best_where_it_is_lowest_and_a_score_where_it_is_highest(tmp_path):
    def figures_of(*steps: dict[str, float | None]) -> list[str]:
        lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        return figures(tmp_path)

    core = "val-core/task/acc/mean@1"
    assert figures_of({core: 0.25}, {core: 0.75}, {core: 0.5}, {"training/seconds": 90}) == ["0.5", "0.75", "3", "1.5"]
    assert figures_of({"val/loss": 0.5}, {"val/loss": 0.25}, {"val/loss": None}) == ["0.25", "0.25", "2", "0.0"]
    assert figures_of() == ["-", "-", "0", "0.0"]
