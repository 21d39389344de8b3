"""Rows that several processes make are those of one, and a process that fails is done without."""

import os
from itertools import islice

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


@pytest.mark.parametrize(("processes", "there"), [(2, "pass"), (3, "pass"), (2, "1 / 0"), (2, "os._exit(3)")], ids=str)
def test_any_number_of_processes_makes_the_rows_of_one(processes, there, monkeypatch, write, tmp_path):
    """The other processes have a part in it, and fail by `there`."""
    monkeypatch.setattr(crew, "PATIENCE", 0.0)
    log = tmp_path / "log"

    def make(processes: int) -> list[dict]:
        player = PLAYER.format(parent=os.getpid(), log=str(log), there=there, processes=processes)
        config = compose("ppo_trainer", [NIM, f"trainer.n_threads={processes}"], takes_objects=True)
        which = config, f"{write(f'player{processes}.py', player)}:player"
        helpers = crew.helpers_of(*which)
        rows = [*islice(crew.make_rows(demonstrations_of(*which), helpers), 80)]
        assert len(helpers) == processes - 1 and not any(helper.is_running() for helper in helpers)
        return rows

    alone = make(1)
    assert not log.exists() and make(processes) == alone and log.exists()


def test_settings_that_cannot_be_sent_leave_the_work_to_one_process():
    config = compose("ppo_trainer", [NIM, "trainer.n_threads=4"], takes_objects=True)
    assert len(crew.helpers_of(config, "random")) == 3 and crew.helpers_of(config, lambda: None) == []
