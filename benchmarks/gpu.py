"""Tests and times what needs a GPU: python -m benchmarks.gpu [--json FILE] [--help]; `make gpu` does the same.

First the tests marked `gpu`. Then GRPO steps of a model in the shape of Qwen2.5-0.5B, with random weights made here, by
this repository and, where `trl` can be imported, by TRL with Hugging Face generation: bfloat16 autocast, float32
weights, AdamW, the same prompts, rewards and response lengths. One after the other, each in a process of its own.
Everything has to be over within --seconds; what is not is reported as missing. Without a GPU there is nothing to do.

Columns: tokens a second of a step (prompts, once for each sample, and responses) and of generation (responses); MFU,
the arithmetic that an update cannot do without (benchmarks/floor.py) by its seconds, as a share of what a large
bfloat16 matrix product reaches on this card; and the most memory that PyTorch's allocator held in a step.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import torch
from transformers import AutoConfig

from benchmarks.floor import Shape, best_seconds, update_flops
from benchmarks.models import save_model
from benchmarks.vs_trl import ROOT, Arm
from benchmarks.workload import VOCABULARY, Workload, command

FOLDER = ROOT / "outputs" / "gpu"
TEST_SHARE = 0.45  # of the seconds, at most
TRL_MICRO_BATCH = 16  # responses a forward of TRL's
PRODUCT = 8192  # rows and columns of the product that is the card's speed


def main(argv: list[str] | None = None) -> None:
    arguments = read_arguments(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("make gpu: torch finds no GPU on this machine, so there is nothing that only a GPU could show.")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.seconds
    figures: dict[str, Any] = {"device": device_name(arguments.device), "versions": versions()}
    figures["tests"] = run_tests(TEST_SHARE * arguments.seconds)
    workload = workload_of(arguments)
    speed = product_flops(arguments.device)
    figures |= {
        "product_tflops": speed / 1e12,
        "arguments": vars(arguments) | {"json": str(arguments.json)},
        "arms": {},
    }
    for name in arms_here():
        found = arm_steps(name, workload, deadline - time.monotonic())
        if "steps" in found:
            found |= summary(workload, speed, found["steps"][-arguments.steps :])
        figures["arms"][name] = found
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
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="steps of each arm that are counted (3)")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each arm before them (2)")
    parser.add_argument("--seconds", type=float, default=520, help="all there are (520)")
    parser.add_argument(
        "--json", type=Path, default=FOLDER / "figures.json", metavar="FILE", help="everything goes here"
    )
    return parser.parse_args(argv)


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers")}


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def arms_here() -> list[str]:
    return ["ours", *(["trl"] if importlib.util.find_spec("trl") else [])]


def run_tests(seconds: float) -> dict[str, Any]:
    """Runs the tests marked gpu; returns how many ran, the names of those that failed, and the seconds."""
    report = FOLDER / "tests.xml"
    report.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py", "-p", "no:cacheprovider"]
    started = time.monotonic()
    try:
        subprocess.run([*pytest, f"--junitxml={report}"], cwd=ROOT, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"the tests were not over after {seconds:.0f} s", flush=True)
    return read_report(report) | {"seconds": time.monotonic() - started}


def read_report(report: Path) -> dict[str, Any]:
    """Of pytest's XML; one that is not there is a failure of all."""
    if not report.is_file():
        return {"run": 0, "failed": ["tests/test_gpu.py did not come to its end"]}
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case.get("name") for case in cases if any(child.tag in ("failure", "error") for child in case)]
    return {"run": len(cases), "failed": failed if cases else ["tests/test_gpu.py holds no test"]}


def workload_of(arguments: argparse.Namespace) -> Workload:
    """With its model, which is made if it is not there."""
    model = FOLDER / "models" / arguments.size
    if not model.is_dir():
        save_model(arguments.size, model, seed=0)
    return Workload.of(arguments, model, FOLDER, seed=0, ragged=False, replay=False, device=arguments.device)


def product_flops(device: str) -> float:
    """Floating-point operations a second of a large matrix product, bfloat16 on a GPU, float32 on a CPU."""
    size, dtype = (PRODUCT, torch.bfloat16) if device == "cuda" else (PRODUCT // 16, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * size**3 / best_seconds(multiply)


def arm_steps(name: str, workload: Workload, seconds: float) -> dict[str, Any]:
    """All steps of an arm and what it says of itself, or {"missing": why}; its process is killed after `seconds`."""
    own = {"ours": ["trainer.executor=local"], "trl": [str(min(TRL_MICRO_BATCH, workload.rows))]}[name]
    log = FOLDER / f"{name}.log"
    try:
        arm = Arm(sys.executable, command(f"benchmarks.{name}_arm", workload, own), log, seconds)
        with closing(arm):
            return {"about": arm.about, "steps": [arm.step() for _ in range(workload.steps)]}
    except (RuntimeError, BrokenPipeError) as error:
        return {"missing": f"it ended early, or not within {max(seconds, 0):.0f} s: {error}"}


def summary(workload: Workload, speed: float, counted: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the counted steps; `speed` in floating-point operations a second."""
    seconds = {phase: median(step[phase] for step in counted) for phase in ("step", "rollout", "update")}
    prompts = [len(ids) for ids in workload.prompt_ids(workload.steps - 1)]
    responses = [workload.response_tokens] * workload.rows
    shape = Shape.of(AutoConfig.from_pretrained(workload.model))
    flops = update_flops(shape, prompts, workload.samples, responses)
    return {
        **{f"{phase}_seconds": value for phase, value in seconds.items()},
        "step_tokens_per_second": (workload.samples * sum(prompts) + sum(responses)) / seconds["step"],
        "rollout_tokens_per_second": sum(responses) / seconds["rollout"],
        "update_mfu": flops / seconds["update"] / speed,
        "peak_gpu_gib": max(step["peak_gpu_gib"] for step in counted),
    }


def table(figures: dict[str, Any]) -> str:
    """All arms as markdown, and a line on the tests."""
    tests, arms = figures["tests"], figures["arms"]
    lines = [
        f"{figures['device']}, " + ", ".join(f"{name} {number}" for name, number in figures["versions"].items()),
        f"{tests['run']} tests in {tests['seconds']:.0f} s, failed: {', '.join(tests['failed']) or 'none'}",
        f"a large matrix product: {figures['product_tflops']:.1f} TFLOP/s",
        "",
        "| | step s | generation s | update s | tokens/s, step | tokens/s, generation | MFU, update | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        if "missing" in arm:
            lines.append(f"| {name} | {arm['missing'].splitlines()[0]} |" + " |" * 6)
            continue
        seconds = " | ".join(f"{arm[f'{phase}_seconds']:.2f}" for phase in ("step", "rollout", "update"))
        rates = f"{arm['step_tokens_per_second']:.0f} | {arm['rollout_tokens_per_second']:.0f}"
        lines.append(f"| {name} | {seconds} | {rates} | {arm['update_mfu']:.1%} | {arm['peak_gpu_gib']:.1f} |")
    if "trl" not in arms:
        lines.append("TRL is not installed here (benchmarks/requirements-trl.txt).")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
