"""Kills what a run needs, again and again, and compares the end with that of an unbroken run.

    python -m benchmarks.kills [--mode synchronous] [--target worker …] [--times 10] [--seed 0] [--folder outputs/kills]

A chain is one command with trainer.max_restarts, so each kill is followed by a start from the newest checkpoint. Every
second kill falls into a save, the others anywhere in a step. Printed for each: seconds until the run, or the process
that starts it again, says so, and in which line; in the end whether metrics and weights are the unbroken run's, bit by
bit. What the command has said is in outputs/kills/*.log.
"""

import argparse
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from configs.paths import ROOT
from custom.tiny_model import save_tiny_model
from extras.restarts.restarts import descendants, steps_done
from tests.forked import Run
from tests.runs import learning_metrics, short_run, state_files

STEPS_A_KILL = {"raylet": 60, "gcs": 200}  # more than there are between two; Ray misses these after 18 and 60 s
PATIENCE = 300  # seconds for anything to happen
STALL = 40  # seconds of silence, more than a start takes
PORT = 8765
PAUSES = {"server": 20.0}  # seconds before a restart after exit code 75, by mode: what else is killed is there again
CHAIN = """
from extras.restarts import restarts
restarts.SHORT_PAUSE, restarts.FIRST_PAUSES = 0.1, {{75: {pause}}}
from main import main
main()
"""
SERVER = "rollout.name=vllm", "server.takes_weights=true", f"server.port={PORT}"
ROLLOUT = "actor_rollout_ref.rollout"
APART = [f"{ROLLOUT}.nnodes=1", "algorithm.rollout_correction.rollout_is=token"]
MODES = {
    "synchronous": ["trainer.n_workers_per_node=2"],
    "one_step_off": [*APART, "trainer.async_mode=one_step_off"],
    "fully_async": [*APART, "trainer.async_mode=fully_async", "trainer.max_staleness=0"],
    "server": [f"{ROLLOUT}.name=openai", f"{ROLLOUT}.engine_kwargs.openai.base_url=http://127.0.0.1:{PORT}/v1"],
}
COMMON = [
    *("trainer.executor=ray", "trainer.n_threads=1", "trainer.val_before_train=false", "env.train_size=1000"),
    *("trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "trainer.max_restarts=20", "trainer.resume_mode=disable"),
    *("data.train_batch_size=16", f"{ROLLOUT}.n=4"),
]
TARGETS = {  # what stands in the command line of a process; the first child of the command is the driver
    "worker": "ray::RemoteWorker",
    "stop": "ray::RemoteWorker",
    "raylet": "raylet/raylet ",
    "gcs": "gcs_server ",
    "driver": "",
}
ENDED = re.compile(r"notice: this run (was )?ended .*")
SAYS = re.compile(rf"^((training|configs|workers|extras)\.[\w.]*|error): .*|{ENDED.pattern}", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="synchronous", help="with server, that is what is killed")
    parser.add_argument("--target", choices=TARGETS, nargs="+", default=[*TARGETS])
    parser.add_argument("--times", type=int, default=10, help="kills of each target")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, and of which worker")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/kills", help="where the runs go")
    arguments = parser.parse_args()
    width = 128 if arguments.mode == "server" else 64  # vLLM takes heads of 32 and more
    save_tiny_model(arguments.folder / "model", hidden_size=width, layers=2)
    for target in ["server"] if arguments.mode == "server" else arguments.target:
        chain = Chain(arguments.folder, arguments.mode, target, arguments.times, arguments.seed)
        unbroken = chain.run(f"unbroken_{arguments.mode}_{chain.steps}", kills=0)
        broken = chain.run(f"{arguments.mode}_{target}", kills=arguments.times)
        metrics = learning_metrics(unbroken) == learning_metrics(broken)
        weights = state_files(unbroken, chain.steps) == state_files(broken, chain.steps)
        seconds = f"{median(chain.seconds):.1f} s until said, at most {max(chain.seconds):.1f} s"
        print(f"{arguments.mode} {target}: {seconds}; metrics equal: {metrics}, weights equal: {weights}", flush=True)


class Chain:
    """Runs of one target, and the `seconds` until each of its kills was reported."""

    def __init__(self, root: Path, mode: str, target: str, times: int, seed: int) -> None:
        self.root, self.mode, self.target = root, mode, target
        self.steps, self.draws, self.seconds = STEPS_A_KILL.get(target, 8) * times + 2, random.Random(seed), []
        if mode == "server":
            self.serve()

    def run(self, name: str, kills: int) -> Path:
        """Runs the command to its end, with so many kills, and returns the folder."""
        self.folder = folder = self.root / name
        if not kills and (folder / f"global_step_{self.steps}").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        overrides = [*COMMON, *MODES[self.mode], f"trainer.total_training_steps={self.steps}"]
        overrides += [f"trainer.stall_timeout={STALL}"] * (self.target == "stop")
        text, apart = CHAIN.format(pause=PAUSES.get(self.mode, 1.0)), {**os.environ, "RAY_ADDRESS": "local"}
        settings = "--config-name=frozenlake", *short_run(self.root / "model", folder, *overrides)
        self.command = Run("-c", text, *settings, env=apart)  # not in somebody's cluster, which may be gone
        for number in range(kills):
            self.kill(in_save=number % 2 == 1)
        done = self.command.wait(PATIENCE + self.steps)
        folder.with_suffix(".log").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, f"{name} ended by {done.returncode}: {folder.with_suffix('.log')}"
        return folder

    def serve(self) -> None:
        """Serves the engine by vLLM's server, which takes weights."""
        self.server = Run("-m", "extras.server", f"model.path={self.root / 'model'}", *SERVER)
        self.until(is_served, self.server, pause=1.0)

    def kill(self, in_save: bool) -> None:
        """Kills the target after some steps, and waits until the run has ended. Without a new checkpoint, it would not
        be started again if it ends in the same way."""
        step = steps_done(self.folder) + self.draws.randint(1, 2)
        self.until(lambda: steps_done(self.folder) >= step)
        pid, family, before = self.victim(), {*descendants(self.command.pid)}, len(self.command.said()[1])
        time.sleep(self.draws.random() / 2)
        if in_save:
            self.until(self.saves)
        where, began = "a save" if self.saves() else "a step", time.monotonic()
        os.kill(pid, signal.SIGSTOP if self.target == "stop" else signal.SIGKILL)
        message = self.until(lambda: SAYS.search(self.command.said()[1], before))[0]
        self.seconds.append(time.monotonic() - began)
        ended = self.until(lambda: ENDED.search(self.command.said()[1], before))[0]
        print(f"  in {where} after step {step}: {self.seconds[-1]:5.1f} s: {message[:200]}")
        print(f"    {time.monotonic() - began:5.1f} s: {ended}", flush=True)
        self.until(lambda: not family & {*descendants(self.command.pid)}, pause=0.1)
        print(f"    {time.monotonic() - began:5.1f} s: no process of it is left", flush=True)
        if self.mode == "server":
            self.server.wait(PATIENCE)  # it ends without its engine
            self.serve()
            print(f"    {time.monotonic() - began:5.1f} s: served again", flush=True)

    def saves(self) -> bool:
        return any(self.folder.glob(".writing_*"))

    def victim(self) -> int:
        """Chooses the process that gets the signal."""
        if self.mode == "server":
            return next(pid for pid in descendants(self.server.pid) if "EngineCore" in command_of(pid))
        words = TARGETS[self.target]
        pids = [pid for pid in sorted(descendants(self.command.pid)) if words in command_of(pid)]
        return self.draws.choice(pids) if words else pids[0]

    def until(self, condition: Callable[[], Any], run: Run | None = None, pause: float = 0.005) -> Any:
        """Waits until `condition` returns something, and returns it; fails if the run ends first."""
        deadline, run = time.monotonic() + PATIENCE, run or self.command
        while not (result := condition()):
            assert time.monotonic() < deadline and not run.is_over(), "".join(run.said())
            time.sleep(pause)
        return result


def is_served() -> bool:
    with suppress(OSError):
        return bool(urlopen(f"http://127.0.0.1:{PORT}/v1/models").read())
    return False


def command_of(pid: int) -> str:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


if __name__ == "__main__":
    main()
