"""Reads rows of large parquet files by column: a row is made when it is asked for."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from configs.paths import find_path, source_files
from data.rows import Origin, standard_names, without_nulls
from data.types import Row

MANY = 2000  # rows; fewer are read and measured one by one
AT_ONCE = 4096  # rows that are python objects at one time
STANDARD = ("prompt", "messages", "instruction", "input", "gts", "ground_truth", "output", "response")


class Lazy(Sequence):
    """Holds what `make` returns for each of `positions`, made whenever it is asked for."""

    def __init__(self, make: Callable[[int], Any], positions: Sequence[int] | np.ndarray) -> None:
        self.make, self.positions = make, positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int | slice) -> Any:
        chosen = self.positions[index]
        return Lazy(self.make, chosen) if isinstance(index, slice) else self.make(int(chosen))


class ParquetRows(Sequence):
    """Rows with their places, as `data.rows.read_rows` reads them from parquet files.

    Args:
        files: each with the name of its source.
    """

    def __init__(self, files: list[tuple[str, Path]]) -> None:
        self.files = files
        self.tables = [read_table(path) for _, path in files]
        for table in self.tables:
            table.validate(full=True)  # texts that are not UTF-8
        self.starts = np.cumsum([0, *(table.num_rows for table in self.tables)]).tolist()
        self.columns: dict[str, None] = {}  # of any row

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, position: int) -> tuple[Origin, Row]:
        origin = self.origin(position)
        [row] = self.tables[self._part(position)].slice(origin.number, 1).to_pylist()
        return origin, dict.fromkeys(self.columns) | standard_names(without_nulls(row))

    def _part(self, position: int) -> int:
        return bisect_right(self.starts, range(len(self))[position]) - 1

    def origin(self, position: int) -> Origin:
        part = self._part(position)
        return Origin(str(self.files[part][1]), position - self.starts[part], source=self.files[part][0])

    def look_through(self, names: Collection[str]) -> Iterator[Row]:
        """Yields the columns `names` of each row, as far as its file has them; by then, `columns` are those of all."""
        for table in self.tables:
            self.columns |= dict.fromkeys(table.column_names)
            chosen = [name for name in table.column_names if name in (*names, *STANDARD)]
            read = table.select(chosen or table.column_names[:1])
            for start in range(0, table.num_rows, AT_ONCE):
                for row in read.slice(start, AT_ONCE).to_pylist():
                    row = standard_names(row)
                    self.columns |= dict.fromkeys(row)
                    yield row

    def positions_with(self, texts: Collection[str], *names: str) -> list[int]:
        """Finds the rows whose first column of these `names` is one of `texts`, or holds a message that says one."""
        values, positions = pyarrow.array(sorted(texts), pyarrow.string()), []
        for start, table in zip(self.starts, self.tables, strict=False):
            name = next((name for name in names if name in table.column_names), None)
            for chunk in table[name].chunks if name else ():
                is_list = pyarrow.types.is_list(chunk.type) or pyarrow.types.is_large_list(chunk.type)
                contents = chunk.flatten().field("content") if is_list else chunk
                is_one = pyarrow.compute.is_in(contents, value_set=values.cast(contents.type))
                [places] = np.nonzero(is_one.to_numpy(zero_copy_only=False))
                if is_list:
                    ends = np.cumsum(chunk.value_lengths().fill_null(0).to_numpy())
                    places = np.unique(np.searchsorted(ends, places, side="right"))
                positions += (start + places).tolist()
                start += len(chunk)
        return positions

    def digests(self) -> Iterator[str]:
        """Yields what tells the files' content apart from all others."""
        for _, path in self.files:
            with path.open("rb") as file:
                yield hashlib.file_digest(file, "sha256").hexdigest()


def read_table(path: Path) -> pyarrow.Table:
    """Reads a parquet file piece by piece, as at once it would take twice its memory."""
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # others keep what reading took
    file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20)
    return pyarrow.Table.from_batches(file.iter_batches(1 << 16, use_threads=False), file.schema_arrow)


def files_of(data_files: Sequence[str | Path]) -> list[tuple[str, Path]]:
    """Lists parquet files, each with the name of its source, if all are such and their rows many; []: else."""
    files = []
    with suppress(OSError, ValueError, pyarrow.ArrowException):
        for source in data_files:
            path = find_path(source)
            files += [(path.name if path.exists() else path.parent.name, file) for file in source_files(source)]
        are_parquet = all(file.suffix == ".parquet" for _, file in files)
        if are_parquet and sum(pyarrow.parquet.read_metadata(file).num_rows for _, file in files) >= MANY:
            return files
    return []
