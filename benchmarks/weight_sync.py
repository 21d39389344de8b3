"""Seconds and memory of a sync of weights: python -m benchmarks.weight_sync [--model FOLDER] [--repeats K]

From a policy in training to vLLM in the same process, and to vLLM's server on this machine, through shared memory. The
time is that of `load_weights` alone, without the probe that follows each sync in training; CPU seconds are those of all
processes, and mean something on a busy machine too. Memory is the highest above what was held before, of each process's
own (RssAnon), and of what lies in /dev/shm. Needs vLLM and Linux.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter, process_time

import torch
from transformers import AutoTokenizer

from configs.schema import ModelConfig, OptimConfig, RolloutConfig
from extras.server.tests.fixtures import vllm_server
from workers.engine import TrainEngine
from workers.load_rollout import build_rollout, load_rollout_class
from workers.models import load_causal_lm
from workers.weight_sync import weight_sync

SHARED = "/dev/shm"  # as the openai engine has it
LOOK_SECONDS = 0.005
PROMPT, RESPONSE = 64, 64  # tokens; of the engine's cache alone
MIB = 1 << 20


@dataclass
class Peaks:
    """Bytes above what was held before, at most: of this process, of others, of shared memory."""

    own: int = 0
    others: int = 0
    shared: int = 0


def main() -> None:
    arguments = read_arguments()
    policy = TrainEngine(
        load_causal_lm(ModelConfig(path=arguments.model)), OptimConfig(), 10, torch.device("cpu"), torch.float32
    )
    size = sum(parameter.numel() for parameter in policy.module.parameters())
    print(f"{size / 1e6:.0f}M parameters, {4 * size / MIB:.0f} MiB; load {os.getloadavg()[0]:.1f}; MiB above before")
    print(f"{'engine':<8}{'median s':>10}{'CPU s':>10}{'trainer':>10}{'server':>10}{'shared':>10}")
    for name in ("openai", "vllm"):
        times, peaks = measure(name, arguments, policy)
        seconds, work = (median(values) for values in zip(*times, strict=True))
        sizes = "".join(f"{size / MIB:10.0f}" for size in (peaks.own, peaks.others, peaks.shared))
        print(f"{name:<8}{seconds:10.2f}{work:10.2f}{sizes}", flush=True)


def measure(name: str, arguments: argparse.Namespace, policy: TrainEngine) -> tuple[list[tuple[float, float]], Peaks]:
    """Seconds, and CPU seconds, of each sync but the first, and the peaks of all of them."""
    with ExitStack() as held:
        own, others = {}, []
        if name == "openai":
            url, process = held.enter_context(vllm_server(Path(arguments.model), PROMPT, RESPONSE))
            own, others = {name: {"base_url": url, "weights_folder": SHARED}}, group_of(process.pid)
        config = RolloutConfig(
            name=name, prompt_length=PROMPT, response_length=RESPONSE, max_num_seqs=8, engine_kwargs=own
        )
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        engine = build_rollout(load_rollout_class(name), config, tokenizer, policy.module)
        held.callback(engine.close)
        times, peaks = [], Peaks()
        for version in range(arguments.repeats + 1):
            times.append(watched(partial(engine.load_weights, policy.weights(), version), others, peaks))
        weight_sync(engine, policy).update(version + 1)
        return times[1:], peaks


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="outputs/smollm2/model", help="folder; `make smollm2` makes the default")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def watched(work: Callable[[], None], others: Sequence[int], peaks: Peaks) -> tuple[float, float]:
    """Seconds that `work` takes, and CPU seconds of all processes; what is held meanwhile raises `peaks`."""
    before, over = held_now(others), Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            now = held_now(others)
            for name in ("own", "others", "shared"):
                setattr(peaks, name, max(getattr(peaks, name), getattr(now, name) - getattr(before, name)))

    watcher = Thread(target=look)
    watcher.start()
    start, used = perf_counter(), cpu_seconds(others)
    try:
        work()
        return perf_counter() - start, cpu_seconds(others) - used
    finally:
        over.set()
        watcher.join()


def held_now(others: Sequence[int]) -> Peaks:
    disk = os.statvfs(SHARED)
    return Peaks(anonymous(os.getpid()), sum(map(anonymous, others)), (disk.f_blocks - disk.f_bfree) * disk.f_frsize)


def cpu_seconds(others: Sequence[int]) -> float:
    """CPU seconds that this process and `others` have used, threads included."""
    ticks = sum(
        sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) for pid in others
    )
    return process_time() + ticks / os.sysconf("SC_CLK_TCK")


def anonymous(pid: int) -> int:
    """Bytes of a process's own memory."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def group_of(leader: int) -> list[int]:
    """The processes of `leader`'s group."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and os.getpgid(pid) == leader]


if __name__ == "__main__":
    main()
