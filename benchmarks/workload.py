"""Defines the workload that both arms of benchmarks/vs_trl.py run, and their pipes to the parent.

Model files, prompts, responses of the recorded batch, reward and optimiser come from here, so that an arm can differ
from the other in nothing but how it does the work. Imported by both environments: it needs nothing of ours and nothing
of TRL. Token ids are spelt out as text ("17 4 233"), so both arms go through a tokenizer, as in any run.
"""

import argparse
import json
import os
import random
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = {"1m": 512, "10m": 4096, "135m": 49152, "qwen2-0.5b": 151936, "qwen2-1.5b": 151936}
VOCABULARY |= dict.fromkeys(("qwen2-7b", "qwen2-32b", "qwen2-72b"), 152064)
PAD = 0  # of the vocabulary; the end-of-sequence id is one past it, so no response can stop early

ADAMW = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CLIP_NORM = 1.0
SYNC = "synchronizing CUDA operation"  # in the warnings of torch.cuda.set_sync_debug_mode
CLIP_RATIO = 0.2


@dataclass(frozen=True)
class Workload:
    """One comparison: `steps` steps of `prompts` × `samples` responses. Step 0 is the recorded batch."""

    size: str
    prompts: int
    samples: int
    prompt_tokens: int  # on average, if ragged
    response_tokens: int  # of every response, but in the recorded batch, where it is the longest
    steps: int  # all of them, step 0 and warm-up included
    seed: int
    ragged: bool  # prompts of half to one and a half times prompt_tokens
    replay: bool  # every step takes the recorded batch
    model: str
    folder: str  # for what the arms write
    device: str = "cpu"  # or cuda, in bfloat16; the first update is then not kept: it would be gigabytes

    @classmethod
    def of(cls, arguments: argparse.Namespace, model: Path, folder: Path, **others: Any) -> "Workload":
        """Returns the workload that a command line asks for; step 0 and the warm-up precede the counted steps."""
        names = ("size", "prompts", "samples", "prompt_tokens", "response_tokens")
        sizes = {name: vars(arguments)[name] for name in names}
        steps = 1 + arguments.warmup + arguments.steps
        return cls(**sizes, steps=steps, model=str(model), folder=str(folder), **others)

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its response, not ragged."""
        return self.prompt_tokens + self.response_tokens

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    def prompt_ids(self, step: int) -> list[list[int]]:
        """The prompts of a step, each once."""
        rng = random.Random(f"prompts {self.seed} {0 if self.replay else step}")
        spread = self.prompt_tokens // 2 if self.ragged else 0
        lengths = [self.prompt_tokens + rng.randint(-spread, spread) for _ in range(self.prompts)]
        return [self.random_ids(rng, length) for length in lengths]

    def texts(self) -> list[str]:
        """The prompts of all steps, in order."""
        return [" ".join(map(str, ids)) for step in range(self.steps) for ids in self.prompt_ids(step)]

    def recorded(self) -> list[list[int]]:
        """The responses of the recorded batch, one a row, the samples of a prompt together; their lengths differ."""
        rng = random.Random(f"responses {self.seed}")
        shortest = (self.response_tokens + 3) // 4
        return [self.random_ids(rng, rng.randint(shortest, self.response_tokens)) for _ in range(self.rows)]

    def is_recorded(self, step: int) -> bool:
        return self.replay or step == 0

    def is_watched(self, step: int) -> bool:
        """Says whether the waits for a GPU are counted, which takes time: in the first step that samples."""
        return step == 1

    def random_ids(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(PAD + 1, VOCABULARY[self.size]) for _ in range(count)]


def score(solution_str: str) -> float:
    """The reward of a response, read off its tokens. Large, so that the ε which each arm adds to a group's standard
    deviation is nothing beside it."""
    return float(sum(int(token) * 40503 % 1009 for token in solution_str.split()))


class Meter:
    """Seconds, CPU seconds, tokens and memory of a step. A forward with gradients is the update's, any other the
    rollout's.

    Tokens are those that pass the embedding of `module`, padding included. Syncs are the operations for which the host
    waits for the GPU, and graphs those that torch.compile has made so far.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.tokens, self.syncs = {"rollout": 0, "update": 0}, {"rollout": 0, "update": 0}
        module.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, _: torch.nn.Module, inputs: tuple[torch.Tensor], __: torch.Tensor) -> None:
        self.tokens[phase()] += inputs[0].numel()

    def watch(self, on: bool) -> None:
        """Has torch warn of each wait for the GPU, from now on or no more, and counts the warnings."""
        self.syncs = dict.fromkeys(self.syncs, 0)
        if not torch.cuda.is_available():
            return
        torch.cuda.set_sync_debug_mode("warn" if on else "default")
        if on:
            warnings.filterwarnings("always", message=f".*{SYNC}")
            show = warnings.showwarning

            def count(message: Warning | str, *details: Any) -> None:
                if SYNC in str(message):
                    self.syncs[phase()] += 1
                else:
                    show(message, *details)

            warnings.showwarning = count

    def start(self, watched: bool = False) -> None:
        """Begins a step; `watched`: its syncs are counted."""
        self.watch(watched)
        settle()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.tokens = dict.fromkeys(self.tokens, 0)
        self.cpu = cpu_seconds()
        self.started = time.perf_counter()

    def stop(self, rollout: float, update: float) -> dict[str, float]:
        """The figures of the step since `start`, of which `rollout` and `update` seconds went into those."""
        settle()
        seconds = time.perf_counter() - self.started
        return {
            "step": seconds,
            "rollout": rollout,
            "update": update,
            "sync": 0.0,
            "other": seconds - rollout - update,
            "cpu_seconds": cpu_seconds() - self.cpu,
            "rollout_tokens": self.tokens["rollout"],
            "update_tokens": self.tokens["update"],
            **{f"{name}_syncs": count for name, count in self.syncs.items()},
            "graphs": compiled_graphs(),
            "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,  # so far
            "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30,
        }


def phase() -> str:
    return "update" if torch.is_grad_enabled() else "rollout"


def compiled_graphs() -> int:
    """Counts the graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def settle() -> None:
    """Waits until the GPU, if there is one, has done what it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cpu_seconds() -> float:
    """Returns the CPU seconds of all threads of this process, and of its child processes that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def save_update(file: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, grad_norm: float) -> None:
    """Saves the weights after the first update, the gradient that AdamW saw (its first moment is (1 − β₁) of
    that), and the gradient's norm before clipping."""
    named = dict(module.named_parameters())
    scale = 1 - ADAMW["betas"][0]
    saved = {
        "weights": {name: weight.detach() for name, weight in named.items()},
        "gradient": {name: optimizer.state[weight]["exp_avg"] / scale for name, weight in named.items()},
        "grad_norm": grad_norm,
    }
    torch.save(saved, file)


class Channel:
    """An arm's end of the pipes: the parent asks for a step by a line, and gets a line of JSON back."""

    def __init__(self) -> None:
        self.replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what libraries print goes to the log

    def wait(self) -> None:
        """Returns when the next step is asked for; the process ends if the parent is gone or wants no more."""
        if not sys.stdin.readline():
            raise SystemExit(0)

    def reply(self, message: dict[str, Any]) -> None:
        self.replies.write(json.dumps(message) + "\n")


def read_arguments() -> tuple[Workload, list[str]]:
    """An arm's command line: the workload as JSON, then what is meant for this arm alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=json.loads)
    parser.add_argument("own", nargs="*")
    arguments = parser.parse_args()
    return Workload(**arguments.workload), arguments.own


def command(module: str, workload: Workload, words: list[str]) -> Iterator[str]:
    """Builds the command line that `read_arguments` reads, for `python`."""
    yield from ("-m", module, json.dumps(asdict(workload)), *words)
