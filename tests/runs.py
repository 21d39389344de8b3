"""Short real runs for tests: FrozenLake with a tiny model, in this process or in one of its own."""

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from safetensors.torch import load_file

from configs.extras import is_here
from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.schema import Config
from tests.forked import Run, python

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm")
needs_algorithms = pytest.mark.skipif(not is_here("extras.algorithms"), reason="extras/algorithms was removed")
ROOT = Path(__file__).resolve().parents[1]


class Stopped(BaseException):
    """Ends a run in this process where a kill would."""


def short_run(model: Path, folder: Path, *more: str) -> list[str]:
    """Overrides of configs/frozenlake.yaml that make a run of seconds: 4 steps of 4 prompts × 2 samples."""
    return [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "env.train_size=10",
        "env.val_episodes=2",
        "env.max_turns=3",
        "trainer.total_training_steps=4",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[]",
        *more,
    ]


def compose(*overrides: str, name: str = "frozenlake") -> Config:
    return load_config(Arguments(name, CONFIG_DIR, list(overrides), print_config=False), Config)


def run_main(*overrides: str, name: str = "frozenlake", env: dict[str, str] | None = None) -> CompletedProcess:
    """`python main.py --config-name NAME overrides…`, with its output captured."""
    return python("main.py", "--config-name", name, *overrides, env=env)


def whole_and_resumed(model: Path, folder: Path, *more: str) -> list[dict[int, dict[str, float]]]:
    """The metrics of a run in folder/whole, which saves, and of one that goes on from its second step."""
    import main

    start = "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/whole/global_step_2"
    for name, own in {"whole": (), "resumed": start}.items():
        main.run(compose(*short_run(model, folder / name, "trainer.save_freq=2", *more, *own)))
    return [learning_metrics(folder / name) for name in ("whole", "resumed")]


def assert_two_at_once_do_not_meet(folder: Path, settings: Callable[[Path, int], list[str]]) -> None:
    """Two runs at once, of two seeds, learn what they learn alone: one of them does after both."""
    import main

    runs = [Run("main.py", "--config-name", "frozenlake", *settings(folder / f"pair{seed}", seed)) for seed in (1, 2)]
    for done in [run.wait() for run in runs]:
        assert done.returncode == 0, done.stderr
    main.run(compose(*settings(folder / "alone1", 1)))
    alone, pair, other = (learning_metrics(folder / name) for name in ("alone1", "pair1", "pair2"))
    assert alone == pair != other and pair.keys() == other.keys()


def learning_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl by step, without what depends on the clock or the machine's load."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("timing", "perf/", "training/seconds")
    return {
        entry["step"]: {name: value for name, value in entry["data"].items() if not name.startswith(clock)}
        for entry in entries
    }


def signalled(step: Callable, number: int, sent: int) -> Callable:
    """Wraps the method `step`, so that it sends this process a signal in the step of that `number`."""

    def sending(self):
        if self.global_step == number:
            os.kill(os.getpid(), sent)
        return step(self)

    return sending


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk on which no file gets larger than so many bytes: what is beyond them does not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def tree_of(folder: Path) -> dict[str, int]:
    """All that lies in `folder`, and when each was last changed."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def state_files(run: Path, step: int) -> dict[str, bytes]:
    """The content of everything in the checkpoint of `step` that is not about time."""
    folder = run / f"global_step_{step}"
    paths = [path for path in folder.rglob("*") if path.suffix in (".pt", ".safetensors")]
    return {str(path.relative_to(folder)): content_of(path) for path in paths if path.name != "trainer_state.pt"}


def content_of(path: Path) -> bytes:
    """A file's bytes; of safetensors the tensors', in the order of their names: the header's order is any."""
    if path.suffix == ".pt":
        return path.read_bytes()
    return b"".join(tensor.numpy().tobytes() for _, tensor in sorted(load_file(path).items()))
