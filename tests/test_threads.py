"""The number of threads that a worker gets: one rule, whose parts are tried with files as a container has them."""

import math
import os

import pytest

from configs import process
from configs.process import Threads, available_cores, cpu_quota, memory_and_disk, most_gpus, worker_threads
from tests.runs import compose


@pytest.fixture(autouse=True)
def without_omp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("group", "files", "wanted"),
    [
        ("0::/", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/", {}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),  # the outer one's
        ("0::/a/b", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "150000 100000\n"}, 0.5),
        ("0::/a/b", {"cpu.max": "300000 100000\n"}, 3),  # a container that sees its own group as the outermost
        ("4:cpu,cpuacct:/a\n0::/a", {"a/cpu.max": "50000 100000\n"}, 0.5),
    ],
)
def test_a_quota_is_read_from_the_files_of_the_control_group(tmp_path, group, files, wanted):
    assert cpu_quota(tmp_path / "missing", tmp_path) is None
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "group").write_text(f"{group}\n")
    assert cpu_quota(tmp_path / "group", tmp_path) == wanted


@pytest.mark.skipif(process.sys.platform != "linux", reason="control groups are Linux's")
def test_memory_is_counted_by_the_limit_of_the_control_group(tmp_path):
    files = {"max": f"{8 * 10**9}", "current": f"{6 * 10**9}", "stat": f"anon 5\ninactive_file {10**9}\n"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    (tmp_path / "group").write_text("0::/\n")
    assert memory_and_disk(tmp_path, tmp_path / "group", tmp_path).startswith("3 of 8 GB of memory, ")


@pytest.mark.parametrize(
    ("machine", "affinity", "allowed", "wanted"),
    [
        (8, 8, None, (8, "the machine's cores")),
        (8, 3, None, (3, "3 of the machine's 8 cores")),
        (8, 8, 2.5, (2, "a CPU quota of 2.5")),
        (8, 2, 4.0, (2, "2 of the machine's 8 cores")),
        (8, 8, 0.5, (1, "a CPU quota of 0.5")),
    ],
)
def test_the_tightest_limit_counts(monkeypatch, machine, affinity, allowed, wanted):
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(process.sys, "platform", "linux")
    monkeypatch.setattr(process, "cpu_quota", lambda: allowed)
    assert available_cores() == wanted


@pytest.mark.parametrize(
    ("n_threads", "declared", "workers", "wanted"),
    [
        (3, "5", 2, Threads(3, "trainer.n_threads")),
        (None, "5", 2, Threads(5, "OMP_NUM_THREADS")),  # each worker's, as it is any process's
        (None, " 4,2", 1, Threads(4, "OMP_NUM_THREADS")),
        (None, "", 1, Threads(8, "the machine's cores")),
        (None, None, 3, Threads(2, "the machine's cores")),
        (None, None, 9, Threads(1, "the machine's cores")),
    ],
)
def test_the_config_goes_before_the_variable_before_the_cores(monkeypatch, n_threads, declared, workers, wanted):
    monkeypatch.setattr(process, "available_cores", lambda: (8, "the machine's cores"))
    if declared is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", declared)
    assert worker_threads(n_threads, workers) == wanted


@pytest.mark.parametrize("declared", ["all", "0", "-2", "1.5", ",2"])
def test_a_variable_that_is_no_number_is_refused_unless_the_config_decides(monkeypatch, declared):
    monkeypatch.setenv("OMP_NUM_THREADS", declared)
    with pytest.raises(ValueError, match=f"^OMP_NUM_THREADS={declared} is no number .*trainer.n_threads"):
        compose()
    compose("trainer.n_threads=2")


@pytest.mark.parametrize(
    ("files", "variables", "wanted"),
    [
        ("", {}, 0),
        ("nvidiactl nvidia-uvm", {}, 0),
        ("nvidia0 nvidia1 nvidiactl", {}, 2),
        ("nvidia0 nvidia1", {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ("nvidia0 nvidia1", {"CUDA_VISIBLE_DEVICES": ""}, 0),
        ("nvidia0", {"CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        ("nvidia0 nvidia-caps", {"CUDA_VISIBLE_DEVICES": "MIG-5a,MIG-6b"}, 2),  # parts of one card
        ("dxg", {}, math.inf),
        ("kfd", {}, math.inf),
        ("", {"RAY_ADDRESS": "10.0.0.1:6379"}, math.inf),
        ("", {"RAY_ADDRESS": "local"}, 0),
        ("ray/ray_current_cluster", {}, math.inf),
        ("ray/ray_current_cluster", {"RAY_ADDRESS": "local"}, 0),
    ],
)
def test_no_more_gpus_can_be_used_than_there_are_files_of(files, variables, wanted, tmp_path, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RAY_TMPDIR": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    for file in files.split():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert most_gpus(tmp_path) == wanted
