"""Rows that several processes make are those of one, and a process that fails is done without."""

import os
from itertools import islice
from pathlib import Path

import pytest

from configs.loader import compose
from extras.imitate import crew
from extras.imitate.demonstrations import demonstrations_of

NIM = "env.id=examples/games/nim.py:Nim-v0"
PLAYER = """
import os, time

def player(environment, state):
    if os.getpid() != {parent}:
        open({log!r}, "a").write("x")
        {there}
    while {processes} > 1 and not os.path.exists({log!r}):  # a process takes seconds to start
        time.sleep(0.01)
    return 1 + len(state.text.rstrip(".")) % 3
"""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, write, tmp_path: Path):
    """made(processes, there) makes the rows of 80 resets, by a player who does `there` in other processes; returns
    whether another process had a part in it, too."""
    monkeypatch.setattr(crew, "PATIENCE", 0.0)

    def make(processes: int, there: str = "pass") -> tuple[list, bool]:
        (log := tmp_path / "log").unlink(missing_ok=True)
        player = PLAYER.format(parent=os.getpid(), log=str(log), there=there, processes=processes)
        config = compose("ppo_trainer", [NIM, f"trainer.n_threads={processes}"], takes_objects=True)
        which = config, f"{write(f'player{processes}.py', player)}:player"
        helpers = crew.helpers_of(*which)
        rows = [*islice(crew.make_rows(demonstrations_of(*which), helpers), 80)]
        assert len(helpers) == processes - 1 and not any(helper.is_running() for helper in helpers)
        return rows, log.exists()

    return make


@pytest.mark.parametrize(("processes", "there"), [(2, "pass"), (3, "pass"), (2, "1 / 0"), (2, "os._exit(3)")], ids=str)
def test_any_number_of_processes_makes_the_rows_of_one(made, processes, there):
    assert made(processes, there) == (made(1)[0], True)


def test_settings_that_cannot_be_sent_leave_the_work_to_one_process():
    config = compose("ppo_trainer", [NIM, "trainer.n_threads=4"], takes_objects=True)
    assert len(crew.helpers_of(config, "random")) == 3 and crew.helpers_of(config, lambda: None) == []
