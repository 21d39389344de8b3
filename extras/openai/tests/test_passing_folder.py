"""A folder goes with its process."""

from extras.openai.passing_folder import passing_folder
from tests.forked import python


def test_a_folder_that_a_killed_process_left_goes_and_those_of_live_ones_stay(tmp_path):
    program = f"""
import os, signal
from extras.openai.passing_folder import passing_folder
with passing_folder({str(tmp_path)!r}, "weights_") as folder:
    (folder / "weight").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    python("-c", program)
    [left] = tmp_path.iterdir()
    (tmp_path / "weights_new").mkdir()  # which its process has not locked yet
    with passing_folder(tmp_path, "weights_") as live:
        assert not left.exists()
        (live / "weight").write_text("x")
        with passing_folder(tmp_path, "weights_"):
            assert live.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["weights_new"]
