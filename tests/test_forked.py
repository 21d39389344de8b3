"""A run in a fork is `python …` in all but its start."""

import os
import signal

import pytest

from tests.forked import python

SAYS = "import os, sys; print(sys.argv, os.getcwd(), os.environ['OWN'], __name__); print('aside', file=sys.stderr)"


def test_it_has_its_own_arguments_folder_environment_and_output(tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    own = {**os.environ, "OWN": "mine", "PYTHONPATH": str(tmp_path)}
    for first in (["-c", SAYS], ["says.py"], ["-m", "says"]):
        done = python(*first, "a", "b c", cwd=tmp_path, env=own)
        argv, _, rest = done.stdout.partition("]")
        assert argv.endswith("'a', 'b c'") and rest == f" {tmp_path} mine __main__\n"
        assert (done.returncode, done.stderr) == (0, "aside\n")
    assert "OWN" not in os.environ


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import atexit; atexit.register(print, 'over'); raise SystemExit(3)", 3, "over\n"),
        ("raise SystemExit('no')", 1, ""),
        ("1 / 0", 1, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, ""),
        ("import sys, threading; print('torch' in sys.modules, threading.active_count())", 0, "True 1\n"),
    ],
)
def test_it_ends_as_python_does(code, status, said):
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (status, said)
    assert ("ZeroDivisionError" in done.stderr) == ("/ 0" in code)
