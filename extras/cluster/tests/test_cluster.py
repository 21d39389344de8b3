"""The table of machines, by real workers of Ray."""

from pathlib import Path

import pytest

from extras.cluster.__main__ import MIB, Row, check, main, table
from workers.resources import Resources


@pytest.mark.slow
def test_every_machine_is_measured_and_nothing_is_left(cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture):
    main(["--folder", str(tmp_path / "run"), "--mib", "1"])
    _, line, legend = capsys.readouterr().out.splitlines()
    assert line.split()[0] == "0" and line.split()[-3] == "-" and line.endswith("  yes"), "alone it sums with nobody"
    assert legend.startswith("MiB/s")
    _, *lines, _, shared = check(Resources(2, threads=1, gpus=0, nodes=2), tmp_path / "run", MIB).splitlines()
    assert shared.startswith("Ranks share a machine")
    for rank, line in enumerate(lines):
        *_, sends, takes, summed, ahead, sees = line.split()
        assert line.startswith(str(rank)) and sees == "yes" and abs(float(ahead)) < 1
        assert min(map(float, (sends, takes, summed))) > 0
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_machines_that_do_not_come_are_said(cluster: None, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        main(["--nodes", "2", "--wait", "0"])
    assert "error: --nodes 2: only 1 joined" in capsys.readouterr().err


def test_without_a_cluster_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr("extras.cluster.__main__.joins_cluster", lambda: False)
    with pytest.raises(SystemExit):
        main(["--nodes", "2"])
    assert "error: --nodes 2: only 1 joined" in capsys.readouterr().err


def test_what_a_run_would_stumble_over_has_a_line(tmp_path: Path):
    good = Row("first", 8, "H100", True, 0.0, 1e9, 1e9)
    text = table([good, good._replace(host="second", sees_folder=False, ahead=-7.0)], [1e9, 1e9], tmp_path)
    _, _, line, _, blind, late = text.splitlines()
    assert line.split() == ["1", "second", "8", "H100", "954", "954", "954", "-7.000", "no"]
    assert blind.startswith(f"second: no {tmp_path}") and late.startswith("second: another time")
