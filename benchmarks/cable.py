"""Trains on two machines that are made of this one: over cables of all kinds, and over one that is pulled.

    python -m benchmarks.cable [--engine hf] [--folder outputs/cable] [trial …]

Each trial does five steps of the quickstart's config with two shards, one on each machine (tests/machines.py: Linux and
root), and is compared with two workers on one machine: metrics, and the weights of the last checkpoint, bit by bit.
Where the cable is pulled, in the third step, it is mended when the run has ended; the run then waits for the second
machine, which joins Ray again, and goes on by itself, as trainer.max_restarts says.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from configs.paths import ROOT
from custom.tiny_model import save_tiny_model
from data.files import read_metrics
from tests.machines import ADDRESSES, Command, Machines, refusal
from tests.runs import learning_metrics, state_files

STEPS, PULLED_AFTER = 5, 2
SAYS = re.compile(r"^error: .*", re.MULTILINE)
ENDED = re.compile(r"^notice: this run ended .*", re.MULTILINE)
COMMON = [
    *("trainer.executor=ray", "trainer.n_threads=1", "trainer.val_before_train=false", "trainer.test_freq=-1"),
    *("trainer.save_freq=1", f"trainer.total_training_steps={STEPS}", "trainer.logger=[]"),
    *("trainer.max_restarts=1", "trainer.resume_mode=disable"),
]
HEADER = "| cable | s a step | said after, s | by | line | goes on by itself, equal |\n|---|---|---|---|---|---|"


class Trial(NamedTuple):
    """A cable by its delay each way, in seconds, and its loss; and in which verb of the workers it is pulled, if it is,
    with the deadline of the run."""

    delay: float = 0.0
    loss: float = 0.0
    pulled_in: str = ""
    deadline: float = 40.0  # more than a start takes


TRIALS = {
    "0 ms": Trial(),
    "25 ms each way": Trial(0.025),
    "25 ms, 1 % of packets lost": Trial(0.025, 0.01),
    "pulled in generation": Trial(pulled_in="rollout.generate_sequences"),
    "pulled in an update": Trial(pulled_in="actor.update_policy"),
    "pulled in saving": Trial(pulled_in="actor.save"),
    "pulled in an update, stall_timeout as it stands": Trial(pulled_in="actor.update_policy", deadline=1800.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="hf", help="hf or vllm")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/cable", help="where the runs go")
    parser.add_argument(
        "trials", nargs="*", default=[*TRIALS], metavar="trial", help="by name; all, unless any is named"
    )
    arguments = parser.parse_args()
    if reason := refusal():
        parser.error(reason)
    folder = arguments.folder.resolve() / arguments.engine
    shutil.rmtree(folder, ignore_errors=True)
    save_tiny_model(folder / "model")
    policy = f"model.path={folder / 'model'}", f"rollout.name={arguments.engine}"
    settings = [*COMMON, *(f"actor_rollout_ref.{setting}" for setting in policy)]
    with Machines(folder / "machines") as both:
        one = start(both, folder / "one", [*settings, "trainer.n_workers_per_node=2"], "RAY_ADDRESS=local")
        one.succeed()
        print(f"{HEADER}\n| none: one machine | {seconds_a_step(folder / 'one'):.2f} | | | | |", flush=True)
        both.make_cluster()
        for number, name in enumerate(arguments.trials):
            print(f"| {name} | {' | '.join(row(both, TRIALS[name], folder, number, settings))} |", flush=True)


def row(both: Machines, trial: Trial, folder: Path, number: int, own: list[str]) -> list[str]:
    """Does a trial; returns its cells."""
    both.lay(trial.delay, trial.loss)
    run, recovery = folder / str(number), ["", "", ""]
    settings = [*own, "trainer.nnodes=2", f"trainer.stall_timeout={trial.deadline}"]
    if trial.pulled_in:
        settings.append(both.pull_in(trial.pulled_in, run, PULLED_AFTER))
    command = start(both, run, settings)
    if trial.pulled_in:
        recovery = mend(both, command)
    command.succeed()
    equal = learning_metrics(run) == learning_metrics(folder / "one"), same_weights(run, folder / "one")
    return [f"{seconds_a_step(run):.2f}", *recovery, f"metrics {equal[0]}, weights {equal[1]}"]


def mend(both: Machines, command: Command) -> list[str]:
    """Waits until the cable is pulled, and the run has ended, then mends it; returns when that was said, and how."""
    command.until(lambda: not both.asked.exists())
    seconds = command.until(lambda: SAYS.search(command.said()))
    command.until(lambda: ENDED.search(command.said()))
    line = SAYS.search(command.said())[0]
    both.lay()
    both.join()
    names = "names the machine" if f" on {ADDRESSES[1]}" in line else "DOES NOT NAME the machine"
    return [f"{seconds:.1f}", "trainer.stall_timeout" if "stall_timeout" in line else "Ray", f"{names}: `{line}`"]


def start(both: Machines, run: Path, settings: list[str], *variables: str) -> Command:
    words = sys.executable, "main.py", "--config-name=frozenlake", f"trainer.default_local_dir={run}"
    return both.start(1, "env", *variables, *words, *settings)


def same_weights(run: Path, other: Path) -> bool:
    return state_files(run, STEPS) == state_files(other, STEPS)


def seconds_a_step(run: Path) -> float:
    """Returns the mean over all steps but the first, and the first after a restart, without saving."""
    seconds = [entry["data"]["perf/time_per_step"] for entry in read_metrics(run / "metrics.jsonl")]
    return mean([*seconds[1:PULLED_AFTER], *seconds[PULLED_AFTER + 1 :]])


if __name__ == "__main__":
    main()
