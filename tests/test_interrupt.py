"""Signals: a line at once, whatever the run is doing; a traceback only for who asks. Real processes, real signals."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from configs.process import STOPPED
from tests.forked import Run, python
from tests.runs import ROOT, short_run

PATIENCE = 120  # seconds; what is interrupted would take longer by far
FIRST = "Ctrl-C: step 1 is saved when it is done, and the run ends. Once more ends it at once: step 1 is lost."
LINE = STOPPED.format("Ctrl-C")

REWARD = """
import asyncio
import time
from pathlib import Path

{kind} compute_score(data_source, solution_str, ground_truth, extra_info=None):
    Path("{marker}").touch()
    {wait}
    return 1.0
"""
SLOW_ENGINE = """
import time
from pathlib import Path

from workers.hf_rollout import HFRollout

def generate(*_):
    Path("{marker}").touch()
    time.sleep(9999)

HFRollout.generate = generate
"""


def press_ctrl_c(command: list[str], marker: Path, *answers: str, **environment: str) -> tuple[int, str]:
    """Starts `command` as a shell does, presses Ctrl-C once `marker` is there, and again after each of the `answers`;
    how it ended, and its stderr."""
    deadline = time.monotonic() + PATIENCE
    run = Run(*command, env={**os.environ, **environment})  # in a session: a terminal signals the whole group
    came = [marker.exists, *(lambda answer=answer: answer in run.said()[1] for answer in answers)]
    try:
        for is_time in came:
            while not is_time() and not run.is_over() and time.monotonic() < deadline:
                time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGINT)
        done = run.wait(PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    return done.returncode, done.stderr


def lines_of_the_end(stderr: str) -> list[str]:
    """Returns what was said after the notices of the start."""
    return [line for line in stderr.splitlines() if line.strip() and not line.startswith("notice: ")]


@pytest.mark.parametrize(
    ("kind", "wait"), [("def", "time.sleep(9999)"), ("async def", "await asyncio.sleep(9999)")], ids=["sync", "async"]
)
def test_a_run_that_waits_for_a_reward_says_so_and_ends_the_second_time(tiny_model, tmp_path, kind, wait):
    marker, reward = tmp_path / "marker", tmp_path / "reward.py"
    reward.write_text(REWARD.format(kind=kind, wait=wait, marker=marker))
    overrides = short_run(tiny_model, tmp_path / "run", f"reward.custom_reward_function.path={reward}")
    command = ["main.py", "--config-name", "frozenlake", *overrides, "env.val_episodes=0"]
    status, stderr = press_ctrl_c(command, marker, FIRST)
    assert lines_of_the_end(stderr) == [FIRST, LINE]
    assert status == -signal.SIGINT, "a shell's loop over runs has to end too"


@pytest.mark.slow
def test_a_run_on_ray_ends_in_one_line_before_its_first_step(tiny_model, tmp_path):
    marker, engine = tmp_path / "marker", tmp_path / "engine.py"
    engine.write_text(SLOW_ENGINE.format(marker=marker))
    own = ["trainer.executor=ray", f"actor_rollout_ref.model.external_lib={engine}", "env.val_episodes=0"]
    command = ["main.py", "--config-name", "frozenlake", *short_run(tiny_model, tmp_path / "run", *own)]
    status, stderr = press_ctrl_c(command, marker)
    assert stderr.rstrip().endswith(LINE) and "Traceback" not in stderr and stderr.count("Ctrl-C") == 1
    assert status == -signal.SIGINT


COMMAND = """
from configs.process import end_on_interrupt
end_on_interrupt()
import signal
from pathlib import Path
Path({marker!r}).touch()
signal.pause()
"""


def test_ctrl_c_in_the_imports_of_a_command_is_one_line_and_a_switch_shows_the_traceback(tmp_path):
    (plain_status, plain), (full_status, full) = (
        press_ctrl_c(["-c", COMMAND.format(marker=str(tmp_path / switch))], tmp_path / switch, HYDRA_FULL_ERROR=switch)
        for switch in ("0", "1")
    )
    assert (plain_status, plain) == (-signal.SIGINT, f"\n{LINE}\n")
    assert full_status == -signal.SIGINT and "Traceback" in full and LINE not in full


CLOSING = """
from configs.process import end_on_interrupt
end_on_interrupt()
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
finally:
    os.kill(os.getpid(), {second})
    print("closed", flush=True)
"""


@pytest.mark.parametrize(("second", "closed"), [("signal.SIGCONT", "closed\n"), ("signal.SIGINT", "")])
def test_one_ctrl_c_closes_what_is_open_and_a_second_does_not(second, closed):
    program = [sys.executable, "-c", CLOSING.format(second=second)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, closed) and "Traceback" not in done.stderr


def test_a_command_in_the_background_stays_deaf_to_ctrl_c():
    program = "from configs.process import end_on_interrupt; end_on_interrupt(); import os; os.kill(os.getpid(), 2)"
    ignored = f"trap '' INT; exec {sys.executable} -c '{program}'"
    assert subprocess.run(["sh", "-c", ignored], cwd=ROOT).returncode == 0


def test_refusals_show_their_traceback_to_who_asks():
    plain, full = (
        python("main.py", "trainer.sed=1", env={**os.environ, "HYDRA_FULL_ERROR": switch}) for switch in ("0", "1")
    )
    assert plain.returncode == 2 and "Traceback" not in plain.stderr
    assert full.returncode == 1 and "Traceback" in full.stderr and "Did you mean 'trainer.seed'" in full.stderr


LEFT = """
import configs.process, sys, time
print("first", flush=True)
time.sleep(0.5)  # the reader leaves
print("second", flush=True)
print("third", file=sys.stderr, flush=True)
"""


def test_a_reader_that_leaves_ends_neither_a_command_nor_its_exit():
    command = f"{sys.executable} -c '{LEFT}' 2>&1 | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("first\n0\n", "")
