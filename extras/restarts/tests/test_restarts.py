"""A run that is killed is started again and is the unbroken run; what does not pass is left alone. Real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import ConfigError
from data.files import read_metrics
from tests.forked import Run
from tests.processes import PATIENCE, children_of, is_alive, until
from tests.runs import ROOT, compose, learning_metrics, short_run, state_files

RUN = """
from extras.restarts import restarts
restarts.SHORT_PAUSE, restarts.FIRST_PAUSES, restarts.END_SECONDS, restarts.IN_ALL = 0.1, {75: 0.2}, 2.0, 3
from main import main
main()
"""
# What happens in a step, once each: `happen(where, step)` is called at four moments of it.
LIBRARY = """
import os, signal, subprocess, time
from pathlib import Path
from configs.errors import MayPass
from training.ray_trainer import RayPPOTrainer as Trainer
from training.run import Run

FOLDER, WHAT = Path({folder!r}), {what!r}
(FOLDER / f"start_{{time.time()}}").touch()

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def fail(error):
    raise error

def happen(where, step):
    marker = FOLDER / f"{{where}}_{{step}}"
    if (action := WHAT.get(f"{{where}} {{step}}")) and not (marker.exists() and not action.startswith("always: ")):
        marker.touch()
        eval(action.removeprefix("always: "))

def patch(owner, name, where, after):
    original = getattr(owner, name)
    def method(self, *args):
        if not after:
            happen(where, self.global_step)
        result = original(self, *args)
        if after:
            happen(where, self.global_step)
        return result
    setattr(owner, name, method)

patch(Run, "resume", "start", True)
patch(Trainer, "after_step", "updated", True)
patch(Run, "write_state", "written", True)
patch(Run, "log", "named", False)
patch(Trainer, "check_updates", "logged", True)
"""


def command(tiny_model: Path, folder: Path, what: dict[str, str], *more: str) -> list[str]:
    """Settings of a run of five steps, each of them saved, in which `what` happens; where it happened is in markers."""
    folder.mkdir(exist_ok=True)
    library = folder.with_suffix(".py")
    library.write_text(LIBRARY.format(folder=str(folder), what=what))
    settings = short_run(tiny_model, folder, "trainer.total_training_steps=5", "trainer.save_freq=1", *more)
    return ["--config-name", "frozenlake", *settings, f"actor_rollout_ref.model.external_lib={library}"]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Callable[..., Run]:
    """start(what, settings…) starts a run in tmp_path/run in which `what` happens, with three restarts."""

    def started(what: dict[str, str], *more: str) -> Run:
        settings = command(tiny_model, tmp_path / "run", what, "trainer.max_restarts=3", *more)
        return Run("-c", RUN, *settings)

    return started


def starts(folder: Path) -> int:
    return len([*folder.glob("start_*.*")])


def test_a_run_that_is_killed_at_several_moments_is_the_unbroken_run(start, tiny_model: Path, tmp_path: Path):
    moments = ["start 0", "updated 2", "written 3", "named 4", "logged 5"]
    killed = start(dict.fromkeys(moments, "kill()")).wait(PATIENCE)
    unbroken = Run("main.py", *command(tiny_model, tmp_path / "unbroken", {})).wait(PATIENCE)
    assert (killed.returncode, unbroken.returncode) == (0, 0), killed.stderr + unbroken.stderr
    assert starts(tmp_path / "run") == 6 and starts(tmp_path / "unbroken") == 1
    assert killed.stderr.count("was ended by SIGKILL after step") == 5
    run, other = tmp_path / "run", tmp_path / "unbroken"
    assert [entry["step"] for entry in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert learning_metrics(run) == learning_metrics(other)
    assert state_files(run, 5) == state_files(other, 5)


@pytest.mark.parametrize(
    ("what", "code", "count"),
    [
        ({}, 0, 1),
        ({"updated 2": "fail(ValueError('a slip'))"}, 1, 1),
        ({"updated 2": "fail(__import__('configs.errors').errors.ConfigError('a refusal'))"}, 2, 1),
        ({"updated 2": "fail(MayPass('the server is away'))"}, 0, 2),
        ({"updated 2": "always: fail(MayPass('the server is away'))"}, 75, 4),  # each restart, as it may pass yet
        ({"updated 2": "always: kill()"}, -signal.SIGKILL, 2),  # the same again: it does not pass
        ({"updated 2": "os._exit(1)"}, 0, 2),  # as Ray does in a process that has lost it
        ({"updated 2": "os.kill(os.getpid(), signal.SIGTERM)"}, -signal.SIGTERM, 1),
    ],
    ids=["done", "slip", "refusal", "passing", "not passing", "killed twice", "Ray's exit", "asked"],
)
def test_what_may_pass_is_tried_again_and_the_command_ends_as_the_run(start, tmp_path, what, code, count):
    done = start(what).wait(PATIENCE)
    assert (done.returncode, starts(tmp_path / "run")) == (code, count), done.stderr
    assert ("is not started again" in done.stderr) == (code == -signal.SIGKILL)


@pytest.mark.parametrize(("error", "code"), [("MayPass('away')", 75), ("ValueError('a slip')", 1)])
def test_exit_codes_are_the_same_without_restarts(tiny_model, tmp_path, error, code):
    """A run without restarts shows the user's line that raised, by its own exit code; tests/test_interrupt.py has
    signals and refusals."""
    done = Run("main.py", *command(tiny_model, tmp_path / "run", {"updated 1": f"fail({error})"})).wait(PATIENCE)
    assert done.returncode == code and "run.py" in done.stderr


def test_restarts_without_a_checkpoint_are_counted(start, tmp_path):
    what = {f"updated {step}": "kill()" for step in (1, 2, 3, 4)}
    done = start(what, "trainer.save_freq=5", "trainer.max_restarts=2").wait(PATIENCE)
    assert done.returncode == -signal.SIGKILL and starts(tmp_path / "run") == 3
    assert "trainer.max_restarts=2 times since its last checkpoint" in done.stderr


def test_restarts_are_counted_in_all_however_many_checkpoints_there_were(start, tmp_path):
    done = start({f"named {step}": "kill()" for step in range(1, 6)}, "trainer.max_restarts=1").wait(PATIENCE)
    assert done.returncode == -signal.SIGKILL and starts(tmp_path / "run") == 4
    assert "again 3 times trainer.max_restarts=1. The same command goes on from its last checkpoint" in done.stderr
    assert (tmp_path / "run/global_step_4").is_dir()


@pytest.mark.parametrize("both", [False, True], ids=["to the command", "to both processes"])
def test_a_signal_reaches_the_run_once(start, tmp_path, both):
    """A terminal and a batch system signal both processes; a second signal would kill the run before it has saved."""
    waits = f"[Path({str(tmp_path / 'here')!r}).touch(), time.sleep(2)]"
    run = start({"updated 2": waits}, "trainer.save_freq=100")
    until((tmp_path / "here").exists)
    for pid in [run.pid, *children_of(run.pid) * both]:
        os.kill(pid, signal.SIGTERM)
    done = run.wait(PATIENCE)
    assert done.returncode == -signal.SIGTERM and done.stderr.count("step 2 is saved when it is done") == 1
    assert (tmp_path / "run/global_step_2").is_dir() and starts(tmp_path / "run") == 1


def test_a_run_saves_and_ends_when_its_parent_is_killed(start, tmp_path):
    run = start({"updated 2": f"[Path({str(tmp_path / 'here')!r}).touch(), time.sleep(2)]"}, "trainer.save_freq=100")
    until((tmp_path / "here").exists)
    [child] = children_of(run.pid)
    os.kill(run.pid, signal.SIGKILL)
    error = os.dup(run.output[1].fileno())  # the child writes to it yet
    run.wait(PATIENCE)
    until(lambda: not is_alive(child))
    assert (tmp_path / "run/global_step_2").is_dir()
    assert b"step 2 is saved" in (text := os.pread(error, 1 << 20, 0)) and b"BrokenPipe" not in text
    os.close(error)


def test_what_a_dead_run_leaves_behind_is_ended_once_that_is_said(start, tmp_path):
    """A process outlives the run and ignores SIGTERM, as Ray's agents do while they wait for a dead server."""
    leave = (
        f"[Path({str(tmp_path / 'left')!r}).write_text(str(subprocess.Popen(['env', '--ignore-signal=TERM', 'sleep', "
        "'9999'], start_new_session=True).pid)), kill()]"
    )
    run = start({"updated 2": leave})
    until(lambda: "It is started again" in run.said()[1])
    left = int((tmp_path / "left").read_text())
    assert is_alive(left)
    assert run.wait(PATIENCE).returncode == 0 and not is_alive(left)


@pytest.mark.slow
def test_the_process_that_waits_has_not_loaded_torch(tiny_model, tmp_path):
    here = tmp_path / "here"
    settings = command(tiny_model, tmp_path / "run", {"start 0": f"[Path({str(here)!r}).touch(), time.sleep(9999)]"})
    run = subprocess.Popen([sys.executable, "main.py", *settings, "trainer.max_restarts=1"], cwd=ROOT)
    try:
        until(here.exists)
        [child] = children_of(run.pid)
        loaded = [("libtorch" in Path(f"/proc/{pid}/maps").read_text()) for pid in (run.pid, child)]
        assert loaded == [False, True]
    finally:
        run.terminate()
        assert run.wait(PATIENCE) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.save_freq=-1", "trainer.max_restarts=1 needs checkpoints .*trainer.save_freq"),
        ("trainer.save_freq=last", "trainer.max_restarts=1 needs checkpoints .*trainer.save_freq"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model]", "add optimizer, extra to"),
    ],
)
def test_restarts_without_whole_checkpoints_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        compose("trainer.max_restarts=1", "trainer.save_freq=1", override)
