"""Reads the rows of an RL run from files, as dictionaries with token ids.

Prompts are tokenised here, once, when the files are read: over-long and malformed ones are found before any model
loads. A row keeps all its columns, so that rewards and environments see what the user wrote.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from rich.progress import track
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once
from configs.extras import find
from configs.import_utils import accepts, bind, load_subclass
from configs.schema import DataConfig
from configs.settings import Readable
from data.chat import Prompt, encode_prompt, parse_prompt
from data.padding import media_of
from data.protocol import object_array
from data.rows import (
    BadRow,
    BadRows,
    Encoded,
    Origin,
    check_is_read,
    files_key,
    given_ids,
    kwargs_in,
    own_names,
    print_report,
    read_rows,
    with_labels,
)
from data.table import Entry, Table
from data.types import Row, check_text

logger = logging.getLogger(__name__)
PROGRESS_BAR_FROM = 2000  # rows; fewer are done too fast for a bar
VERLS_ATTRIBUTES = {  # of RLHFDataset: the default where the data section has no such key
    "cache_dir": "~/.cache/verl/rlhf", "image_key": "images", "video_key": "videos", "image_patch_size": 14,
    "return_raw_chat": False, "return_full_prompt": False, "tool_config_path": None, "tool_schemas": None,
    "num_workers": 1, "use_shm": False, "chat_template_func": None, "need_tools_kwargs": False, "filter_prompts": True,
    "serialize_dataset": False, "return_multi_modal_inputs": True, "shuffle": None, "seed": None,
}  # fmt: skip
UNCALLED = {  # hooks of verl's RLHFDataset: the reason
    **dict.fromkeys(("process_vision_info", "process_multi_modal_info"), "extras/images reads images"),
    "resume_dataset_state": "a resumed run reads the files anew, then state_dict and load_state_dict of a dataset",
}


class OverlongPrompt(ValueError):
    """The prompt of a row has more tokens than data.max_prompt_length, and may not be cut."""

    def __init__(self, origin: Origin, length: int, limit: int) -> None:
        super().__init__(
            f"{origin}: the prompt has {length} tokens, more than data.max_prompt_length={limit}: raise it, or set "
            "data.filter_overlong_prompts=true, or, for one without images, data.truncation=left."
        )
        self.origin, self.length = origin, length


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Returns `ids` without what exceeds `limit` on the named side: left, right or middle."""
    excess = max(len(ids) - limit, 0)
    start = {"left": 0, "middle": limit // 2, "right": limit}[side]
    return ids[:start] + ids[start + excess :]


class RLHFDataset(Dataset):
    """Prompts with token ids. A row holds all columns of its file, and:

    raw_prompt: the string, or the chat messages; raw_prompt_ids: list[int], with the generation prompt;
    data_source: the column data.reward_fn_key, else the name of its file, or "unknown"; extra_info: the column, or {};
    index: extra_info["index"], or the position in this dataset.

    A subclass may define verl's hooks, which are called in verl's order: `_download()`, which brings `data_files` here;
    `_read_files_and_tokenize()`, which sets `dataframe` and calls `maybe_filter_out_long_prompts(dataframe)`; then
    `_build_messages(row)` for each row, when it is measured and when it is given out. All prompts are measured at the
    end, whichever hooks there are. One whose prompts are not in files passes `data_files=None`, defines `__len__`, and
    returns `self.make_row({data.prompt_key: prompt, …}, i)` from `__getitem__(i)`.

    Args:
        data_files: one path or several (see `read_rows`); None: no rows are read.
        tokenizer: None: rows have no tokens until `settle`, and none are read from files.
        config: the data section; keys of verl's that it lacks are read as verl's defaults.
        processor: kept for subclasses; not used here.
        max_samples: use at most so many rows, drawn by data.seed if data.shuffle, else the first; -1: all.

    Attributes:
        dataframe: the rows, as hooks see them; a `datasets.Dataset`, a data frame or a list of rows may be assigned.
        rows, prompt_ids: those that are used, and their prompts' tokens (int32: a ninth of what lists take).
        is_settled: whether it has a tokenizer and a data section; a run settles one that lacks either.

    Raises:
        FileNotFoundError, ValueError: names file, row and remedy, for whatever makes rows unusable.
    """

    is_settled, tokenizer = False, None  # also of a class whose __init__ does not call this one

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
        self.processor, self.max_samples = processor, max_samples
        RLHFDataset.settle(self, tokenizer, config)
        self.data_files = [data_files] if isinstance(data_files, str | Path) else list(data_files or [])
        self.original_data_files = list(self.data_files)
        self.num_filtered = 0
        self.unread: list[BadRow] = []
        self.unusable: list[str] = []  # what is wrong with rows that were left out
        self._table, self._is_measured = Table(), True
        if data_files is not None:
            if tokenizer is None:
                raise ValueError(f"{type(self).__name__}: rows of files are tokenised at once, so give a tokenizer.")
            self._load(data_files)

    def settle(self, tokenizer: PreTrainedTokenizerBase | None, config: DataConfig | Mapping[str, Any] | None) -> None:
        """Takes the tokenizer and the data section by which rows are made."""
        self.is_settled = tokenizer is not None and config is not None
        self.tokenizer, self.config = tokenizer, as_data_config(config)
        self.images = tokenizer and vars(tokenizer).get("images")  # who reads them; None: the model reads text alone
        self.prompt_key, self.max_prompt_length = self.config.prompt_key, self.config.max_prompt_length
        self.filter_overlong_prompts, self.truncation = self.config.filter_overlong_prompts, self.config.truncation
        self.apply_chat_template_kwargs = self.config.apply_chat_template_kwargs
        vars(self).update({name: self.config.get(name, default) for name, default in VERLS_ATTRIBUTES.items()})

    @property
    def dataframe(self) -> Table:
        return self._table

    @dataframe.setter
    def dataframe(self, value: Any) -> None:
        self._table, self._is_measured = Table.of(value, type(self).__name__), False

    @property
    def rows(self) -> list[Row]:
        return self._measured().rows

    @property
    def prompt_ids(self) -> list[np.ndarray]:
        return [entry.prompt_ids for entry in self._measured().entries]

    def __len__(self) -> int:
        return len(self._measured())

    def __getitem__(self, position: int) -> Row:
        entry = self._measured().entries[position]
        row = self.make_row(entry.columns, position, entry.prompt_ids.tolist())
        if gives_rows_as_they_are(self):
            return row
        row["raw_prompt_ids"] = Encoded(row["raw_prompt_ids"], repr(row["raw_prompt"]))
        kwargs = {name: kwargs_in(row, name) for name in ("tools_kwargs", "interaction_kwargs")}
        return {"dummy_tensor": torch.zeros(1, dtype=torch.uint8), **row, **kwargs}  # as verl's methods find them

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt before any cut; override for a format of your own."""
        return encode_prompt(prompt, self.tokenizer, **self.apply_chat_template_kwargs)

    def make_row(
        self, columns: Row, position: int, prompt_ids: list[int] | None = None, source: str | None = None
    ) -> Row:
        """Returns the row that `columns` make: what is missing is added, what is there stays.

        The prompt is raw_prompt, where the row is one that was made before, or the column data.prompt_key. `prompt_ids`
        (or the column raw_prompt_ids, or input_ids with attention_mask) are encoded unless given; data.truncation cuts
        them. `source` is the dataset's name in messages; None: this class.
        """
        origin = Origin(source or type(self).__name__, position)
        ids = given_ids(columns) if prompt_ids is None else prompt_ids
        columns = with_labels(own_names(columns), origin, self.config.ground_truth_key)
        is_made = prompt_ids is None and columns.get("raw_prompt") is not None
        shows = ids is None or any(columns.get(name) is not None for name in (self.prompt_key, "raw_prompt"))
        if ids is None:
            ids = self._encode(columns, origin, is_made)
        elif self.images is not None:
            ids = self.images.with_images([*map(int, ids)], media_of(ids), columns.get(self.image_key))
        else:
            ids = [*map(int, ids)]
        index = columns["extra_info"].get("index", columns.get("index"))
        return {
            **columns,
            "raw_prompt": self._messages(columns, is_made) if shows else None,
            "raw_prompt_ids": self._fit(ids, origin),
            "data_source": columns.get(self.config.reward_fn_key) or "unknown",
            "index": position if index is None else index,
        }

    def _messages(self, columns: Row, is_made: bool = False) -> Prompt:
        """Returns a row's prompt as the hook builds it; as it is, where the row `is_made` and has it."""
        if is_made:
            return parse_prompt(columns["raw_prompt"])
        if type(self)._build_messages is RLHFDataset._build_messages:
            return self._build_messages(columns)
        key = {"key": self.prompt_key} if accepts(self._build_messages, "key") else {}
        return parse_prompt(self._build_messages(deepcopy(columns), **key))

    def _build_messages(self, example: Row, key: str | None = None) -> Prompt:
        """Returns the prompt of a row of the files. A hook of verl's."""
        value = example.get(key or self.prompt_key)
        return parse_prompt(example.get("raw_prompt") if value is None else value)

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Brings the files here, and writes their paths over `data_files`. A hook of verl's; here they are local."""

    def _read_files_and_tokenize(self) -> None:
        """Sets `dataframe` to the rows of `data_files`. A hook of verl's."""
        key = files_key(self.original_data_files, self.config)
        rows = [Entry(*row) for row in read_rows(self.data_files, self.unread, key)]
        self.dataframe = Table(rows[index] for index in self._sampled(len(rows)))
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Table:
        """Returns the rows whose prompts are not too long, with data.filter_overlong_prompts. A hook of verl's."""
        return self._measure(Table.of(self.dataframe if dataframe is None else dataframe, type(self).__name__))

    def _sampled(self, total: int) -> Iterable[int]:
        if self.max_samples == 0:
            raise ValueError("data.train_max_samples or data.val_max_samples is 0, which leaves no rows: -1 takes all.")
        if not 0 < self.max_samples < total:
            return range(total)
        if not self.config.shuffle:
            return range(self.max_samples)
        return np.random.default_rng(self.config.seed or 0).choice(total, self.max_samples, replace=False)

    def _load(self, data_files: Any) -> None:
        """Calls the hooks, and reports on the rows."""
        self._download()
        self._read_files_and_tokenize()
        lengths = [len(ids) for ids in self.prompt_ids]
        if not lengths:
            raise ValueError(f"{type(self).__name__}: _read_files_and_tokenize left no rows in self.dataframe.")
        description = f"prompts of {' to '.join(map(str, sorted({min(lengths), max(lengths)})))} tokens"
        print_report(data_files, len(lengths), description, self.unusable, self.num_filtered)

    def _measured(self) -> Table:
        if not self._is_measured:
            self._table, self._is_measured = self._measure(self._table), True
        return self._table

    def _measure(self, table: Table) -> Table:
        """Returns `table` with the tokens of all prompts, and without unusable rows and too long prompts."""
        unread, self.unread = self.unread, []
        total = sum(entry.prompt_ids is None for entry in table.entries) + len(unread)
        bad, overlong, measured = BadRows(total, self.config.max_bad_fraction, unread), [], []
        for entry in track(table.entries, "tokenising prompts", disable=total < PROGRESS_BAR_FROM):
            try:
                measured.append(self._read(entry) if entry.prompt_ids is None else entry)
            except OverlongPrompt as error:
                if not self.filter_overlong_prompts:
                    raise
                overlong.append(error)
            except ValueError as error:
                bad.add(BadRow(entry.origin, str(error), cause=error))
        bad.check()
        if overlong:
            report_overlong(overlong, total - len(bad.errors), self.max_prompt_length)
        self.num_filtered += len(overlong)
        self.unusable += bad.describe()
        return Table(measured)

    def _read(self, entry: Entry) -> Entry:
        """Returns a row with its labels and the tokens of its prompt; raises OverlongPrompt for too many."""
        origin, key = entry.origin, self.config.reward_fn_key
        columns = with_labels(entry.columns, origin, self.config.ground_truth_key)
        if origin.source and not columns.get(key):
            columns[key] = origin.source
        check_is_read(columns, self.prompt_key, origin, *([] if self.images is None else [self.image_key]))
        ids = self._encode(columns, origin)
        if self.filter_overlong_prompts and len(ids) > self.max_prompt_length:
            raise OverlongPrompt(origin, len(ids), self.max_prompt_length)
        return Entry(origin, columns, np.asarray(self._fit(ids, origin), dtype=np.int32))

    def _encode(self, columns: Row, origin: Origin, is_made: bool = False) -> list[int]:
        """Encodes a row's prompt, however long; ValueError says which row is bad, and why."""
        try:
            prompt = self._messages(columns, is_made)
            check_says_something(prompt)
            shown = columns.get(self.image_key), self.image_key, self.encode_prompt
            ids = self.encode_prompt(prompt) if self.images is None else self.images.encode(prompt, *shown)
        except (ValueError, TypeError, TemplateError) as error:  # templates refuse messages by the last two
            filled = ", ".join(name for name, value in columns.items() if str(value) not in ("None", "{}"))
            read = f"It is read from data.prompt_key={self.prompt_key}; this row fills the columns"
            raise ValueError(f"{origin}: {str(error).removesuffix('.')}. {read} {filled}.") from error
        if not ids:
            raise ValueError(f"{origin}: the prompt has no tokens; remove the row.")
        return ids

    def _fit(self, ids: list[int], origin: Origin) -> list[int]:
        """Returns `ids` cut to data.max_prompt_length as data.truncation says."""
        limit = self.max_prompt_length
        if len(ids) <= limit:
            return ids
        if self.truncation == "error" or media_of(ids):
            raise OverlongPrompt(origin, len(ids), limit)
        return truncate(ids, limit, self.truncation)


def as_data_config(config: DataConfig | Mapping[str, Any] | None) -> DataConfig:
    """Makes a data section of verl's mapping, with keys that are none of ours in `extras`."""
    if config is None or isinstance(config, Readable):
        return DataConfig() if config is None else config
    ours = {item.name for item in fields(DataConfig)}
    known = {name: value for name, value in config.items() if name in ours}
    return DataConfig(**known, extras={name: value for name, value in config.items() if name not in ours})


def gives_rows_as_they_are(dataset: Dataset) -> bool:
    """Says whether rows come out of a dataset as they were read, and not by a method of the user's."""
    return type(dataset).__getitem__ is RLHFDataset.__getitem__


def row_maker(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Callable[[Row, int], Row]:
    """Returns the function that completes a row, given its position: the dataset's `make_row`, or RLHFDataset's."""
    if isinstance(dataset, RLHFDataset):
        return dataset.make_row
    maker = RLHFDataset(None, tokenizer, config=config)
    return partial(maker.make_row, source=type(dataset).__name__)


def report_overlong(overlong: list[OverlongPrompt], total: int, limit: int) -> None:
    """Warns which of `total` rows are left out; raises ValueError if all are."""
    longer = f"longer than data.max_prompt_length={limit} tokens"
    if len(overlong) == total:
        longest = max(error.length for error in overlong)
        remedy = "raise it, or set data.filter_overlong_prompts=false data.truncation=left"
        raise ValueError(f"all {total} prompts are {longer}, the longest has {longest}: {remedy}.")
    first = "; ".join(str(error.origin) for error in overlong[:3]) + ("; …" if len(overlong) > 3 else "")
    logger.warning("dropped %d of %d prompts, %s: %s", len(overlong), total, longer, first)


def collate_fn(rows: list[Row]) -> dict[str, torch.Tensor | np.ndarray]:
    """Stacks the tensors of B rows to [B, …]; all else becomes an object array [B], with elements as they are."""
    names = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        lacking = [i for i, row in enumerate(rows) if name not in row]
        if lacking:
            raise ValueError(f"column {name!r} is missing from row {lacking[0]} of a batch; all need the same columns.")
    return {name: _stack(name, [row[name] for row in rows]) for name in names}


def _stack(name: str, values: list[Any]) -> torch.Tensor | np.ndarray:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return object_array(values)
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise ValueError(f"column {name!r} holds tensors of shapes {sorted(shapes)}; pad them, or return lists.")
    return torch.stack(values)


def get_dataset_class(config: DataConfig) -> type[Dataset]:
    """Returns the class that data.custom_cls names, or else the one that the data section does."""
    if config.custom_cls.path is None:
        return find("dataset", config.dataset, "data")
    return load_subclass(config.custom_cls.path, config.custom_cls.name, Dataset, "data.custom_cls.name")


def create_rl_dataset(
    data_files: str | Path | Iterable[str | Path] | None,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
) -> Dataset:
    """Returns the dataset of `data_files`, of the configured class, which is given what its constructor names."""
    dataset_class = get_dataset_class(config)
    if data_files is None and dataset_class is RLHFDataset:
        raise ValueError("data.train_files is not set: name files (docs/data.md), or an environment by env.id.")
    key, kwargs = f"data.custom_cls.name={config.custom_cls.name}", config.custom_cls.kwargs
    arguments = {"data_files": data_files, "tokenizer": tokenizer, "processor": None, "config": config}
    if max_samples != -1:
        kwargs = {"max_samples": max_samples} | kwargs  # the user has set it, so the class must accept it
    return bind(dataset_class, arguments | {"max_samples": max_samples}, kwargs, key)()


def check_says_something(prompt: Prompt) -> None:
    """Raises ValueError for a prompt whose every text is empty, or that holds what no tokenizer encodes."""
    texts = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    if all(isinstance(text, str) and not text.strip() for text in texts):
        raise ValueError("the prompt is empty.")
    check_text("".join(text for text in texts if isinstance(text, str)), "prompt")
