"""verl's RLHFDataset, for subclasses of users: its hooks, called in verl's order, its attributes, and its table."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once
from configs.import_utils import accepts
from configs.schema import DataConfig
from data import rl_dataset
from data.chat import Prompt, parse_prompt
from data.rows import Entry, Origin, files_key, read_rows, rows_of
from data.types import Row

ATTRIBUTES = {  # of verl's: the default where the data section has no such key
    "cache_dir": "~/.cache/verl/rlhf", "video_key": "videos", "image_patch_size": 14,
    "return_raw_chat": False, "return_full_prompt": False, "tool_config_path": None, "tool_schemas": None,
    "num_workers": 1, "use_shm": False, "chat_template_func": None, "need_tools_kwargs": False, "filter_prompts": True,
    "serialize_dataset": False, "return_multi_modal_inputs": True, "shuffle": None, "seed": None,
}  # fmt: skip
UNCALLED = {  # hooks: the reason
    **dict.fromkeys(("process_vision_info", "process_multi_modal_info"), "extras/images reads images"),
    "resume_dataset_state": "a resumed run reads the files anew, then state_dict and load_state_dict of a dataset",
}
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


class RLHFDataset(rl_dataset.RLHFDataset):
    """Prompts with token ids, from rows that hooks of verl's read and change. A subclass may define:

    `_download()`, which brings `data_files` here; `_read_files_and_tokenize()`, which sets `dataframe` and calls
    `maybe_filter_out_long_prompts(dataframe)`; and `_build_messages(row)` for each row, when it is measured and when it
    is given out. They are called in this order. All prompts are measured at the end, whichever hooks there are.

    Args: as of data/rl_dataset.py's; keys of verl's that the data section lacks are read as verl's defaults.

    Attributes:
        dataframe: the rows, as hooks see them; a `datasets.Dataset`, a data frame or a list of rows may be assigned.
        original_data_files: the files as they were given, whatever `_download` makes of `data_files`.
    """

    calls_hooks = True

    def __init__(
        self,
        data_files: str | Path | Iterable[str | Path] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: DataConfig | Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        for hook in sorted(UNCALLED.keys() & {*dir(type(self))}):
            notice_once(f"{type(self).__name__}.{hook} is not called here: {UNCALLED[hook]}.")
        config = self.as_data_config(config) if isinstance(config, Mapping) else config
        files = data_files if isinstance(data_files, str | Path | None) else list(data_files)
        self.original_data_files = [files] if isinstance(files, str | Path) else list(files or [])
        self._table, self._is_measured = Table(), True
        self._set_attributes(config or DataConfig())
        super().__init__(files, tokenizer, config, processor, max_samples)

    @staticmethod
    def as_data_config(config: Mapping[str, Any]) -> DataConfig:
        """Makes a data section of verl's mapping, with keys that are none of ours in `extras`."""
        ours = {item.name for item in fields(DataConfig)}
        known = {name: value for name, value in config.items() if name in ours}
        return DataConfig(**known, extras={name: value for name, value in config.items() if name not in ours})

    @classmethod
    def become_base(cls, users: type[rl_dataset.RLHFDataset]) -> None:
        """Takes the place of data/rl_dataset.py's class among the bases of a class of the user's."""
        bases = tuple(cls if base is rl_dataset.RLHFDataset else base for base in users.__bases__)
        users.__bases__ = bases if cls in bases else (*bases, cls)

    def setup(self, tokenizer: PreTrainedTokenizerBase | None, config: DataConfig | Mapping[str, Any] | None) -> None:
        super().setup(tokenizer, config)
        self._set_attributes(self.config)

    def _set_attributes(self, config: DataConfig) -> None:
        vars(self).update({name: config.get(name, default) for name, default in ATTRIBUTES.items()})

    @property
    def dataframe(self) -> Table:
        return self._table

    @dataframe.setter
    def dataframe(self, value: Any) -> None:
        self._table, self._is_measured = Table.of(value, type(self).__name__), False

    @property
    def entries(self) -> list[Entry]:
        if not self._is_measured:
            self._table, self._is_measured = Table(self._measure(self._table.entries)), True
        return self._table.entries

    @entries.setter
    def entries(self, entries: Iterable[Entry]) -> None:
        self._table, self._is_measured = Table(entries), True

    def _load(self, data_files: Any) -> None:
        """Calls the hooks, and reports on the rows."""
        self._download()
        self._read_files_and_tokenize()
        self._report(data_files)

    def _messages(self, columns: Row, is_made: bool = False) -> Prompt:
        """Returns a row's prompt as the hook builds it; as it is, where the row `is_made` and has it."""
        if is_made or type(self)._build_messages is RLHFDataset._build_messages:
            return super()._messages(columns, is_made)
        key = {"key": self.prompt_key} if accepts(self._build_messages, "key") else {}
        return parse_prompt(self._build_messages(deepcopy(columns), **key))

    def _build_messages(self, example: Row, key: str | None = None) -> Prompt:
        """Returns the prompt of a row of the files."""
        value = example.get(key or self.prompt_key)
        return parse_prompt(example.get("raw_prompt") if value is None else value)

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Brings the files here, and writes their paths over `data_files`; here they are local."""

    def _read_files_and_tokenize(self) -> None:
        """Sets `dataframe` to the rows of `data_files`."""
        key = files_key(self.original_data_files, self.config)
        rows = [Entry(*row) for row in read_rows(self.data_files, self.unread, key)]
        self.dataframe = Table(rows[index] for index in self._sampled(len(rows)))
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Table:
        """Returns the rows whose prompts are not too long, with data.filter_overlong_prompts."""
        table = Table.of(self.dataframe if dataframe is None else dataframe, type(self).__name__)
        return Table(self._measure(table.entries))
