"""Keeps files whole through a kill or a full disk: replaced in one move, or extended line by line; one run a folder."""

import errno
import fcntl
import itertools
import json
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import IO, Any, BinaryIO

from configs.errors import ConfigError, notice

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, a quota, a limit on the size of files
LOCK_TRIES = 20  # at a run's lock, which a report may hold for a moment

logger = logging.getLogger(__name__)


@contextmanager
def replacing(path: str | PathLike) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` in one move, unless the body raises; makes its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def rewrite(path: str | PathLike, content: bytes) -> None:
    """Makes `content` all that `path` holds; what it held before is kept beside it as NAME.bak-1, NAME.bak-2 …"""
    path = Path(path)
    previous = path.read_bytes() if path.exists() else b""
    if content == previous:
        return
    if previous:
        backups = (path.with_name(f"{path.name}.bak-{n}") for n in itertools.count(1))
        shutil.copy2(path, next(path for path in backups if not path.exists()))
    with replacing(path) as file:
        file.write(content)


def append(path: str | PathLike, content: bytes, to_disk: bool = True) -> None:
    """Adds `content` to the end of `path`; unless `to_disk` is False, it is on disk when this returns.

    Raises:
        OSError: the disk is full or unwritable; nothing of `content` was added.
    """
    with Path(path).open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(content) < len(content):  # the rest does not fit on the disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if to_disk:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


@contextmanager
def dispensable(name: str) -> Iterator[None]:
    """Warns, and goes on, if the disk is full; for files that a run can do without."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        logger.warning("%s: not written, the disk is full (%s)", name, error)


@contextmanager
def indispensable(folder: str | Path) -> Iterator[None]:
    """Raises ConfigError if the disk is full; for files that a run needs in its folder before it starts."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        problem = f"trainer.default_local_dir={folder}: the disk is full ({error.strerror})"
        raise ConfigError(f"{problem}: make room there, or name another folder.") from error


def dump_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one `json_line` a row; the file appears whole or not at all, and its folder is made."""
    with replacing(path) as file:
        for row in rows:
            file.write(json_line(row))


def json_line(row: Mapping[str, Any]) -> bytes:
    """Returns one JSON object in UTF-8, with its newline.

    Tensors, arrays and numpy scalars become numbers and lists, NaN and infinities null, other objects their `str`.
    """
    # A lone surrogate has no UTF-8; backslashreplace spells it as \udcXX, which is how JSON spells it too.
    text = json.dumps(_to_json(row), ensure_ascii=False)
    return (text + "\n").encode("utf-8", errors="backslashreplace")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's record, in order; [] if there is no file. A line that a kill tore is left out."""
    entries = []
    for line in Path(path).read_bytes().split(b"\n") if Path(path).exists() else []:
        with suppress(ValueError):  # json raises it for a torn line
            entries.append(json.loads(line))
    return entries


def headline_means(data: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that sum up a validation: its loss, or the mean of each source; {} if `data` has none."""
    if "val/loss" in data:
        return {"val/loss": data["val/loss"]}
    return {name: value for name, value in data.items() if name.startswith("val-core/") and "/mean@" in name}


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_to_json, value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    with suppress(AttributeError):  # only tensors, arrays and numpy's numbers have it
        return _to_json(value.tolist())
    return str(value)


def lock(file: IO, shared: bool = False) -> bool:
    """Locks an open file; returns False if another process has locked it. The kernel unlocks it when it is closed, also
    by a kill. A `shared` lock tests for a lock that is not shared; processes that test do not lock each other out."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        notice(f"{file.name} is on a file system without locks ({error.strerror}): let no other process use it.")
    return True


class FolderLost(ConfigError):
    """A run's folder has been deleted or moved while the run went on; what is there now may be another run's."""


locked: dict[Path, os.stat_result] = {}  # folder → os.stat of its run.lock, while a run of this process holds it


def check_is_ours(folder: str | Path) -> None:
    """Raises FolderLost if `folder` is no longer the one that `sole_run` locked; does nothing without a lock."""
    path, lock_stat = Path(folder) / "run.lock", locked.get(Path(folder))
    if lock_stat and not (path.exists() and os.path.samestat(lock_stat, path.stat())):
        raise FolderLost(
            f"trainer.default_local_dir={folder} was deleted or moved while this run went on; what is there now is not "
            "its own. It ends here, and nothing more is written there."
        )


@contextmanager
def sole_run(folder: str | Path) -> Iterator[None]:
    """Makes `folder` and keeps other runs out of it. Its run.lock names the process that holds or last held it.

    Raises:
        ConfigError: another run holds it; names that run's process and host.
    """
    path = Path(folder) / "run.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not any(lock(file) or time.sleep(0.02) for _ in range(LOCK_TRIES)):
            file.seek(0)
            holder = file.read().strip() or "it has not said yet which"
            raise ConfigError(
                f"trainer.default_local_dir={folder} belongs to another run, which goes on: {holder}. Wait for it, or "
                "name another folder."
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        locked[path.parent] = os.stat(file.fileno())
        try:
            yield
        finally:
            del locked[path.parent]
