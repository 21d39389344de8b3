"""Holds rows as verl's data sets read them, in place of `datasets.Dataset`, as that package is optional."""

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

import numpy as np

from data.rows import Origin, standard_names
from data.types import Row

# Options of the methods of `datasets.Dataset` that change no rows.
WITHOUT_EFFECT = {"num_proc", "desc", "load_from_cache_file", "keep_in_memory", "writer_batch_size", "batch_size"}


@runtime_checkable
class HasList(Protocol):
    """A `datasets.Dataset`: its rows as a list."""

    def to_list(self) -> list[Row]: ...


@runtime_checkable
class Frame(Protocol):
    """A data frame of pandas: its rows as to_dict("records")."""

    def to_dict(self, orient: str) -> list[Row]: ...


class Table:
    """Rows, with what verl's data sets use of `datasets.Dataset`, as that package is optional.

    A row is read as `table[3]`, a column as `table["prompt"]`, columns of several rows as `table[:3]`: all are copies.
    Methods return a new table. `prompt_ids` are the rows' tokens, where they are known, and go along with the rows.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        origins: Sequence[Origin] | None = None,
        prompt_ids: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        self.rows = list(rows)
        self.origins = [Origin("the data set", i) for i in range(len(rows))] if origins is None else list(origins)
        self.prompt_ids = [None] * len(rows) if prompt_ids is None else list(prompt_ids)

    @classmethod
    def of(cls, value: Any, name: str) -> "Table":
        """Makes a table of one, of a `datasets.Dataset`, a data frame or rows; `name` is that of the data set."""
        if isinstance(value, Table):
            return value
        if isinstance(value, HasList):
            rows = value.to_list()
        else:
            rows = value.to_dict("records") if isinstance(value, Frame) else [*value]
        if not all(isinstance(row, Mapping) for row in rows):
            raise ValueError(
                f"{name}: self.dataframe is {reprlib.repr(value)}; it must be a datasets.Dataset, a data frame, or "
                "rows as dictionaries."
            )
        rows = [standard_names(dict(row)) for row in rows]
        return cls(rows, [Origin(name, index) for index in range(len(rows))])

    @classmethod
    def from_list(cls, rows: Sequence[Row]) -> "Table":
        return cls(rows)

    @property
    def parts(self) -> tuple[list, list, list]:
        return self.rows, self.origins, self.prompt_ids

    @property
    def column_names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return map(deepcopy, self.rows)

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, str):
            return deepcopy([row.get(key) for row in self.rows])
        if isinstance(key, slice):
            return {name: deepcopy([row.get(name) for row in self.rows[key]]) for name in self.column_names}
        return deepcopy(self.rows[key])

    def to_list(self) -> list[Row]:
        return [*self]

    def select(self, indices: Iterable[int], **ignored: Any) -> "Table":
        rows = [int(row) for row in indices]
        return Table(*([part[row] for row in rows] for part in self.parts))

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
        kwargs, rows = self._arguments("map", options), []
        for index, row in enumerate(self):
            result = function(row, *[index] * with_indices, **kwargs)
            rows.append({name: value for name, value in row.items() if name not in removed} | dict(result or {}))
        return Table(rows, self.origins)

    def remove_columns(self, column_names: str | Sequence[str]) -> "Table":
        return self.map(lambda row: None, remove_columns=column_names)

    def _arguments(self, method: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if unknown := {name for name, value in options.items() if value} - WITHOUT_EFFECT - {"fn_kwargs"}:
            raise ValueError(
                f"self.dataframe.{method}: {', '.join(sorted(unknown))} is left out here; go through the rows one by "
                "one, or make a datasets.Dataset of them (datasets.Dataset.from_list(self.dataframe.to_list()))."
            )
        return options.get("fn_kwargs") or {}
