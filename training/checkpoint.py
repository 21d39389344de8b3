"""What the state of a run is, and how it survives a kill at any moment.

A checkpoint is written under a temporary name, flushed to disk, renamed to global_step_N, then named in
latest_checkpointed_iteration.txt; only after that are older ones removed. So a folder called global_step_N is whole at
any moment, and so is the one that file names. Layout: actor/, critic/ (verl's file names, with huggingface/ inside for
from_pretrained), data.pt (position in the data), trainer_state.pt (step, its metrics, KL coefficient, random
generators), config.yaml.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from yaml import YAMLError

from configs.schema import Config
from data.files import replacing

LATEST = "latest_checkpointed_iteration.txt"
WRITING, REPLACED, DELETED = ".writing_", ".replaced_", ".deleted_"  # prefixes of what a kill may leave behind
# torch reports a full disk as a RuntimeError, and so does a worker in another process.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
READ_ERRORS = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError),
    *(pickle.UnpicklingError, YAMLError),
)
START_AFRESH = (
    "Resume from another folder with trainer.resume_mode=resume_path trainer.resume_from_path=…/global_step_N, "
    "or start afresh with trainer.resume_mode=disable."
)


def save_checkpoint(root: Path, step: int, write: Callable[[Path], None], keep: int | None) -> None:
    """`write(folder)` fills the checkpoint of `step`; the newest `keep` up to it stay (None: all).

    Raises:
        WRITE_ERRORS: the disk is full or unwritable; older checkpoints are untouched.
    """
    clear_leftovers(root)
    final = root / f"global_step_{step}"
    temporary, replaced = final.with_name(WRITING + final.name), final.with_name(REPLACED + final.name)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        flush_tree(temporary)
        if final.exists():  # from an earlier life of the run, or from another run
            final.rename(replaced)
        temporary.rename(final)
        flush(root)
        with replacing(root / LATEST) as file:
            file.write(str(step).encode())
        flush(root)
    finally:
        clear_leftovers(root)
    for old in sorted(number for number in saved_steps(root) if number <= step)[: -keep if keep else 0]:
        remove(root / f"global_step_{old}")


def clear_leftovers(root: Path) -> None:
    """Undoes what a kill, or an error, left half done."""
    for replaced in root.glob(f"{REPLACED}global_step_*"):
        final = root / replaced.name.removeprefix(REPLACED)
        if final.exists():
            remove(replaced)
        else:
            replaced.rename(final)
    for prefix in (WRITING, DELETED):
        for folder in root.glob(f"{prefix}global_step_*"):
            shutil.rmtree(folder, ignore_errors=True)  # what a network disk still holds goes the next time


def remove(folder: Path) -> None:
    """Deletes `folder`, which is first moved out of sight: a half of it must never bear its name."""
    doomed = folder.with_name(DELETED + folder.name.removeprefix(REPLACED))
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def saved_steps(root: Path) -> list[int]:
    names = (re.fullmatch(r"global_step_(\d+)", path.name) for path in root.glob("global_step_*"))
    return sorted(int(name[1]) for name in names if name)


def find_checkpoint(root: Path, resume_mode: str, resume_from_path: str | None) -> Path | None:
    """The folder to resume from, or None to start afresh.

    Raises:
        ValueError: the folder that is named (by the user or by the tracker file) is not there.
    """
    clear_leftovers(root)
    if resume_mode == "disable":
        return None
    if resume_mode == "resume_path":
        folder = Path(resume_from_path or "")
        if not re.fullmatch(r"global_step_\d+", folder.name) or not folder.is_dir():
            raise ValueError(
                f"trainer.resume_from_path={resume_from_path}: trainer.resume_mode=resume_path needs an existing "
                f"folder named global_step_N. {root} holds those of steps {saved_steps(root)}."
            )
        return folder
    tracker = root / LATEST
    if not tracker.exists():
        return None
    folder = root / f"global_step_{tracker.read_text().strip()}"
    if not folder.is_dir():
        raise ValueError(
            f"{tracker} names {folder.name}, which is not there (steps there: {saved_steps(root)}). {START_AFRESH}"
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
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ValueError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else "it is cut short"
    return ValueError(f"checkpoint file {path} cannot be loaded ({type(error).__name__}: {reason}). {START_AFRESH}")


def config_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_drift(path: Path, config: Config) -> list[str]:
    """What differs between a checkpoint's config.yaml and the run that resumes it, as `trainer.seed: 0 → 1`.

    Raises:
        ValueError: unreadable; names the file and the remedy.
    """
    try:
        before = dict(flatten(OmegaConf.to_container(OmegaConf.load(path))))
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    now, unset = dict(flatten(asdict(config))), "not set"
    keys = dict.fromkeys([*before, *now])
    changed = [key for key in keys if before.get(key, unset) != now.get(key, unset)]
    return [f"{key}: {shown(before.get(key, unset))} → {shown(now.get(key, unset))}" for key in changed]


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shown(value: Any) -> str:
    """`value` as one writes it in an override: null, true, text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def flush_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            flush(Path(folder, name))
        flush(Path(folder))


def flush(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
