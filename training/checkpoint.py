"""What the state of a run is, and how it survives a kill at any moment.

A checkpoint is written under a temporary name, flushed to disk, renamed to global_step_N, then named in
latest_checkpointed_iteration.txt; only after that are older ones removed. So the folder that file names is always
whole. Layout: actor/, critic/ (verl's file names, with huggingface/ inside for from_pretrained), data.pt (position in
the data), trainer_state.pt (step, KL coefficient, random generators), config.yaml.
"""

import difflib
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from configs.schema import Config

LATEST = "latest_checkpointed_iteration.txt"
READ_ERRORS = (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError)
START_AFRESH = (
    "Resume from another folder with trainer.resume_mode=resume_path trainer.resume_from_path=…/global_step_N, "
    "or start afresh with trainer.resume_mode=disable."
)


def save_checkpoint(root: Path, step: int, write: Callable[[Path], None], keep: int | None) -> None:
    """`write(folder)` fills the checkpoint of `step`; the newest `keep` stay (None: all).

    Raises:
        OSError: the disk is full or unwritable; older checkpoints are untouched.
    """
    temporary, final = root / f".writing_global_step_{step}", root / f"global_step_{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        flush_tree(temporary)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():  # an earlier life of this run got here too, and was killed before naming it
        shutil.rmtree(final)
    temporary.rename(final)
    write_atomically(root / LATEST, str(step))
    prune(root, step, keep)


def prune(root: Path, newest: int, keep: int | None) -> None:
    steps = sorted(step for step in saved_steps(root) if step <= newest)
    for step in steps[: -keep if keep else 0]:
        shutil.rmtree(root / f"global_step_{step}")


def saved_steps(root: Path) -> list[int]:
    names = (re.fullmatch(r"global_step_(\d+)", path.name) for path in root.glob("global_step_*"))
    return [int(name[1]) for name in names if name]


def find_checkpoint(root: Path, resume_mode: str, resume_from_path: str | None) -> Path | None:
    """The folder to resume from, or None to start afresh.

    Raises:
        ValueError: the folder that is named (by the user or by the tracker file) is not there.
    """
    for leftover in root.glob(".writing_global_step_*"):
        shutil.rmtree(leftover)
    if resume_mode == "disable":
        return None
    if resume_mode == "resume_path":
        folder = Path(resume_from_path or "")
        if not re.fullmatch(r"global_step_\d+", folder.name) or not folder.is_dir():
            raise ValueError(
                f"trainer.resume_from_path={resume_from_path}: trainer.resume_mode=resume_path needs an existing "
                f"folder named global_step_N. {root} holds {sorted(saved_steps(root))}."
            )
        return folder
    tracker = root / LATEST
    if not tracker.exists():
        return None
    folder = root / f"global_step_{tracker.read_text().strip()}"
    if not folder.is_dir():
        raise ValueError(
            f"{tracker} names {folder.name}, which is not there (steps there: {sorted(saved_steps(root))}). "
            f"{START_AFRESH}"
        )
    return folder


def read_part(path: Path, restore: Callable[[Any], Any], trusted: bool = False) -> None:
    """`restore(what torch.save wrote to path)`; `trusted` files may hold any Python object.

    Raises:
        ValueError: unreadable, or of another shape than the run; names the file and the remedy.
    """
    try:
        restore(torch.load(path, map_location="cpu", weights_only=not trusted))
    except READ_ERRORS as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it is cut short"
        raise ValueError(
            f"checkpoint file {path} cannot be loaded ({type(error).__name__}: {reason}). {START_AFRESH}"
        ) from error


def rng_state() -> dict[str, Any]:
    """State of the global generators of this process. The run's own are derived from its seed and need none; these
    are for what users' datasets and rewards draw."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def config_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_drift(saved: Path, config: Config) -> list[str]:
    """Lines of config.yaml that differ between the checkpoint and the run that resumes it: '-old', '+new'."""
    before, now = saved.read_text().splitlines(), config_yaml(config).splitlines()
    changed = difflib.unified_diff(before, now, lineterm="", n=0)
    return [line for line in changed if not line.startswith(("---", "+++", "@@"))]


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush(path.parent)


def flush_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            flush(Path(folder, name))
        flush(Path(folder))
    flush(root.parent)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
