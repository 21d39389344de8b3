"""Keeps the record of a fully_async run, one over all its lives, and checks that of a run that is played again."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from data.files import append, json_line, read_metrics, rewrite

ENGINE_STEPS, GROUPS = "engine_steps_{}.jsonl", "groups.jsonl"
REMEDY = "Give the settings of the run that is played again."
Entry = dict[str, Any]

logger = logging.getLogger(__name__)


class Record:
    """Writes what a run does behind what its earlier lives did, up to `step`, after which it goes on.

    A full disk does not end the run, but the record, as NAME.incomplete: by one with holes no run is played again.
    `step_of` returns the last step that an entry tells of.
    """

    def __init__(self, path: Path, step: int, step_of: Callable[[Entry], int]) -> None:
        self.path, self.step = path, step
        kept = takewhile(lambda entry: step_of(entry) <= step, read_metrics(path))
        self._change(rewrite, b"".join(map(json_line, kept)))

    def write(self, entry: Entry) -> None:
        self._change(append, json_line({"resumed_at": self.step, **entry}), False)

    def _change(self, change: Callable[..., None], *arguments: Any) -> None:
        try:
            if self.path:
                change(self.path, *arguments)
        except OSError as error:
            logger.warning("%s ends as .incomplete, and this run cannot be played again: %s", self.path, error)
            with suppress(OSError):
                self.path.rename(f"{self.path}.incomplete")
            self.path = None


def last_step(entry: Entry) -> int:
    """Returns the last step that an entry of engine steps tells of: the first of its life, or a later one."""
    return max([entry.get("resumed_at", 0) + 1, *entry["weights"]])


def read_lives(path: Path) -> dict[int, list[Entry]]:
    """Returns the entries of engine steps, by the step after which that life of the run went on."""
    lives: dict[int, list[Entry]] = {}
    for entry in read_metrics(path):
        lives.setdefault(entry.get("resumed_at", 0), []).append(entry)
    return lives


def check_replay(folder: Path, run_folder: Path, names: Sequence[str]) -> None:
    """Raises ConfigError unless the record of another run is there, in files of these names, all of them whole."""
    if folder.resolve() == run_folder.resolve():
        raise ConfigError(f"trainer.replay={folder} is this run's folder: name another trainer.default_local_dir.")
    present = (path for pattern in (ENGINE_STEPS.format("*"), GROUPS) for path in folder.glob(pattern))
    if more := sorted({path.name for path in present if path.stat().st_size}.difference(names)):
        raise ConfigError(
            f"trainer.replay={folder} has {', '.join(more)}, by which this run would not go: set as many workers that "
            "generate, and trainer.batch_order, as in that run."
        )
    for name in names:
        entries = read_metrics(folder / name)
        if not entries or b"".join(map(json_line, entries)) != (folder / name).read_bytes():
            raise ConfigError(f"trainer.replay={folder}: {name} is absent, empty or torn, and this run would go by it.")
