"""Writes and finds checkpoints that survive a kill at any moment.

torch.distributed.checkpoint writes the tensors of a model (training/model_shards.py), whatever the number of ranks. It
names no folder in one move, and neither keeps the newest, sums bytes, nor compares settings: that is here.

A checkpoint is written under a temporary name, flushed to disk, renamed to global_step_N, then named in
latest_checkpointed_iteration.txt; only after that are older ones removed. Layout: actor/, critic/ (supervised training
has the one model's files beside the others), data.pt (position in the data), trainer_state.pt (step, its metrics, KL
coefficient, random generators), config.yaml, checksums.json (of what a resumed run reads). A model has model/ and
optim/, a file of random generators a worker (extra_state_world_size_N_rank_i.pt), and huggingface/ for from_pretrained.
"""

import json
import logging
import os
import pickle
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from yaml import YAMLError

from configs.errors import ConfigError, MayPass, WorkerLost, first_line
from configs.paths import find_path
from configs.schema import Config
from configs.settings import safe_settings, without_secrets
from data.files import replacing

POLL_SECONDS = 0.05  # between two checks whether a checkpoint is whole
SUMS_FILE = "checksums.json"
LATEST = "latest_checkpointed_iteration.txt"
CONFIG_FILE = "config.yaml"  # of a checkpoint, and of the run beside its checkpoints
RESUMED = ("model", "optimizer", "extra")  # the parts of a model that a run goes on from
WRITING, REPLACED, DELETED = ".writing_", ".replaced_", ".deleted_"  # prefixes of what a kill may leave behind
# torch reports a full disk as a RuntimeError, as does a worker in another process, and in words of its own.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
FILE_ERRORS = (  # what writing or reading a part of a checkpoint may raise, a part of the user's among them
    *(*WRITE_ERRORS, EOFError, ValueError, TypeError, LookupError, AttributeError, ImportError),
    *(pickle.PickleError, YAMLError),
)
PLAIN = [  # what a file without code may hold beside tensors
    *(np.empty(0).__reduce__()[0], np.float64().__reduce__()[0], np.ndarray, np.dtype),
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
]
START_AFRESH = "Set trainer.resume_mode=resume_path with trainer.resume_from_path, or trainer.resume_mode=disable."

logger = logging.getLogger(__name__)


class Saver:
    """Saves the checkpoints of a run, and knows whether the last one is on disk.

    Args:
        root: the run's folder, which it has to itself.
        write: `write(folder)` fills a checkpoint; it may go on in the background, until `written()`.
        keep: that many of the newest stay; None: all.
        written: says whether what `write` began is whole; raises what went wrong with it.

    Attributes:
        newest: the last step of this run that is saved; 0: none.
        kept_steps: `kept_steps()` returns the steps that stay whatever `keep` is.
    """

    def __init__(
        self,
        root: Path,
        write: Callable[[Path], None],
        keep: int | None = None,
        written: Callable[[], bool] = lambda: True,
    ) -> None:
        self.root, self.write, self.written, self.keep = root, write, written, keep
        self.newest = 0
        self.kept_steps: Callable[[], Iterable[int]] = tuple
        self.unnamed: int | None = None  # the step of the checkpoint that is being written
        self.error: Exception | None = None  # of the last save

    def save(self, step: int) -> dict[str, float]:
        """Writes the checkpoint of `step`, once the one before is whole; returns metrics. A full disk is a warning."""
        metrics, self.error = self.finish(), None
        folder = self.root / f"{WRITING}global_step_{step}"
        try:
            clear_leftovers(self.root)
            folder.mkdir(parents=True)
            self.write(folder)
        except WRITE_ERRORS as error:
            return metrics | self._failed(step, error)
        self.unnamed = step
        return metrics | self.finish(wait=False)

    def finish(self, wait: bool = True) -> dict[str, float]:
        """Names the checkpoint that is being written, if it is whole (`wait`: when it is); returns metrics."""
        if self.unnamed is None:
            return {}
        step = self.unnamed
        try:
            while not self.written():
                if not wait:
                    return {}
                time.sleep(POLL_SECONDS)
            self._name(step)
        except WRITE_ERRORS as error:
            return self._failed(step, error)
        self.unnamed, self.newest = None, step
        return {}

    def go_on_from(self, checkpoint: Path | None) -> None:
        """Makes `checkpoint`, or none, what a later start goes on from, until this run saves one: the steps of another
        branch, which it gave up, would continue its record."""
        latest = self.root / LATEST
        if checkpoint is None or checkpoint.parent.resolve() != self.root.resolve():
            latest.unlink(missing_ok=True)
        elif not latest.exists() or f"global_step_{latest.read_text().strip()}" != checkpoint.name:
            self._write_newest(checkpoint.name.rpartition("_")[2])

    def _write_newest(self, step: int | str) -> None:
        with replacing(self.root / LATEST) as file:
            file.write(f"{step}".encode())
        flush(self.root)

    def _name(self, step: int) -> None:
        """Gives a whole checkpoint its name, and removes the older ones that are not to stay."""
        final = self.root / f"global_step_{step}"
        temporary = final.with_name(WRITING + final.name)
        write_sums(temporary)
        for path in (temporary, *temporary.rglob("*")):
            flush(path)
        if final.exists():  # from an earlier life of the run, or from another run
            final.rename(final.with_name(REPLACED + final.name))
        temporary.rename(final)
        flush(self.root)
        self._write_newest(step)
        clear_leftovers(self.root)
        older = [number for number in saved_steps(self.root) if number <= step][: -self.keep if self.keep else 0]
        for old in {*older}.difference(self.kept_steps()):
            remove(self.root / f"global_step_{old}")

    def _failed(self, step: int, error: Exception) -> dict[str, float]:
        if isinstance(error, WorkerLost):
            raise error  # whoever calls next would wait for that worker as long again
        self.unnamed, self.error = None, error
        clear_leftovers(self.root)
        logger.warning("step %d was not saved, older checkpoints are untouched: %s", step, first_line(error))
        return {"training/failed_saves": 1.0}

    def check(self, step: int) -> None:
        """Raises MayPass if the save of `step`, the last, failed: what was learnt since is lost."""
        if self.error:
            newest = find_checkpoint(self.root, "auto", None)
            raise MayPass(
                f"step {step}, the last, could not be saved ({first_line(self.error)}). The newest checkpoint in "
                f"{self.root} is {newest.name if newest else 'none'}: start the run again."
            ) from self.error


def write_sums(folder: Path) -> None:
    """Writes down bytes and CRC-32 of each file of a checkpoint that a resumed run reads."""
    files = [path for path in folder.rglob("*.*") if path.suffix in (".pt", ".safetensors")]
    files = [path for path in files if path.parent.name != "huggingface"]
    with ThreadPoolExecutor() as threads:
        sums = zip((str(path.relative_to(folder)) for path in files), threads.map(sum_of, files), strict=True)
        (folder / SUMS_FILE).write_text(json.dumps(dict(sums), indent=2))


def check_sums(root: Path, files: Iterable[Path]) -> None:
    """Raises ValueError if one of the `files` of a checkpoint, which may have no sums, is not as it was written."""
    path = root / SUMS_FILE
    try:
        sums = json.loads(path.read_text()) if path.exists() else {}
        for path in files:
            if sums and sums.get(str(path.relative_to(root))) != sum_of(path):
                raise ValueError("its bytes are not those that were written")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def sum_of(path: Path) -> list[int]:
    size = value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            size, value = size + len(piece), zlib.crc32(piece, value)
    return [size, value]


def clear_leftovers(root: Path) -> None:
    """Undoes what a kill, or an error, left half done; for the run that has the folder to itself."""
    for replaced in root.glob(f"{REPLACED}global_step_*"):
        final = root / replaced.name.removeprefix(REPLACED)
        if final.exists():
            remove(replaced)
        else:
            replaced.rename(final)
    for prefix in (WRITING, DELETED):
        for folder in root.glob(f"{prefix}global_step_*"):
            if folder.is_symlink():
                folder.unlink()
            shutil.rmtree(folder, ignore_errors=True)  # a network disk may keep some until the next time


def remove(folder: Path) -> None:
    """Deletes `folder`, which is first moved out of sight: a half of it must never bear its name."""
    hidden = folder.with_name(DELETED + folder.name.removeprefix(REPLACED))
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # a link goes with the leftovers


def saved_steps(root: Path) -> list[int]:
    names = (re.fullmatch(r"global_step_(\d+)", path.name) for path in root.glob("global_step_*"))
    return sorted(int(name[1]) for name in names if name)


def find_checkpoint(root: Path, resume_mode: str, resume_from_path: str | None) -> Path | None:
    """Finds the folder to resume from; None: start afresh. Raises ValueError if the one that is named is not there."""
    if resume_mode == "disable":
        return None
    if resume_mode == "resume_path":
        folder = Path(resume_from_path or "")
        key = f"trainer.resume_from_path={folder}"
    elif (root / LATEST).exists():
        folder = root / f"global_step_{(root / LATEST).read_text().strip()}"
        key = f"{root / LATEST} names {folder.name}"
    else:
        return None
    candidates = folder, folder.with_name(REPLACED + folder.name)  # where a save that was killed has left it
    checkpoint = next((path for path in candidates if path.is_dir()), None)
    if checkpoint is None or not re.fullmatch(r"global_step_\d+", folder.name):
        root = checkpoint or folder.parent  # the user may have named the run's folder
        raise ValueError(f"{key}: there is no such global_step_N; {root} has steps {saved_steps(root)}. {START_AFRESH}")
    return checkpoint


def checkpoint_to_resume(config: Config) -> Path | None:
    """Finds the checkpoint to resume from, by the settings of a run.

    Raises:
        ValueError: as `find_checkpoint`.
        ConfigError: it lacks a part, has other weights in training than the run, or is of another model, which is
            refused of a named one only with an adapter.
    """
    trainer, key = config.trainer, config.model_key
    folder = find_checkpoint(Path(trainer.default_local_dir), trainer.resume_mode, trainer.resume_from_path)
    if folder is None:
        return None
    if not (folder / CONFIG_FILE).exists():
        raise ConfigError(
            f"{folder} lacks {CONFIG_FILE}, so no run wrote it here. Make a model of verl's by python -m extras.merge, "
            f"name it as {key}, and set trainer.resume_mode=disable."
        )
    saved, current = settings_of(folder / CONFIG_FILE), dict(flatten(with_whole_paths(asdict(config))))
    contents = next((value for name, value in saved.items() if name.endswith("checkpoint.save_contents")), RESUMED)
    remedy = f"set trainer.resume_mode=disable; to start from its weights, name its huggingface/ as {key} as well."
    if lacking := missing_parts(contents):
        raise ConfigError(
            f"trainer.resume_mode={trainer.resume_mode}: {folder} was saved without {lacking}, so no run goes on from "
            f"it: {remedy}"
        )
    for name in (key.removesuffix("path") + setting for setting in config.policy_model.shaped_by):
        if (then := saved.get(name, current[name])) != current[name]:
            raise ConfigError(
                f"{name}={as_override(current[name])}: {folder} is of {as_override(then)}. Set that again, or {remedy}"
            )
    is_named, needs_same_model = trainer.resume_mode == "resume_path", config.policy_model.adapter != "none"
    if (needs_same_model or not is_named) and saved.get(key, current[key]) != current[key]:
        remedy = (
            f"its {config.policy_model.adapter} matrices need those weights"
            if is_named
            else "set trainer.experiment_name=NAME or trainer.resume_mode=disable, or to go on from its weights all "
            f"the same trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
        )
        raise ConfigError(f"{key}={current[key]}: {folder} is of another model, {saved[key]}; {remedy}.")
    return folder


def missing_parts(contents: Iterable[str]) -> str:
    """Names the parts that a run resumes from and that are not among the `contents` of a checkpoint."""
    return ", ".join(part for part in RESUMED if part not in contents)


def read_part(path: Path, restore: Callable[[Any], Any], trusted: bool = False, mapped: bool = False) -> None:
    """Calls `restore` with the content of a torch.save file. `trusted` files may hold any Python object; the tensors of
    `mapped` ones are read when they are used. Raises ValueError if it is unreadable, or does not fit."""
    try:
        with torch.serialization.safe_globals(PLAIN):
            objects = [] if trusted else torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if objects:
                raise ValueError(
                    f"{path.name} holds Python objects ({', '.join(sorted(objects))}), and to read them runs their "
                    "code: keep plain values, or set trainer.trust_checkpoint=true"
                )
            restore(torch.load(path, map_location="cpu", weights_only=not trusted, mmap=mapped))
    except FILE_ERRORS as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else "it is cut short"
    problem = f"checkpoint file {path} cannot be loaded ({type(error).__name__}: {reason}). {START_AFRESH}"
    return ConfigError(problem, "trainer.resume_mode")


def config_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(with_whole_paths(safe_settings(config))))


def with_whole_paths(setting: Any, key: str = "") -> Any:
    """Names the folders of models in `setting`, or in a section, as from any working directory."""
    if isinstance(setting, Mapping):
        return {name: with_whole_paths(value, f"{key}.{name}") for name, value in setting.items()}
    is_folder = key.endswith(".model.path") and setting is not None and find_path(setting).is_dir()
    return str(find_path(setting).resolve()) if is_folder else setting


def settings_of(path: Path) -> dict[str, Any]:
    """Reads the config.yaml of a checkpoint, by dotted key. Raises ValueError if it is unreadable."""
    try:
        return dict(flatten(with_whole_paths(OmegaConf.to_container(OmegaConf.load(path)))))
    except FILE_ERRORS as error:
        raise unreadable(path, error) from error


def config_drift(path: Path, config: Config) -> list[str]:
    """Compares a checkpoint's config.yaml with the run that resumes it: lines like `trainer.seed: 0 → 1`."""
    saved, current, unset = settings_of(path), dict(flatten(with_whole_paths(safe_settings(config)))), "not set"
    saved = {key: without_secrets(value, type(config), key) for key, value in saved.items()}
    keys = dict.fromkeys([*saved, *current])
    changed = [key for key in keys if saved.get(key, unset) != current.get(key, unset)]
    return [f"{key}: {as_override(saved.get(key, unset))} → {as_override(current.get(key, unset))}" for key in changed]


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def as_override(value: Any) -> str:
    """Formats `value` as in an override: null, true, text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def flush(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
