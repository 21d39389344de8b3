"""Sends signals to runs of every kind, resumes them, and compares them with unbroken runs: python -m scripts.signals

A row is a run and a signal, to its process alone or to its whole group, as a terminal and a job scheduler send it: the
last step that was done then, the one that was saved, how the run ended, and whether all metrics of the
resumed run are those of the unbroken one. Exit status 1: in one row they are not. Names of runs as arguments leave the
others out.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
STEPS, SENT_AFTER = 6, 2
SHORT = [
    *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.logger=[]"),
    "trainer.n_threads=1",
]
GAMES = [
    *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "env.train_size=10", "env.val_episodes=0"),
    *("data.max_response_length=4", "trainer.log_val_generations=0"),
]
TURNS = [
    *GAMES[:-2],
    "trainer.log_val_generations=0",
    "env.max_turns=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]
RUNS = {  # name: the command, without the model and the folder
    "grpo": ["main.py", "--config-name", "frozenlake", *SHORT, *GAMES],
    "ppo": ["main.py", "--config-name", "frozenlake_ppo", *SHORT, *GAMES],
    "multi-turn": ["main.py", "--config-name", "frozenlake_multiturn", *SHORT, *TURNS],
    "supervised": ["-m", "extras.sft", *SHORT, "data.train_batch_size=4"],
    "grpo, saving in the background": [
        *("main.py", "--config-name", "frozenlake", *SHORT, *GAMES, f"trainer.save_freq={SENT_AFTER}"),
        "actor_rollout_ref.actor.checkpoint.async_save=true",
    ],
    "grpo, Ray": ["main.py", "--config-name", "frozenlake", *SHORT, *GAMES, "trainer.executor=ray"],
}
TURNS_JOIN = "equal to 1e-6"  # as two unbroken runs are: turns join the engine as their environments' threads end
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main(names: list[str]) -> int:
    """Prints the table; returns the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and its children would
    with TemporaryDirectory() as folder:
        root = Path(folder)
        subprocess.run([sys.executable, "-m", "custom.tiny_model", str(root / "model")], cwd=ROOT, check=True)
        rows = [{"prompt": f"say {word}", "response": word} for word in ("left", "right", "up", "down") * 4]
        (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        print("| run | signal | to | done | saved | ended by | metrics |\n|---|---|---|---|---|---|---|")
        failed = 0
        for name in names or RUNS:
            unbroken = root / "unbroken"
            if start(name, root, unbroken).wait():
                raise SystemExit(unbroken.with_suffix(".log").read_text())
            for number in SIGNALS:
                for group in (False, True):
                    cells, same = interrupt(name, root, number, group, unbroken)
                    print(
                        f"| {name} | {number.name} | {'group' if group else 'process'} | {' | '.join(cells)} |",
                        flush=True,
                    )
                    failed += not same
            shutil.rmtree(unbroken)
    return int(failed > 0)


def start(name: str, root: Path, folder: Path) -> subprocess.Popen:
    """Starts a run in `folder`, with its output in `folder`.log, in a process group of its own."""
    model = "model.path" if name == "supervised" else "actor_rollout_ref.model.path"
    more = [f"{model}={root}/model", f"trainer.default_local_dir={folder}"]
    more += [f"data.train_files={root}/rows.jsonl"] if name == "supervised" else []
    with folder.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, *RUNS[name], *more], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )


def interrupt(name: str, root: Path, number: signal.Signals, group: bool, unbroken: Path) -> tuple[list[str], bool]:
    """Sends a signal to a run, and resumes it if that ended it; returns the table's cells, and whether all is right."""
    folder = root / "interrupted"
    process = start(name, root, folder)
    while len(metrics(folder)) < SENT_AFTER and process.poll() is None:
        time.sleep(0.01)
    (os.killpg if group else os.kill)(process.pid, number)
    at = len(metrics(folder))  # no step 0 is recorded, as nothing is validated
    status = process.wait()
    steps = (int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*"))
    saved = (min if number == signal.SIGUSR1 else max)(steps, default=0)  # one that goes on saves later ones too
    if number != signal.SIGUSR1:
        start(name, root, folder).wait()
    likeness = compare(metrics(folder), metrics(unbroken))
    ended = signal.Signals(-status).name if status < 0 else f"itself, {status}"
    alike = likeness == "equal" or (name == "multi-turn" and likeness == TURNS_JOIN)
    right = alike and at <= saved <= at + 1 and status == (0 if number == signal.SIGUSR1 else -number)
    if not right:
        print(folder.with_suffix(".log").read_text(), file=sys.stderr)
    shutil.rmtree(folder), folder.with_suffix(".log").unlink()
    return [str(at), str(saved), ended, likeness], right


def compare(one: list[dict], other: list[dict]) -> str:
    """Says how alike the metrics of two runs are."""
    if one == other:
        return "equal"
    alike = [step.keys() for step in one] == [step.keys() for step in other] and all(
        math.isclose(step[key], value, rel_tol=1e-6, abs_tol=1e-6)
        for step, twin in zip(one, other, strict=True)
        for key, value in twin.items()
    )
    return TURNS_JOIN if alike else "different"


def metrics(folder: Path) -> list[dict]:
    """Reads the metrics of every step but its times; a line that is being written is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    clock = "timing", "perf/", "training/seconds"
    entries = [json.loads(line) for line in lines]
    return [{key: value for key, value in entry["data"].items() if not key.startswith(clock)} for entry in entries]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help=f"names, of {', '.join(RUNS)}; all of them")
    if strangers := {*(names := parser.parse_args().runs)} - RUNS.keys():
        parser.error(f"there is no run {', '.join(strangers)}")
    raise SystemExit(main(names))
