"""Holds rows as verl's data sets read them, in place of `datasets.Dataset`, as that package is optional."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from data.rows import Entry, Origin, rows_of
from data.types import Row

# Options of the methods of `datasets.Dataset` that change no rows.
WITHOUT_EFFECT = {"num_proc", "desc", "load_from_cache_file", "keep_in_memory", "writer_batch_size", "batch_size"}


class Table:
    """Rows, with what verl's data sets use of `datasets.Dataset`, as that package is optional.

    A row is read as `table[3]`, a column as `table["prompt"]`, columns of several rows as `table[:3]`: all are copies.
    Methods return a new table; rows that stay as they are need not be measured again.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)

    @classmethod
    def of(cls, value: Any, name: str) -> "Table":
        """Makes a table of one, of a `datasets.Dataset`, a data frame or rows; `name` is that of the data set."""
        if isinstance(value, Table):
            return value
        return cls(Entry(Origin(name, index), row) for index, row in enumerate(rows_of(value, name)))

    @property
    def rows(self) -> list[Row]:
        return [entry.columns for entry in self.entries]

    @property
    def column_names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def num_rows(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Row]:
        return map(deepcopy, self.rows)

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, str):
            return deepcopy([row.get(key) for row in self.rows])
        if isinstance(key, slice):
            return {name: deepcopy([row.get(name) for row in self.rows[key]]) for name in self.column_names}
        return deepcopy(self.entries[key].columns)

    def to_list(self) -> list[Row]:
        return [*self]

    def select(self, indices: Iterable[int], **ignored: Any) -> "Table":
        return Table(self.entries[int(index)] for index in indices)

    def shuffle(self, seed: int | None = None, **ignored: Any) -> "Table":
        return self.select(np.random.default_rng(seed).permutation(len(self)))

    def filter(self, function: Callable[..., Any], with_indices: bool = False, **options: Any) -> "Table":
        """Keeps the rows of which `function(row)` is true."""
        kwargs = self._arguments("filter", options)
        return self.select(index for index, row in enumerate(self) if function(row, *[index] * with_indices, **kwargs))

    def map(
        self,
        function: Callable[..., Mapping[str, Any] | None],
        with_indices: bool = False,
        remove_columns: str | Sequence[str] | None = None,
        **options: Any,
    ) -> "Table":
        """Lays what `function(row)` returns over each row, without the columns that are removed."""
        removed = {remove_columns} if isinstance(remove_columns, str) else set(remove_columns or ())
        kwargs, entries = self._arguments("map", options), []
        for index, row in enumerate(self):
            result = function(row, *[index] * with_indices, **kwargs)
            columns = {name: value for name, value in row.items() if name not in removed} | dict(result or {})
            entries.append(Entry(self.entries[index].origin, columns))
        return Table(entries)

    def remove_columns(self, column_names: str | Sequence[str]) -> "Table":
        return self.map(lambda row: None, remove_columns=column_names)

    def _arguments(self, method: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if unknown := {name for name, value in options.items() if value} - WITHOUT_EFFECT - {"fn_kwargs"}:
            names, instead = ", ".join(sorted(unknown)), "datasets.Dataset.from_list(self.dataframe.to_list()) has it"
            raise ValueError(f"self.dataframe.{method}: {names} is left out here; {instead}.")
        return options.get("fn_kwargs") or {}
