"""Data files as rows: .parquet, .json, .jsonl and .csv in, plain dictionaries that know where they come from out.

A row that cannot be read is a `BadRow` in its place, so that whoever reads a file counts it and goes on. A file that
cannot be read at all is an error.
"""

import csv
import io
import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from configs.paths import DATA_ENDINGS
from data.types import Row

LONGEST_CELL = 1 << 30  # characters; csv's own limit is 128 K
SPACE = re.compile(r"[ \t\r\n]*")
NOT_UTF8 = re.compile(rb"^(?:\xff\xfe|\xfe\xff)")  # the marks that UTF-16 and UTF-32 begin with, but UTF-32's big one


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
    """The rows of one file, in order.

    Raises:
        ValueError: an unknown ending, or a file that is not what its ending says; names it.
    """
    if path.suffix not in DATA_ENDINGS:
        known = f"{', '.join(DATA_ENDINGS[:-1])} and {DATA_ENDINGS[-1]}"
        raise ValueError(f"data file {path}: unknown ending {path.suffix!r}; known are {known}.")
    if path.suffix == ".parquet":
        return read_parquet(path)
    content = path.read_bytes()
    if NOT_UTF8.match(content):
        raise ValueError(f"data file {path}: this is UTF-16 or UTF-32: save it as UTF-8.")
    content = content.removeprefix(b"\xef\xbb\xbf")  # Excel's and Notepad's mark of UTF-8
    if path.suffix == ".csv":
        return read_csv(path, content)
    if content.lstrip().startswith(b"["):
        return read_json_array(path, content)
    whole = read_json_object(path, content) if path.suffix == ".json" else None
    return read_json_lines(path, content) if whole is None else iter([whole])


def read_parquet(path: Path) -> Iterator[Found]:
    # Not pandas: it makes arrays of nested lists, and floats of integers beside a null.
    try:
        table = pyarrow.parquet.ParquetFile(path).read()
        repeated = [name for name, count in Counter(table.column_names).items() if count > 1]
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"data file {path}: this is not a parquet file that can be read: {error}") from error
    if repeated:
        raise ValueError(f"data file {path}: it has several columns {repeated}: rename them.")
    for number, row in enumerate(rows):
        yield Origin(str(path), number), row


def read_json_object(path: Path, content: bytes) -> Found | None:
    """The row of a file that holds one JSON object, on as many lines as it likes; None of any other file."""
    with suppress(ValueError, RecursionError):
        text, origin = content.decode().strip(), Origin(str(path), 0, 1)
        value, end, repeated = decode(text, 0)
        return (origin, check_row(origin, value, repeated)) if end == len(text) else None
    return None


def read_json_lines(path: Path, content: bytes) -> Iterator[Found]:
    """Reads one JSON object a line; empty lines are passed over."""
    number = 0
    for line, document in enumerate(content.split(b"\n"), start=1):
        if not document.strip():
            continue
        origin = Origin(str(path), number, line)
        number += 1
        try:
            text = document.decode().strip()
            value, end, repeated = decode(text, 0)
            if end < len(text):
                raise ValueError(f"something stands behind the object: {reprlib.repr(text[end:])}")
        except UnicodeDecodeError as error:
            yield origin, bad_line(origin, f"byte {error.start} of the line is not UTF-8: save the file as UTF-8.")
        except (ValueError, RecursionError) as error:
            yield origin, bad_line(origin, f"this is not JSON: {error}.")
        else:
            yield origin, check_row(origin, value, repeated)


def read_json_array(path: Path, content: bytes) -> Iterator[Found]:
    """A JSON array of objects.

    Raises:
        ValueError: it is not JSON from some row on, where nothing tells one row from the next.
    """
    text = decode_text(path, content)
    place, line, number = skip_space(text, text.index("[") + 1), 1, 0
    counted_to = 0
    while not text.startswith("]", place):
        line, counted_to = line + text.count("\n", counted_to, place), place
        origin = Origin(str(path), number, line)
        try:
            value, end, repeated = decode(text, place)
        except (ValueError, RecursionError) as error:
            raise bad_line(origin, f"this is not JSON: {error}.") from error
        yield origin, check_row(origin, value, repeated)
        place, number = skip_space(text, end), number + 1
        if text.startswith(",", place):
            place = skip_space(text, place + 1)
        elif not text.startswith("]", place):
            raise bad_line(origin, "this is not JSON: neither , nor ] behind the row.")
    if (end := skip_space(text, place + 1)) < len(text):
        origin = Origin(str(path), number, 1 + text.count("\n", 0, end))
        raise bad_line(origin, f"something stands behind the array: {reprlib.repr(text[end:])}")


def decode(text: str, place: int) -> tuple[Any, int, list[str]]:
    """The JSON value that starts at `place`, where it ends, and keys that an object in it has more than once."""
    repeated: list[str] = []

    def as_dictionary(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            repeated.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return found

    value, end = json.JSONDecoder(object_pairs_hook=as_dictionary).raw_decode(text, place)
    return value, end, repeated


def check_row(origin: Origin, value: Any, repeated: list[str]) -> Row | BadRow:
    if not isinstance(value, dict):
        return BadRow(origin, f"{origin} is {reprlib.repr(value)}; a row must be a JSON object.")
    return bad_line(origin, f"an object has several keys {repeated}: keep one of each.") if repeated else value


def bad_line(origin: Origin, what: str) -> BadRow:
    return BadRow(origin, f"{origin.file}, line {origin.line}: {what}")


def skip_space(text: str, place: int) -> int:
    return SPACE.match(text, place).end()


def decode_text(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"data file {path}, line {line}: this is not UTF-8: save the file as UTF-8.") from error


def read_csv(path: Path, content: bytes) -> Iterator[Found]:
    """Reads rows under the names of the first line. An empty cell is None, a JSON list of messages becomes one."""
    csv.field_size_limit(LONGEST_CELL)
    lines = csv.reader(io.StringIO(decode_text(path, content), newline=""), strict=True)
    try:
        names = next(lines, [])
        if len(names) == 1 and (other := next((mark for mark in ";\t" if mark in names[0]), None)):
            raise ValueError(f"data file {path}: its first line has {other!r} between the names; it must have commas.")
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated or not all(names):
            raise ValueError(f"data file {path}: its first line is {names}; it must name each column, once.")
        number, line = 0, lines.line_num + 1
        for cells in lines:
            origin = Origin(str(path), number, line)
            line = lines.line_num + 1  # a cell in quotes may be several lines long
            if not cells:
                continue
            number += 1
            if len(cells) != len(names):
                what = f"it has {len(cells)} cells, the first line names {len(names)} columns."
                yield origin, bad_line(origin, what)
            else:
                yield origin, {name: cell_value(cell) for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise ValueError(f"data file {path}, line {lines.line_num}: this is not CSV: {error}.") from error


def cell_value(cell: str) -> Any:
    if cell.startswith("[{"):
        with suppress(ValueError, RecursionError):
            return json.loads(cell)
    return cell or None
