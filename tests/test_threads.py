"""How many threads a worker gets: one rule, whose parts are tried with files as a container has them."""

import os
from pathlib import Path

import pytest

from configs import threads
from configs.checks import check_config
from configs.errors import ConfigError
from configs.threads import Threads, available_cores, cpu_quota, worker_threads
from tests.runs import compose

V2, V1 = "0::{}\n", "5:memory:{0}\n4:cpu,cpuacct:{0}\n0::{0}\n"


@pytest.fixture(autouse=True)
def without_omp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def quota(folder: Path, groups: str, settings: dict[str, str]) -> float | None:
    """What is found where the kernel lists `groups`, and /sys/fs/cgroup holds these files."""
    for name, text in settings.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "groups").write_text(groups)
    return cpu_quota(folder / "groups", folder)


@pytest.mark.parametrize(
    ("groups", "settings", "wanted"),
    [
        (V2.format("/"), {"cpu.max": "200000 100000\n"}, 2),
        (V2.format("/"), {"cpu.max": "max 100000\n"}, None),
        (V2.format("/"), {}, None),
        (V2.format("/a/b"), {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),  # the outer one's
        (V2.format("/a/b"), {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "150000 100000\n"}, 0.5),
        (V2.format("/a/b"), {"cpu.max": "300000 100000\n"}, 3),  # a container that sees its own group as the outermost
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        (V1.format("/a"), {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
        ("5:memory:/\n", {"memory/cpu.max": "100000 100000\n"}, None),
    ],
)
def test_a_quota_is_read_from_the_files_of_either_version(tmp_path, groups, settings, wanted):
    assert quota(tmp_path, groups, settings) == wanted


def test_where_the_kernel_lists_no_groups_there_is_no_quota(tmp_path):
    assert cpu_quota(tmp_path / "missing", tmp_path) is None


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
    monkeypatch.setattr(threads.sys, "platform", "linux")
    monkeypatch.setattr(threads, "cpu_quota", lambda: allowed)
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
    monkeypatch.setattr(threads, "available_cores", lambda: (8, "the machine's cores"))
    if declared is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", declared)
    assert worker_threads(n_threads, workers) == wanted


@pytest.mark.parametrize("declared", ["all", "0", "-2", "1.5", ",2"])
def test_a_variable_that_is_no_number_is_refused_unless_the_config_decides(monkeypatch, tmp_path, declared):
    monkeypatch.setenv("OMP_NUM_THREADS", declared)
    rows = ["data.train_files=Makefile", f"trainer.default_local_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=f"^OMP_NUM_THREADS={declared} is no number .*trainer.n_threads.*unset it"):
        check_config(compose(*rows, name="ppo_trainer"))
    check_config(compose(*rows, "trainer.n_threads=2", name="ppo_trainer"))


def test_threads_are_told_with_where_they_come_from():
    assert str(Threads(1, "trainer.n_threads")) == "1 thread (trainer.n_threads)"
    assert str(Threads(2, "a CPU quota of 2.5")) == "2 threads (a CPU quota of 2.5)"
