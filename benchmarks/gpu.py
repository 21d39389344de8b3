"""Tests and times what needs a GPU: python -m benchmarks.gpu [--json FILE] [--help]; `make gpu` does the same.

First the tests marked `gpu`, all in one process, and those that did not pass once more, each in its own. Then GRPO
steps of a model in the shape of Qwen2.5-0.5B, with random weights made here: by this repository with each engine that
is installed, and by TRL with Hugging Face generation, where it can be imported or `python -m benchmarks.vs_trl` has
installed it: bfloat16 autocast, float32 weights, AdamW, the same prompts, rewards and response lengths. One after the
other, each in a process of its own, so that none hides how the others fare. Everything has to be over within --seconds;
what is not is reported as missing. A card without bfloat16 computes in float32. Without a GPU there is nothing to do.

Columns: seconds of a step, and in it of generation, of the update and of handing the weights over (sync); seconds from
the start of the process to its first step; tokens a second of a step (prompts, once for each sample, and responses) and
of generation (responses); MFU, the arithmetic that an update cannot do without (benchmarks/floor.py) by its seconds, as
a share of what a large matrix product in the same precision reaches on this card; the most memory that PyTorch's
allocator held in a step; how often the host waited for the GPU in generation + update, counted in a step before those
that are timed; and the graphs that torch.compile made.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import importlib.util
import json
import math
import re
import subprocess
import sys
import time
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from benchmarks.floor import Shape, best_seconds, update_flops
from benchmarks.models import save_model
from benchmarks.vs_trl import ROOT, TRL_PYTHON, Arm, has_environment
from benchmarks.workload import VOCABULARY, Workload, command
from workers.engine import compute_dtype, precision_notice
from workers.models import gpu_trouble

FOLDER = ROOT / "outputs" / "gpu"
TEST_SHARE = 0.45  # of the seconds, at most
TESTS = "extras/kernels/tests/test_gpu.py"
OUTCOME = re.compile(r"^(\S+?::.+?) (PASSED|SKIPPED|XFAIL|FAILED|ERROR)\b", re.MULTILINE)  # of pytest --verbose
FAILED = ("FAILED", "ERROR")
BFLOAT16 = 2  # bytes
COLUMNS = (
    "step s", "generation s", "update s", "sync s", "start s", "tokens/s, step", "tokens/s, generation", "MFU, update",
    "peak GiB", "syncs", "graphs",
)  # fmt: skip
PRODUCT = 8192  # rows and columns of the product that is the card's speed


def main(argv: list[str] | None = None) -> None:
    arguments = read_arguments(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        if trouble := gpu_trouble():
            sys.exit(f"make gpu: {trouble}")
        print("make gpu: torch finds no GPU on this machine, so there is nothing that only a GPU could show.")
        return
    if text := precision_notice("auto", torch.device(arguments.device), parameters=0):
        print(f"make gpu: {text}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.seconds
    dtype = compute_dtype("auto", torch.device(arguments.device))
    figures: dict[str, Any] = {"device": device_name(arguments.device), "versions": versions()}
    figures["dtype"] = str(dtype).removeprefix("torch.")
    figures["tests"] = run_tests(TEST_SHARE * arguments.seconds)
    workload = workload_of(arguments)
    figures |= {"arguments": vars(arguments) | {"json": str(arguments.json)}, "arms": {}}
    for name, part in arms_here(workload, arguments).items():
        seconds = deadline - time.monotonic()
        figures["arms"][name] = arm_steps(name, part, workload, seconds)
    speed = product_flops(arguments.device, dtype)
    figures["product_tflops"] = speed and speed / 1e12
    for arm in figures["arms"].values():
        if "steps" in arm:
            arm |= summary(workload, speed, arm["steps"][-arguments.steps :])
    print(table(figures))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["tests"]["failed"] or "missing" in figures["arms"]["ours"]:
        sys.exit("make gpu: something failed, see above")


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this command out")
    parser.add_argument("--size", choices=tuple(VOCABULARY), default="qwen2-0.5b", help="the model's shape")
    parser.add_argument("--prompts", type=int, default=16, metavar="Q", help="prompts a step (16)")
    parser.add_argument("--samples", type=int, default=8, metavar="G", help="responses a prompt (8)")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="P", help="tokens of a prompt (256)")
    parser.add_argument("--response-tokens", type=int, default=256, metavar="R", help="tokens of a response (256)")
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        default=16384,
        metavar="T",
        help="of a forward; fewer for small cards (16384)",
    )
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="steps of each arm that are counted (3)")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each arm before them (2)")
    parser.add_argument("--seconds", type=float, default=520, help="all there are (520)")
    parser.add_argument(
        "--json", type=Path, default=FOLDER / "figures.json", metavar="FILE", help="everything goes here"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of our arms")
    return parser.parse_intermixed_args(argv)


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers")}


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


class Part(NamedTuple):
    """An arm: its python, its module, and the module's arguments."""

    python: str | Path
    module: str
    arguments: list[str]


def arms_here(workload: Workload, arguments: argparse.Namespace) -> dict[str, Part]:
    """Lists the arms that this machine has, by name."""
    base = ["trainer.executor=local", *micro_batch(arguments.micro_batch_tokens), *arguments.overrides]
    arms = {"ours": Part(sys.executable, "benchmarks.ours_arm", base)}
    if importlib.util.find_spec("vllm"):
        arms["ours, vllm"] = Part(sys.executable, "benchmarks.ours_arm", [*base, "actor_rollout_ref.rollout.name=vllm"])
    if has_environment() or importlib.util.find_spec("trl"):
        python = TRL_PYTHON if has_environment() else sys.executable
        arms["trl"] = Part(python, "benchmarks.trl_arm", [str(trl_micro_batch(workload, arguments.micro_batch_tokens))])
    return arms


def micro_batch(tokens: int) -> list[str]:
    return [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}"]


def trl_micro_batch(workload: Workload, tokens: int) -> int:
    """Returns TRL's responses a forward, which holds all logits: half of the `tokens` at most, and a divisor of all."""
    most = tokens // (2 * workload.longest)
    return max(size for size in range(1, max(1, min(most, workload.rows)) + 1) if workload.rows % size == 0)


def run_tests(seconds: float) -> dict[str, Any]:
    """Runs the tests marked gpu, all in one process, and then each that did not pass by itself: an error of CUDA fails
    all tests behind it in its process, and a crash ends it.

    Returns:
        {"run": how many came to an end, "failed": the names of those that did not pass, with a word on how, "seconds"}
    """
    deadline, started = time.monotonic() + seconds, time.monotonic()
    listed = pytest_output(["--collect-only", "--quiet", TESTS], deadline)
    names = [line for line in listed.splitlines() if line.startswith(f"{TESTS}::")]
    outcomes = test_outcomes([TESTS], deadline)
    failed = [] if names else [f"{TESTS} holds no test, or time was over"]
    for name in names:
        if outcomes.get(name, "FAILED") not in FAILED:
            continue
        alone = test_outcomes([name], deadline).get(name) if time.monotonic() < deadline else "not run alone"
        how = {"FAILED": "", "ERROR": "", "not run alone": "", None: " (does not end)"}.get(alone, " (passes alone)")
        failed.append(name.removeprefix(f"{TESTS}::") + how)
    return {"run": len(outcomes), "failed": failed, "seconds": time.monotonic() - started}


def test_outcomes(names: list[str], deadline: float) -> dict[str, str]:
    """Runs tests in a process; returns the outcomes of those that came to an end, by name."""
    shown = pytest_output(["--verbose", *names], deadline)
    print(shown, flush=True)
    return dict(OUTCOME.findall(shown))


def pytest_output(arguments: list[str], deadline: float) -> str:
    """Returns what pytest prints, up to the deadline, when it is killed."""
    options = ["--override-ini=addopts=", "-m", "gpu", "-p", "no:cacheprovider"]  # -q of pyproject.toml hides the names
    pytest = [sys.executable, "-m", "pytest", *options, *arguments]
    log = FOLDER / "tests.log"
    with log.open("w") as file, suppress(subprocess.TimeoutExpired):
        left = max(deadline - time.monotonic(), 0)
        subprocess.run(pytest, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=left)
    return log.read_text()


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Returns the workload of a command line, and makes its model if it is missing."""
    model = FOLDER / "models" / arguments.size
    if not model.is_dir():
        save_model(arguments.size, model, seed=0)
    return Workload.of(arguments, model, FOLDER, seed=0, ragged=False, replay=False, device=arguments.device)


def product_flops(device: str, dtype: torch.dtype) -> float | None:
    """Floating-point operations a second of a large matrix product, or None."""
    size = PRODUCT if device == "cuda" else PRODUCT // 16

    def multiply() -> None:
        torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()

    try:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        return 2 * size**3 / best_seconds(multiply)
    except RuntimeError as error:  # the arms' figures are there all the same
        print(f"the card's speed could not be measured: {error}", flush=True)
        return None


def arm_steps(name: str, part: Part, workload: Workload, seconds: float) -> dict[str, Any]:
    """All steps of an arm and what it says of itself, or {"missing": why}; its process is killed after `seconds`."""
    log = FOLDER / f"{name.replace(', ', '_')}.log"
    started = time.monotonic()
    try:
        arm = Arm(part.python, command(part.module, workload, part.arguments), log, seconds)
        with closing(arm):
            about, start = arm.about, time.monotonic() - started
            return {"about": about, "start_seconds": start, "steps": [arm.step() for _ in range(workload.steps)]}
    except (RuntimeError, BrokenPipeError) as error:
        return {"missing": f"it ended early, or not within {max(seconds, 0):.0f} s: {error}"}


def summary(workload: Workload, speed: float | None, counted: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the counted steps; `speed` in floating-point operations a second, None: not known."""
    seconds = {phase: median(step[phase] for step in counted) for phase in ("step", "rollout", "update", "sync")}
    prompts = [len(ids) for ids in workload.prompt_ids(workload.steps - 1)]
    responses = [workload.response_tokens] * workload.rows
    shape = Shape.of(AutoConfig.from_pretrained(workload.model))
    flops = update_flops(shape, prompts, workload.samples, responses)
    return {
        **{f"{phase}_seconds": value for phase, value in seconds.items()},
        "step_tokens_per_second": (workload.samples * sum(prompts) + sum(responses)) / seconds["step"],
        "rollout_tokens_per_second": sum(responses) / seconds["rollout"],
        "update_mfu": speed and flops / seconds["update"] / speed,
        "peak_gpu_gib": max(step["peak_gpu_gib"] for step in counted),
    }


def table(figures: dict[str, Any]) -> str:
    """All arms as markdown, and a line on the tests."""
    tests, arms = figures["tests"], figures["arms"]
    lines = [
        f"{figures['device']}, " + ", ".join(f"{name} {number}" for name, number in figures["versions"].items()),
        f"{tests['run']} tests in {tests['seconds']:.0f} s, failed: {', '.join(tests['failed']) or 'none'}",
        f"a large matrix product in {figures['dtype']}: {figures['product_tflops'] or math.nan:.1f} TFLOP/s",
        "",
        "| " + " | ".join(["", *COLUMNS]).lstrip(" ") + " |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for name, arm in arms.items():
        cells = [arm["missing"].splitlines()[0]] if "missing" in arm else cells_of(arm)
        lines.append("| " + " | ".join([name, *cells, *[""] * (len(COLUMNS) - len(cells))]) + " |")
    if "trl" not in arms:
        lines.append("TRL is not installed here: `make bench` installs it in an environment of its own.")
    return "\n".join(lines)


def cells_of(arm: dict[str, Any]) -> list[str]:
    """An arm's figures, in the order of COLUMNS."""
    watched = arm["steps"][1]
    return [
        *(f"{arm[f'{phase}_seconds']:.2f}" for phase in ("step", "rollout", "update", "sync")),
        f"{arm['start_seconds']:.0f}",
        *(f"{arm[f'{phase}_tokens_per_second']:.0f}" for phase in ("step", "rollout")),
        f"{arm['update_mfu'] or math.nan:.1%}",
        f"{arm['peak_gpu_gib']:.1f}",
        f"{watched['rollout_syncs']} + {watched['update_syncs']}",
        f"{arm['steps'][-1]['graphs']}",
    ]


if __name__ == "__main__":
    main()
