"""Reward functions in processes that can be killed: hostile ones end in time, and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from configs.schema import RewardFunctionConfig, ScoringConfig
from data.types import NotScored
from extras.scorers.pool import Scorers
from tests.forked import python
from tests.processes import until
from tests.runs import ROOT

LIMIT = 1.0  # seconds of a row
HOSTILE = """
import ctypes, os, re, subprocess, sys, time

def compute_score(solution_str, marker=None):
    if marker:
        with open(marker, "a") as file:
            print(os.getpid(), file=file)
    return globals()[solution_str]()

def well(): return {"score": 1.0, "pred": "4"}
def loop():
    while True: pass
def regex(): return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
def swallows():
    while True:
        try:
            while True: time.sleep(0.01)
        except BaseException: pass
def memory(): return float(len(bytearray(4 << 30)))
def exits(): os._exit(3)
def prints():
    for _ in range(100): sys.stdout.write("x" * (1 << 20))
    return 1.0
def sleeps_in_c(): ctypes.PyDLL(None).sleep(3600)
def children():  # a fork bomb, but for its end after 30
    for _ in range(30): subprocess.Popen(["sleep", "3600"])
    while True: pass
def forks():
    for _ in range(5): os.fork()
    while True: time.sleep(1)
def raises(): raise KeyError("lost")
def leaves(): sys.exit(0)
def no_number(): return object()
def reads(): return float(len(sys.stdin.read()))
"""
OUTCOMES = {
    "well": ("ok", ""),
    "loop": ("timeout", "not done after reward.timeout=1 seconds"),
    "regex": ("timeout", "not done"),
    "swallows": ("timeout", "not done"),
    "memory": ("error", "MemoryError"),
    "exits": ("error", "its process ended with exit code 3"),
    "prints": ("ok", ""),
    "sleeps_in_c": ("timeout", "not done"),
    "children": ("timeout", "not done"),
    "forks": ("timeout", "not done"),
    "raises": ("error", "KeyError: 'lost' (at FILE:31)"),
    "leaves": ("error", "SystemExit: 0"),
    "no_number": ("error", "it returned <object"),
    "reads": ("ok", ""),  # nothing
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("users") / "hostile.py"
    file.write_text(HOSTILE)
    return file


def plain(solution_str): ...


async def waiting(solution_str): ...


HOW = {False: plain, True: waiting}  # a function as the caller's process has loaded it


def scorers(file: Path, asynchronous: bool = False, reward_kwargs: dict | None = None, **settings) -> Scorers:
    config = ScoringConfig(**{"timeout": LIMIT, "num_workers": 4} | settings)
    return Scorers(HOW[asynchronous], RewardFunctionConfig(str(file), reward_kwargs=reward_kwargs or {}), config)


def outcomes(file: Path, marker: Path) -> dict[str, tuple[str, str]]:
    """Returns the outcome of each way to be hostile; asserts that a good call comes through after all of them."""
    results = {}
    for stuck, limit in ((False, 600.0), (True, LIMIT)):  # a busy machine must not make one of what ends by itself
        pool = scorers(file, reward_kwargs={"marker": str(marker)}, num_workers=16, timeout=limit)
        names = [name for name, (outcome, _) in OUTCOMES.items() if stuck is (outcome == "timeout")]
        futures = {name: pool.submit({"solution_str": name}) for name in names}
        results |= {name: future.result() for name, future in futures.items()}
        if not stuck:
            assert pool.submit({"solution_str": "well"}).result() == {"score": 1.0, "pred": "4"}
        pool.close()
    return {
        name: (result.outcome, result.reason) if isinstance(result, NotScored) else ("ok", "")
        for name, result in results.items()
    }


def check(found: dict[str, tuple[str, str]], file: Path, marker: Path) -> None:
    """The outcomes are right, and nothing of the processes is left, nor of what they started."""
    for name, (outcome, said) in OUTCOMES.items():
        assert found[name][0] == outcome and said.replace("FILE", str(file)) in found[name][1], (name, found[name])
    groups = {int(line) for line in marker.read_text().split()}
    killed = sum(outcome == "timeout" for outcome, _ in OUTCOMES.values())
    assert len(groups) >= killed + 2  # one that exits by itself, and one for the rest: a process that is free is reused
    until(lambda: not groups & groups_running())  # the kernel takes its time with what they had started


def groups_running() -> set[int]:
    """The process groups in which anything runs that is not over."""
    running = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if state != "Z":
                running.add(int(group))
    return running


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hostile_scorers_end_in_time_are_counted_and_leave_nothing(file, tmp_path):
    marker, answer = tmp_path / "pids", tmp_path / "answer"
    program = f"""
import json; from pathlib import Path; from extras.scorers.tests.test_scorers import outcomes
text = json.dumps(outcomes(Path({str(file)!r}), Path({str(marker)!r})))
Path({str(answer)!r}).write_text(text)
"""
    done = python("-c", program, check=True)
    assert len(done.stdout) < 20_000  # of 100 MB
    check(json.loads(answer.read_text()), file, marker)


def test_a_process_is_reused_and_replaced_when_killed(file, tmp_path):
    marker = tmp_path / "pids"
    pool = scorers(file, reward_kwargs={"marker": str(marker)}, num_workers=1)
    for name in ("well", "well", "raises", "loop", "well"):
        pool.submit({"solution_str": name}).result()
    first, second, third, fourth, last = marker.read_text().split()
    assert first == second == third == fourth != last
    pool.close()


ASYNC = """
import asyncio, os, time

running = []
async def compute_score(solution_str):
    if solution_str == "blocks":
        await asyncio.sleep(0.2)
        time.sleep(3600)
    if solution_str == "waits":
        await asyncio.sleep(3600)
    running.append(solution_str)
    await asyncio.sleep(0.05)
    most = len(running)
    await asyncio.sleep(0.3)
    running.pop()
    return {"score": most, "pid": os.getpid()}
"""


def test_async_calls_are_side_by_side_in_one_process_and_no_more_than_so_many(tmp_path):
    (file := tmp_path / "judge.py").write_text(ASYNC)
    pool = scorers(file, asynchronous=True, max_concurrent=5, timeout=60.0)
    results = [future.result() for future in [pool.submit({"solution_str": str(row)}) for row in range(12)]]
    assert max(result["score"] for result in results) == 5 and len({result["pid"] for result in results}) == 1
    pool.close()


def test_an_async_call_that_waits_too_long_is_cancelled_alone_and_one_that_blocks_takes_nobody_with_it(tmp_path):
    (file := tmp_path / "judge.py").write_text(ASYNC)
    pool = scorers(file, asynchronous=True)
    waits, beside = (pool.submit({"solution_str": name}) for name in ("waits", "beside"))
    assert waits.result().outcome == "timeout"
    pid = beside.result()["pid"]
    assert pool.submit({"solution_str": "next"}).result()["pid"] == pid
    blocks, beside = (pool.submit({"solution_str": name}) for name in ("blocks", "beside"))
    assert blocks.result().outcome == "timeout"
    assert isinstance(beside.result(), NotScored) or beside.result()["pid"] != pid  # asked again, in the next process
    pool.close()


MEMORY = """
import ctypes, mmap, os, threading
def compute_score(solution_str):
    reserved = mmap.mmap(-1, 1 << 36, prot=0, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # as CUDA does
    assert len(reserved) == 1 << 36
    hidden = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0
    if solution_str == "threads":
        ready = threading.Barrier(33)
        threads = [threading.Thread(target=lambda: (bytearray(1 << 16), ready.wait())) for _ in range(32)]
        for thread in threads: thread.start()
        ready.wait()
    else:
        kept = bytearray(1 << 30)
    return {"score": 1.0, "hidden": float(hidden)}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_memory_is_limited_and_not_addresses_and_other_processes_cannot_read_it(tmp_path):
    (file := tmp_path / "memory.py").write_text(MEMORY)
    pool = scorers(file, timeout=60.0, memory_limit_mb=400)
    assert pool.submit({"solution_str": "threads"}).result() == {"score": 1.0, "hidden": 1.0}
    assert "MemoryError" in pool.submit({"solution_str": "memory"}).result().reason
    pool.close()


SLOW = """
import os, time
def compute_score(solution_str):
    end = time.process_time() + 0.6
    while solution_str == "computes" and time.process_time() < end: pass
    time.sleep(0.5 * (solution_str == "waits"))
    return {"score": 0.0, "pid": os.getpid()}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "calls", "several"), [("computes", 3, False), ("quick", 20, False), ("waits", 16, True)]
)
def test_functions_that_wait_have_several_processes_and_those_that_compute_one_a_core(kind, calls, several, tmp_path):
    (file := tmp_path / "slow.py").write_text(SLOW)
    pool = scorers(file, timeout=60.0)
    pool.cores = 1
    futures = [pool.submit({"solution_str": kind}) for _ in range(calls)]
    assert (len({future.result()["pid"] for future in futures}) > 1) is several
    pool.close()


def test_draws_of_a_function_depend_on_the_texts_alone_whichever_process_they_are_made_in(tmp_path):
    (file := tmp_path / "noise.py").write_text(
        "def compute_score(solution_str):\n    import random\n    return random.random()\n"
    )
    first, second = scorers(file), scorers(file)
    drawn = [[pool.submit({"solution_str": text}).result() for text in "aab"] for pool in (first, second)]
    assert drawn[0] == drawn[1] and drawn[0][0] == drawn[0][1] != drawn[0][2]
    first.close(), second.close()


def test_a_file_that_cannot_be_loaded_there_ends_the_wait_and_says_so(tmp_path):
    (file := tmp_path / "mine.py").write_text("import sys\nraise ImportError('only here')\n")
    with pytest.raises(RuntimeError, match=rf"only here \(at {file}:2\).*reward.in_process=true") as caught:
        scorers(file).submit({"solution_str": "a"}).result()
    assert "Traceback" in caught.value.__notes__[0]


def test_an_argument_that_cannot_be_sent_is_refused(file):
    with pytest.raises(ValueError, match=r"cannot be sent to a process .*extra_info.*reward.in_process=true"):
        scorers(file).submit({"solution_str": lambda: 0})


def test_scorers_end_with_their_parent_however_that_ends(file, tmp_path):
    marker = tmp_path / "pids"
    program = f"""
from pathlib import Path
from extras.scorers.tests.test_scorers import scorers
pool = scorers(Path({str(file)!r}), reward_kwargs={{"marker": {str(marker)!r}}}, timeout=None)
pool.submit({{"solution_str": "regex"}}).result()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not marker.exists() or not marker.read_text():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    [pid] = marker.read_text().split()
    until(lambda: int(pid) not in groups_running())
    assert os.path.exists(file)
