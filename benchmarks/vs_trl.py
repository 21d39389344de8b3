"""A GRPO step beside TRL's: python -m benchmarks.vs_trl [--size {1m,10m,135m}] [--replay] [--json FILE] [--help]

Both trainers get the same weights, prompts, response lengths, rewards, loss and AdamW; each is a process that waits
while the other works, in turns of a few steps. TRL has an environment of its own, made at the first call
(outputs/vs_trl), and the micro-batch that is fastest in a small sweep. Ratios are TRL's median seconds by ours.

Step 0 of both is one recorded batch from the same weights: unless their changes of the parameters agree (cosine above
0.9999, gradient norms equal to 0.1 %) the work is not the same, and the exit code is 1. With --replay every step takes
the recorded batch, so only the update is compared. The floor is what the arithmetic alone takes at this machine's
speed (benchmarks/floor.py), the median of what is measured between the turns: a shared machine is not equally fast all
the time. Anything else that runs on the machine disturbs the seconds; its load is recorded.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks.figures import ARMS, summary, table
from benchmarks.floor import Machine, Shape, measure_machine, rollout_floor, typical, update_floor
from benchmarks.workload import VOCABULARY, Workload, command
from configs.process import VARIABLES, worker_threads
from extras.kernels.kernels import start_process

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "outputs" / "vs_trl"
READY = FOLDER / "venv" / "ready.txt"
TRL_PYTHON = FOLDER / "venv" / "bin" / "python"
REQUIREMENTS = ROOT / "benchmarks" / "requirements-trl.txt"
LEAST_COSINE = 0.9999
NORM_TOLERANCE = 1e-3
SETTLE_SECONDS = 0.5  # before an arm's turn: the other's threads come to rest


def main() -> None:
    arguments = read_arguments()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    build_environment()
    workload = workload_of(arguments)
    shape = Shape.of(AutoConfig.from_pretrained(workload.model))
    threads = worker_threads(None).number
    torch.set_num_threads(threads)
    start_process()
    with ExitStack() as running:
        arms = start_arms(workload, arguments, running)
        agreement = compare_first_steps(arms, workload, arguments.warmup)
        blocks, machines = take_turns(arms, shape, arguments)
    machine = typical(machines)
    figures = {
        **summary(blocks, floors(shape, machine, workload)),
        **agreement,
        "trl": arms["trl"].about,
        "machine": {
            "gflops": machine.flops / 1e9,
            "gflops_by_turn": [each.flops / 1e9 for each in machines],
            "gb_per_second": machine.bandwidth / 1e9,
            "threads": threads,
        },
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "arguments": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()
        },
        "blocks": blocks,
    }
    print(table(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if difference := difference_of(agreement):
        sys.exit(f"the arms do not do the same work: {difference}")


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(VOCABULARY), default="1m", help="parameters of the model")
    parser.add_argument("--prompts", type=int, metavar="Q", help="prompts a step (16; 4 at 135m)")
    parser.add_argument("--samples", type=int, default=8, metavar="G", help="responses a prompt (8)")
    parser.add_argument("--prompt-tokens", type=int, metavar="P", help="tokens of a prompt (40; 64 at 135m)")
    parser.add_argument("--response-tokens", type=int, default=32, metavar="R", help="tokens of a response (32)")
    parser.add_argument("--steps", type=int, metavar="K", help="steps of each arm that are counted (10; 3 at 135m)")
    parser.add_argument("--block", type=int, metavar="N", help="steps an arm takes in its turn (2; 1 at 135m)")
    parser.add_argument("--warmup", type=int, help="steps of each arm left out (8; 3 at 135m)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, prompts and recorded responses (0)")
    parser.add_argument("--ragged", action="store_true", help="prompts of P/2 to 3P/2 tokens")
    parser.add_argument("--replay", action="store_true", help="every step takes the recorded batch: the update alone")
    parser.add_argument("--trl-micro-batch", type=int, metavar="M", help="responses a forward of TRL's; without: sweep")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of our arm")
    arguments = parser.parse_intermixed_args(argv)
    # A process that keeps its memory has all of it after 3 to 8 steps, the more the smaller they are.
    usual = {"prompts": 16, "prompt_tokens": 40, "steps": 10, "block": 2, "warmup": 8}
    large = {"prompts": 4, "prompt_tokens": 64, "steps": 3, "block": 1, "warmup": 3}
    for name, value in (large if arguments.size == "135m" else usual).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    for name in ("prompts", "prompt_tokens", "response_tokens", "steps", "block"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.samples < 2:
        parser.error("--samples must be at least 2: GRPO compares the responses of a prompt")
    if arguments.trl_micro_batch and arguments.prompts * arguments.samples % arguments.trl_micro_batch:
        parser.error("--trl-micro-batch must divide prompts × samples")
    return arguments


def has_environment() -> bool:
    """Says whether TRL's is there, with its requirements as they are now."""
    return READY.is_file() and READY.read_text() == REQUIREMENTS.read_text()


def build_environment() -> None:
    """TRL's, once: again only when its requirements change."""
    if has_environment():
        return
    print(f"making TRL's environment in {FOLDER / 'venv'} (once, some minutes)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER / "venv"], check=True)
    pip = [TRL_PYTHON, "-m", "pip", "install", "--quiet", "--requirement", REQUIREMENTS]
    subprocess.run(pip, check=True)
    READY.write_text(REQUIREMENTS.read_text())


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Returns the workload of a command line, and makes its model if it is missing."""
    model = FOLDER / "models" / (arguments.size if arguments.size == "135m" else f"{arguments.size}-{arguments.seed}")
    if not model.is_dir():
        make = [sys.executable, "-m", "benchmarks.models", arguments.size, str(model), str(arguments.seed)]
        subprocess.run(make, check=True, cwd=ROOT)
    options = {name: vars(arguments)[name] for name in ("seed", "ragged", "replay")}
    return Workload.of(arguments, model, FOLDER, **options)


class Arm:
    """A process that takes a step when asked to. `about` is what it says of itself when it is ready.

    It is killed after `seconds`, if there is such a limit: whoever waits for it then hears that it ended early.
    """

    def __init__(self, python: str | Path, arguments: Iterable[str], log: Path, seconds: float | None = None) -> None:
        self.log = log
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}  # as users have it
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with log.open("w") as stderr:
            self.process = subprocess.Popen([python, *arguments], **pipes, stderr=stderr, cwd=ROOT, env=environment)
        self.limit = Timer(max(seconds or 0, 0), self.process.kill)
        self.limit.daemon = True
        if seconds is not None:
            self.limit.start()
        self.about = self.reply()

    def step(self) -> dict[str, Any]:
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.reply()

    def reply(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an arm ended early; {self.log} ends in\n{self.log.read_text()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        self.limit.cancel()
        self.process.stdin.close()
        self.process.wait()


def start_arms(workload: Workload, arguments: argparse.Namespace, running: ExitStack) -> dict[str, Arm]:
    """Starts the arms one after the other, so that TRL's sweep has the machine to itself; `running` closes them."""
    words = {"ours": arguments.overrides, "trl": [str(arguments.trl_micro_batch)] if arguments.trl_micro_batch else []}
    arms = {}
    for name, python in (("ours", sys.executable), ("trl", TRL_PYTHON)):
        arm = Arm(python, command(f"benchmarks.{name}_arm", workload, words[name]), FOLDER / f"{name}.log")
        running.callback(arm.close)
        arms[name] = arm
    return arms


def compare_first_steps(arms: dict[str, Arm], workload: Workload, warmup: int) -> dict[str, Any]:
    """Compares the updates of step 0, and takes the steps that are not counted."""
    for _ in range(1 + warmup):
        for name in ARMS:
            arms[name].step()
    return compare_updates(Path(workload.model), {name: FOLDER / f"{name}.pt" for name in ARMS})


def take_turns(
    arms: dict[str, Arm], shape: Shape, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[Machine]]:
    """The counted steps of both arms, a block each at a time; and what the machine could do between the blocks, as a
    shared one is not equally fast all the time."""
    blocks, machines = [], []
    for start in range(0, arguments.steps, arguments.block):
        for name in ARMS:
            time.sleep(SETTLE_SECONDS)
            machines.append(measure_machine(shape))
            load = os.getloadavg()[0]
            steps = [arms[name].step() for _ in range(min(arguments.block, arguments.steps - start))]
            blocks.append({"arm": name, "load_before": load, "steps": steps})
            took = " ".join(f"{step['step']:.2f}" for step in steps)
            print(f"{name:<5} steps {start + 1}-{start + len(steps)}: {took} s (load before: {load:.1f})", flush=True)
    return blocks, machines


def compare_updates(model: Path, files: dict[str, Path]) -> dict[str, Any]:
    """Compares the arms' first updates: cosine of parameter changes and of gradients, and the gradients' norms."""
    before = load_file(model / "model.safetensors")
    trl, ours = (torch.load(files[name]) for name in ARMS)
    assert trl["weights"].keys() == ours["weights"].keys(), "the arms' parameters differ in name"
    names = sorted(ours["weights"])
    deltas = [[arm["weights"][name] - before[name] for name in names] for arm in (trl, ours)]
    gradients = [[arm["gradient"][name] for name in names] for arm in (trl, ours)]
    for file in files.values():
        file.unlink()
    return {
        "delta_cosine": cosine(*deltas),
        "gradient_cosine": cosine(*gradients),
        "gradient_norm": {"trl": trl["grad_norm"], "ours": ours["grad_norm"]},
    }


def difference_of(agreement: dict[str, Any]) -> str | None:
    """Returns how the updates differ, or None. The norms are compared as well, because AdamW's first step is
    the same for a gradient of any size: a wrong denominator would not show in it."""
    norms = agreement["gradient_norm"]
    if not agreement["delta_cosine"] > LEAST_COSINE:
        return f"the cosine of their parameter changes is {agreement['delta_cosine']:.6f}, not above {LEAST_COSINE}"
    if not math.isclose(norms["trl"], norms["ours"], rel_tol=NORM_TOLERANCE):
        return f"their gradient norms are {norms['trl']:.6g} (TRL) and {norms['ours']:.6g}"
    return None


def cosine(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Returns the cosine of two vectors that come in pieces."""

    def dot(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return sum(torch.dot(x.double().flatten(), y.double().flatten()).item() for x, y in zip(a, b, strict=True))

    return dot(left, right) / math.sqrt(dot(left, left) * dot(right, right))


def floors(shape: Shape, machine: Machine, workload: Workload) -> dict[str, float]:
    """The least seconds of each phase, for prompts like those of the last step; of a replay, the update's alone."""
    prompts = [len(ids) for ids in workload.prompt_ids(workload.steps - 1)]
    if workload.replay:
        return {"update": update_floor(shape, machine, prompts, workload.samples, list(map(len, workload.recorded())))}
    lengths = (prompts, workload.samples, [workload.response_tokens] * workload.rows)
    rollout, update = rollout_floor(shape, machine, *lengths), update_floor(shape, machine, *lengths)
    return {"step": rollout + update, "rollout": rollout, "update": update}


if __name__ == "__main__":
    main()
