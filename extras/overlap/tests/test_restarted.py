"""A run that generates ahead, and is killed, is started again and is the unbroken run. Real processes."""

from pathlib import Path

import pytest

from extras.overlap.tests.test_overlap import AHEAD
from extras.restarts.tests.test_restarts import PATIENCE, RUN, command
from tests.forked import Run
from tests.runs import learning_metrics, state_files


@pytest.mark.slow
def test_a_run_that_is_a_step_off_and_killed_at_several_moments_is_the_unbroken_run(tiny_model: Path, tmp_path: Path):
    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    kills = dict.fromkeys(["updated 2", "written 4"], "kill()")
    whole = Run("main.py", *command(tiny_model, unbroken, {}, *AHEAD)).wait(PATIENCE)
    killed = Run("-c", RUN, *command(tiny_model, run, kills, *AHEAD, "trainer.max_restarts=2")).wait(PATIENCE)
    assert (killed.returncode, whole.returncode) == (0, 0), killed.stderr + whole.stderr
    assert killed.stderr.count("was ended by SIGKILL after step") == 2
    assert learning_metrics(run) == learning_metrics(unbroken)
    assert state_files(run, 5) == state_files(unbroken, 5)
