"""Gain of each kernel: python -m benchmarks.ablation [--size {1m,10m,135m}] [--kernels A,B] [--json FILE] [--help]

The step of benchmarks/vs_trl.py in one process, which goes with and without a part of extras/kernels/ by turns: pairs
of steps next to each other, as a shared machine is not equally fast all the time, and of one process, as two differ in
the memory pages that they happen to get. Prints the median of the ratios of each pair, of the step, its rollout and its
update: 1.10 means that it takes a tenth longer without the kernel. The quarters of the ratios stand beside it.
"""

from configs.process import set_environment

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel

from benchmarks.ours_arm import OursArm
from benchmarks.vs_trl import read_arguments as read_workload
from benchmarks.vs_trl import workload_of
from benchmarks.workload import Workload
from extras.kernels import decode, kernels, packed_attention, products, ragged
from workers import scoring_model

PHASES = ("step", "rollout", "update")
USUAL_MMAP_MAX, USUAL_TRIM_THRESHOLD = 65536, 128 << 10  # glibc's own settings


def plain_head(
    hidden, weight, labels, *, bias=None, temperature=1.0, softcap=None, with_entropy=False, with_sum_pi_squared=False
):
    """The scores of labels from whole logits, which autograd takes apart."""
    logits = products.linear(hidden, weight, bias) / temperature
    log_pi = logits.log_softmax(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1) if with_entropy else None
    return log_pi.gather(1, labels[:, None])[:, 0], entropy, None


def instead(module: Any, name: str, value: Any) -> Callable[[PreTrainedModel], AbstractContextManager]:
    return lambda model: patch.object(module, name, value)


@contextmanager
def padded(model: PreTrainedModel) -> Iterator[None]:
    """The padded forward, and prompts that decoding reads once a row."""
    forward, attention = model.token_scores, model.config._attn_implementation
    scoring_model.set_forward(model, scoring_model.padded_scores, shares_prompts=False)
    model.set_attn_implementation("sdpa")
    yield
    scoring_model.set_forward(model, forward.__func__, shares_prompts=True)
    model.set_attn_implementation(attention)


@contextmanager
def plain_memory(model: PreTrainedModel) -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.mallopt(kernels.M_MMAP_MAX, USUAL_MMAP_MAX)
    libc.mallopt(kernels.M_TRIM_THRESHOLD, USUAL_TRIM_THRESHOLD)
    libc.malloc_trim(0)
    yield
    libc.mallopt(kernels.M_MMAP_MAX, 0)
    libc.mallopt(kernels.M_TRIM_THRESHOLD, kernels.MAX_INT)


# name → model → a context in which a step goes without it (for the products: by the other library)
KERNELS: dict[str, Callable[[PreTrainedModel], AbstractContextManager]] = {
    "oneDNN products": instead(products, "IS_FASTER", not products.IS_FASTER),
    "weights packed for decoding": instead(decode, "packed_linear", lambda *_: None),
    "prompts read once in decoding": instead(decode, "is_packed", lambda model: False),
    "packed forward": padded,
    "attention by blocks": instead(ragged, "BLOCK", 1 << 30),
    "token head": instead(packed_attention, "score_tokens", plain_head),
    "kept memory": plain_memory,
}
Step = dict[str, float]
SETTLING = {"kept memory": 1}  # steps after each change that are not counted: memory is given back, or found again


def main() -> None:
    arguments, workload, kernels = read_arguments()
    arm = OursArm(workload, arguments.overrides)
    model, steps = arm.group.worker.policy.module, iter(range(workload.steps))

    def step() -> dict[str, float]:
        return arm.step(next(steps))

    for _ in range(1 + arguments.warmup):
        step()
    rows = []
    for name in kernels:
        pairs = compare(step, partial(KERNELS[name], model), arguments.steps, SETTLING.get(name, 0))
        rows.append(figures(name, pairs))
        print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def read_arguments() -> tuple[argparse.Namespace, Workload, list[str]]:
    """The arguments, the workload with all steps that will be taken, and the names of the kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", metavar="A,B", help=f"which to do without, one at a time: {', '.join(KERNELS)}")
    own, others = parser.parse_known_args()
    kernels = own.kernels.split(",") if own.kernels else list(KERNELS)
    if unknown := set(kernels) - set(KERNELS):
        parser.error(f"--kernels names {sorted(unknown)}, which are none of {', '.join(KERNELS)}")
    arguments = read_workload(others)
    steps = sum(2 * arguments.steps * (1 + SETTLING.get(name, 0)) for name in kernels)
    return arguments, replace(workload_of(arguments), steps=1 + arguments.warmup + steps), kernels


def compare(
    step: Callable[[], Step], without: Callable[[], AbstractContextManager], pairs: int, settling: int
) -> list[tuple[Step, Step]]:
    """So many `pairs` of a step with the kernel and one without; which of them is first changes."""

    def settled() -> Step:
        return [step() for _ in range(settling + 1)][-1]

    found = []
    for pair in range(pairs):
        first = settled() if pair % 2 else None
        with without():
            other = settled()
        found.append((first or settled(), other))
    return found


def figures(name: str, pairs: list[tuple[Step, Step]]) -> dict[str, Any]:
    ratios = {phase: [other[phase] / own[phase] for own, other in pairs] for phase in PHASES}
    return {
        "without": name,
        "pairs": len(pairs),
        "seconds_with": {phase: median(own[phase] for own, _ in pairs) for phase in PHASES},
        "ratio": {phase: quantiles(found, n=4, method="inclusive") for phase, found in ratios.items()},
    }


def line(row: dict[str, Any]) -> str:
    cells = []
    for phase in PHASES:
        low, middle, high = row["ratio"][phase]
        cells.append(f"{phase} {middle:.2f} ({low:.2f} to {high:.2f}) of {row['seconds_with'][phase]:.3f} s")
    return f"without {row['without']:<31}" + "  ".join(cells)


if __name__ == "__main__":
    main()
