"""Files that a kill leaves whole: replaced in one move, or added to line by line as JSON."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch


@contextmanager
def replacing(path: str | PathLike) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` in one move when its body is through, and never if that raises.

    Its folder is made.
    """
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


def dump_jsonl(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes one `json_line` a row; the file appears whole or not at all, and its folder is made."""
    with replacing(path) as file:
        for row in rows:
            file.write(json_line(row))


def json_line(row: Mapping[str, Any]) -> bytes:
    """One JSON object in UTF-8, with its newline.

    Tensors, arrays and numpy scalars become numbers and lists, NaN and infinities null, other objects their `str`.
    """
    # A lone surrogate has no UTF-8; backslashreplace spells it as \udcXX, which is how JSON spells it too.
    text = json.dumps(_to_json(row), ensure_ascii=False)
    return (text + "\n").encode("utf-8", errors="backslashreplace")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's record, in order; [] if there is no file. A line that a kill tore is left out."""
    entries = []
    for line in Path(path).read_bytes().split(b"\n") if Path(path).exists() else []:
        with suppress(ValueError):  # what json raises for a torn line
            entries.append(json.loads(line))
    return entries


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
