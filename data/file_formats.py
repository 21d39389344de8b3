"""Data files as rows: .parquet, .json, .jsonl and .csv in, plain dictionaries that know where they come from out.

A row that cannot be read is a `BadRow` in its place, so that whoever reads a file counts it and goes on. A file that
cannot be read at all is an error.
"""

import csv
import io
import json
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from configs.paths import DATA_ENDINGS
from data.types import Row

LONGEST_CELL = 1 << 30  # characters; csv's own limit is 128 K


class Origin(NamedTuple):
    """The place that a row comes from; rows count from 0, lines of text files from 1."""

    file: str
    number: int
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file}, row {self.number}"

    @property
    def place(self) -> str:
        """The row as editors open it, where the file has lines."""
        return f"{self.file}:{self.line}" if self.line else str(self)


class BadRow(ValueError):
    """A row that cannot be used; the message says where it stands and what is wrong."""

    def __init__(self, origin: Origin, what: str, cause: Exception | None = None) -> None:
        super().__init__(what)
        self.origin = origin
        self.__cause__ = cause


Found = tuple[Origin, Row | BadRow]


def read_file(path: Path) -> Iterator[Found]:
    """The rows of one file, in order; raises ValueError for an unknown ending, or a file that is not what it says."""
    if path.suffix not in DATA_ENDINGS:
        raise ValueError(f"data file {path}: unknown ending {path.suffix!r}; known are {', '.join(DATA_ENDINGS)}.")
    try:
        if (
            path.suffix == ".parquet"
        ):  # not pandas: it makes arrays of nested lists, and floats of integers beside a null
            rows = pyarrow.parquet.ParquetFile(path).read().to_pylist()
            return ((Origin(str(path), number), row) for number, row in enumerate(rows))
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # Excel's and Notepad's mark of UTF-8
        if path.suffix == ".csv":
            return iter([*read_csv(str(path), content.decode())])
        with suppress(ValueError, RecursionError):
            whole = json.loads(content)  # one array, or one object on as many lines as it likes
            rows = whole if isinstance(whole, list) else [whole]
            return iter([(at := Origin(str(path), number), checked(at, row)) for number, row in enumerate(rows)])
        if content.lstrip().startswith(b"["):
            json.loads(content)  # raises
    except (pyarrow.ArrowException, csv.Error, OSError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"data file {path}: this is not {path.suffix[1:]} that can be read: {error}") from error
    return read_json_lines(str(path), content)


def read_json_lines(file: str, content: bytes) -> Iterator[Found]:
    """Reads one JSON object a line; empty lines are passed over."""
    lines = [(line, text) for line, text in enumerate(content.split(b"\n"), start=1) if text.strip()]
    for number, (line, text) in enumerate(lines):
        origin = Origin(file, number, line)
        try:
            yield origin, checked(origin, json.loads(text))
        except (ValueError, RecursionError) as error:
            yield origin, BadRow(origin, f"{file}, line {line}: this is not JSON in UTF-8: {error}.")


def checked(origin: Origin, value: Any) -> Row | BadRow:
    is_row = isinstance(value, dict)
    return value if is_row else BadRow(origin, f"{origin} is {reprlib.repr(value)}; a row must be a JSON object.")


def read_csv(file: str, text: str) -> Iterator[Found]:
    """Reads rows under the names of the first line. An empty cell is None, a JSON list of messages becomes one."""
    csv.field_size_limit(LONGEST_CELL)
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    names = next(lines, [])
    if len({*names}) < len(names) or not all(names):
        raise ValueError(f"its first line is {names}; it must name each column, once, between commas")
    for number, cells in enumerate(filter(None, lines)):
        origin = Origin(file, number, lines.line_num)
        if len(cells) != len(names):
            what = (
                f"{file}, line {lines.line_num}: it has {len(cells)} cells, the first line names {len(names)} columns."
            )
            yield origin, BadRow(origin, what)
        else:
            yield origin, {name: cell_value(cell) for name, cell in zip(names, cells, strict=True)}


def cell_value(cell: str) -> Any:
    if cell.startswith("[{"):
        with suppress(ValueError, RecursionError):
            return json.loads(cell)
    return cell or None
