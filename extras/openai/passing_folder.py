"""Makes a folder that goes with its process, and removes those that killed processes have left."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def passing_folder(place: str | PathLike, prefix: str) -> Iterator[Path]:
    """Makes a folder in `place` for as long as the block lasts, and removes those that killed processes have left."""
    alone = fcntl.LOCK_EX | fcntl.LOCK_NB
    for left in Path(place).glob(f"{prefix}*"):
        with suppress(OSError), open_folder(left) as descriptor:
            if any(left.iterdir()):  # else it may be another process's, which has not locked it yet
                fcntl.flock(descriptor, alone)  # raises where a process has it
                shutil.rmtree(left)
    with TemporaryDirectory(prefix=prefix, dir=place) as folder, open_folder(folder) as descriptor:
        with suppress(OSError):  # a file system without locks: nothing is removed there either
            fcntl.flock(descriptor, alone)
        yield Path(folder)


@contextmanager
def open_folder(path: str | PathLike) -> Iterator[int]:
    """Opens a folder, which can then be locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
