"""Time and memory of prompts in workers/hf: python -m benchmarks.prefill [--size S] [--max-num-batched-tokens N]

Llamas with random weights of the sizes of benchmarks/vs_trl.py draw one token for each prompt: of 64 prompts of one
length, of as many with a long one among them, of as many of all lengths, and of 192 long ones. Memory is the peak of
this process above what it held before, by the kernel's count (Linux with glibc).
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import ctypes
import random
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.models import numbers_tokenizer
from benchmarks.rollout import prepared, random_llama
from benchmarks.workload import VOCABULARY
from configs.schema import RolloutConfig
from configs.threads import worker_threads
from data.types import Request, SamplingParams
from extras.kernels.memory import start_process
from workers.hf.rollout import HFRollout

CASES = {
    "64 of 32": [32] * 64,
    "63 of 32, 1 of 1024": [32] * 31 + [1024] + [32] * 32,
    "64 of 16 to 1024": [16 * (1 + place) for place in range(64)],
    "192 of 512": [512] * 192,
}
ONE_TOKEN = SamplingParams(False, 1.0, -1, 1.0, 1)


def main() -> None:
    arguments = read_arguments()
    start_process(worker_threads(None).number)
    tokenizer = numbers_tokenizer(VOCABULARY[arguments.size])
    model = prepared(random_llama(arguments.size, tokenizer, arguments.seed))
    asked = arguments.max_num_batched_tokens
    budget = {} if asked is None else {"max_num_batched_tokens": asked}
    rollout = HFRollout(RolloutConfig(prompt_length=1024, response_length=1, **budget), tokenizer, model)
    for name, lengths in CASES.items():
        rng = random.Random(arguments.seed)
        prompts = [[rng.randrange(1, VOCABULARY[arguments.size]) for _ in range(length)] for length in lengths]
        seconds, peak = measure(rollout, prompts, arguments.repeats)
        print(f"{name:<20}{seconds:8.3f} s{peak / 1e6:8.0f} MB")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=VOCABULARY, default="1m")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="the setting of rollouts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    return parser.parse_args()


def measure(rollout: HFRollout, prompts: list[list[int]], repeats: int) -> tuple[float, int]:
    """Median seconds, and bytes at the peak above what the process held before."""
    requests = [Request(row, ids, ONE_TOKEN, row) for row, ids in enumerate(prompts)]
    ctypes.CDLL(None).malloc_trim(0)  # what the process kept of the case before goes back
    seconds, before = [], status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    for _ in range(repeats):
        start = perf_counter()
        rollout.generate(requests)
        seconds.append(perf_counter() - start)
    return median(seconds), status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)


if __name__ == "__main__":
    main()
