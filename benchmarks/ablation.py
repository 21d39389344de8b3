"""What each kernel gains: python -m benchmarks.ablation [--size {1m,10m,135m}] [--kernels a,b] [--json FILE] [--help]

The step of benchmarks/vs_trl.py, by processes that take turns: one as it is, and for each kernel of workers/kernels/
one that goes without it. Prints the median seconds of a step, of its rollout and of its update, and the median of their
ratios to those of the process that has all, step by step in the same round, as a shared machine is not equally fast all
the time: 1.10 means that a step takes a tenth more without the kernel. The quarters of the ratios stand beside it.
"""

from configs.process import set_environment

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.ablation_arm import KERNELS
from benchmarks.vs_trl import FOLDER, SETTLE_SECONDS, Arm, workload_of
from benchmarks.vs_trl import read_arguments as read_workload
from benchmarks.workload import Workload, command

PHASES = ("step", "rollout", "update")
EVERYTHING = "all kernels"


def main() -> None:
    arguments, workload = read_arguments()
    rows: list[dict[str, Any]] = []
    kernels = arguments.kernels.split(",") if arguments.kernels else list(KERNELS)
    for start in range(0, len(kernels), arguments.at_once):
        rows += compare(workload, kernels[start : start + arguments.at_once], arguments)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def read_arguments() -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", metavar="A,B", help=f"which to do without, one at a time: {', '.join(KERNELS)}")
    parser.add_argument(
        "--at-once", type=int, default=2, metavar="N", help="beside the one with all (2); at 135m each takes 5 GB"
    )
    own, others = parser.parse_known_args()
    if unknown := set(filter(None, (own.kernels or "").split(","))) - set(KERNELS):
        parser.error(f"--kernels names {sorted(unknown)}, which are none of {', '.join(KERNELS)}")
    arguments = read_workload(others)
    vars(arguments).update(vars(own))
    return arguments, workload_of(arguments)


def compare(workload: Workload, kernels: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of figures for the process with all kernels, and for each that goes without one."""
    with ExitStack() as running:
        arms = {name: start_arm(workload, name, arguments.overrides, running) for name in (EVERYTHING, *kernels)}
        for _ in range(1 + arguments.warmup):
            for arm in arms.values():
                arm.step()
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for _ in range(0, arguments.steps, arguments.block):
            for name, arm in arms.items():
                time.sleep(SETTLE_SECONDS)
                steps[name] += [arm.step() for _ in range(arguments.block)]
    rows = [figures(name, taken, steps[EVERYTHING]) for name, taken in steps.items()]
    for row in rows:
        print(line(row), flush=True)
    return rows


def start_arm(workload: Workload, kernel: str, overrides: list[str], running: ExitStack) -> Arm:
    folder = FOLDER / "ablation" / kernel.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    own = [kernel, *overrides] if kernel != EVERYTHING else ["", *overrides]
    arm = Arm(
        sys.executable,
        command("benchmarks.ablation_arm", replace(workload, folder=str(folder)), own),
        Path(folder, "arm.log"),
    )
    running.callback(arm.close)
    return arm


def figures(name: str, steps: list[dict[str, float]], with_all: list[dict[str, float]]) -> dict[str, Any]:
    """`steps` of one process beside those of the process `with_all` kernels, in the same order."""
    pairs = list(zip(steps, with_all, strict=True))
    ratios = {phase: [one[phase] / other[phase] for one, other in pairs] for phase in PHASES}
    return {
        "without": name,
        "seconds": {phase: median(step[phase] for step in steps) for phase in PHASES},
        "ratio": {phase: quantiles(found, n=4, method="inclusive") for phase, found in ratios.items()},
        "peak_rss_gb": steps[-1]["peak_rss_gb"],
    }


def line(row: dict[str, Any]) -> str:
    without = row["without"] if row["without"] == EVERYTHING else f"without {row['without']}"
    cells = []
    for phase in PHASES:
        low, middle, high = row["ratio"][phase]
        cells.append(f"{phase} {row['seconds'][phase]:.3f} s {middle:.2f} ({low:.2f} to {high:.2f})")
    return f"{without:<40}" + "  ".join(cells) + f"  {row['peak_rss_gb']:.1f} GB"


if __name__ == "__main__":
    main()
