"""Reads the rows of an RL run from files, as dictionaries with token ids.

Prompts are tokenised once, when the files are read, so that overlong and malformed ones are found before a model
loads. A row keeps all its columns: rewards and environments see what the user wrote.
"""

import logging
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from rich.progress import track
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.extras import absence, has
from configs.import_utils import bind, find, load_subclass
from configs.schema import DataConfig
from data.chat import Prompt, encode_prompt, parse_prompt
from data.padding import media_of
from data.protocol import object_array
from data.rows import (
    BadRow,
    BadRows,
    Encoded,
    Entry,
    Origin,
    check_is_read,
    files_key,
    given_ids,
    kwargs_in,
    print_report,
    read_rows,
    rename_clashes,
    with_labels,
)
from data.types import Row, check_text

logger = logging.getLogger(__name__)
PROGRESS_BAR_FROM = 2000  # rows; fewer need no bar
HOOKS_OF_VERL = frozenset((  # methods of verl's RLHFDataset that its subclasses define
    "_download", "_read_files_and_tokenize", "maybe_filter_out_long_prompts", "_build_messages",
    "process_vision_info", "process_multi_modal_info", "resume_dataset_state",
))  # fmt: skip


class OverlongPrompt(ValueError):
    """A prompt has more tokens than data.max_prompt_length, and must not be cut."""

    def __init__(self, origin: Origin, length: int, limit: int) -> None:
        super().__init__(
            f"{origin}: the prompt has {length} tokens, more than data.max_prompt_length={limit}: raise it, or set "
            "data.filter_overlong_prompts=true, or, for one without images, data.truncation=left."
        )
        self.origin, self.length = origin, length


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Cuts `ids` to `limit` tokens by removing from one side: left, right or middle."""
    excess = max(len(ids) - limit, 0)
    start = {"left": 0, "middle": limit // 2, "right": limit}[side]
    return ids[:start] + ids[start + excess :]


class RLHFDataset(Dataset):
    """Prompts with token ids. A row holds all columns of its file, and:

    raw_prompt: the string, or the chat messages; raw_prompt_ids: list[int], with the generation prompt;
    data_source: the column data.reward_fn_key, else the name of its file, or "unknown"; extra_info: the column, or {};
    index: extra_info["index"], or the position in this dataset.

    A subclass without files passes `data_files=None`, defines `__len__`, and returns `self.make_row({data.prompt_key:
    prompt, …}, i)` from `__getitem__(i)`. extras/verl/hooks.py calls verl's hooks.

    Args:
        data_files: one path or several (see `read_rows`); None: no rows are read.
        tokenizer: None: rows have no tokens until `setup`, and no files can be read.
        config: the data section; extras/verl reads a mapping, as in verl.
        processor: kept for subclasses; not used here.
        max_samples: use at most so many rows: random ones by data.seed if data.shuffle, else the first; -1: all.

    Attributes:
        rows, prompt_ids: the rows in use, and the tokens of their prompts (int32: a ninth of the memory of lists).
        is_set_up: whether it has a tokenizer and a data section; if not, the run calls `setup`.

    Raises:
        FileNotFoundError, ValueError: rows are unusable; names file, row and remedy.
    """

    is_set_up, calls_hooks, tokenizer = False, False, None  # also if a subclass does not call our __init__

    def __init_subclass__(cls, **options: Any) -> None:
        """Makes a class with verl's hooks a subclass of extras/verl's, which calls them; this one calls none."""
        super().__init_subclass__(**options)
        hooks = ", ".join(sorted(HOOKS_OF_VERL.intersection(dir(cls))))
        if hooks and not cls.calls_hooks:
            if not has("dataset", "verl"):
                raise ConfigError(f"{cls.__name__} defines {hooks}, which verl's RLHFDataset calls: {absence('verl')}")
            find("dataset", "verl").become_base(cls)

    def __init__(
        self,
        data_files: str | Path | Iterable[str | Path] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: DataConfig | Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.processor, self.max_samples = processor, max_samples
        RLHFDataset.setup(self, tokenizer, config)
        self.data_files = [data_files] if isinstance(data_files, str | Path) else list(data_files or [])
        self.num_filtered = 0
        self.unread: list[BadRow] = []
        self.unusable: list[str] = []  # what is wrong with rows that were left out
        self.entries: Sequence[Entry] = []
        if data_files is not None:
            if tokenizer is None:
                raise ValueError(f"{type(self).__name__}: rows of files are tokenised at once, so give a tokenizer.")
            self._load(data_files)

    def setup(self, tokenizer: PreTrainedTokenizerBase | None, config: DataConfig | Mapping[str, Any] | None) -> None:
        """Sets the tokenizer and the data section that rows are made by."""
        config = find("dataset", "verl").as_data_config(config) if isinstance(config, Mapping) else config
        self.is_set_up = tokenizer is not None and config is not None
        self.tokenizer, self.config = tokenizer, config or DataConfig()
        self.images = tokenizer and vars(tokenizer).get("images")  # encodes them; None: the model reads text alone
        self.prompt_key, self.max_prompt_length = self.config.prompt_key, self.config.max_prompt_length
        self.filter_overlong_prompts, self.truncation = self.config.filter_overlong_prompts, self.config.truncation
        self.apply_chat_template_kwargs = self.config.apply_chat_template_kwargs
        self.image_key = self.config.get("image_key", "images")

    @property
    def dataframe(self) -> Any:
        return find("dataset", "table", f"{type(self).__name__}.dataframe")(self.entries)

    @property
    def rows(self) -> Sequence[Row]:
        return [entry.columns for entry in self.entries]

    @property
    def column_names(self) -> Iterable[str]:
        return {name for row in self.rows for name in row}

    @property
    def prompt_ids(self) -> Sequence[np.ndarray]:
        return [entry.prompt_ids for entry in self.entries]

    def prompt_ids_like(self, other: "RLHFDataset") -> Sequence[np.ndarray]:
        """Returns the tokens of the prompts; may leave out those that `other` does not have."""
        return self.prompt_ids

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, position: int) -> Row:
        entry = self.entries[position]
        row = self.make_row(entry.columns, position, entry.prompt_ids.tolist())
        if has_default_getitem(self):
            return row
        row["raw_prompt_ids"] = Encoded(row["raw_prompt_ids"], repr(row["raw_prompt"]))
        kwargs = {name: kwargs_in(row, name) for name in ("tools_kwargs", "interaction_kwargs")}
        return {"dummy_tensor": torch.zeros(1, dtype=torch.uint8), **row, **kwargs}  # as verl's methods expect

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt before truncation; override it for your own format."""
        return encode_prompt(prompt, self.tokenizer, **self.apply_chat_template_kwargs)

    def make_row(
        self, columns: Row, position: int, prompt_ids: list[int] | None = None, source: str | None = None
    ) -> Row:
        """Completes `columns` to a row: adds what is missing, and keeps the rest.

        The prompt is the column raw_prompt if the row was made before, else data.prompt_key. Its tokens are
        `prompt_ids`, else the column raw_prompt_ids, else input_ids under attention_mask, else they are encoded;
        data.truncation cuts them. `source` is the dataset's name in messages; None: this class.
        """
        origin = Origin(source or type(self).__name__, position)
        if not isinstance(columns, Mapping):
            raise ValueError(f"{origin} is {reprlib.repr(columns)}; a row must be a dictionary.")
        ids = given_ids(columns) if prompt_ids is None else prompt_ids
        columns = with_labels(rename_clashes(columns), origin, self.config.ground_truth_key)
        is_made = prompt_ids is None and columns.get("raw_prompt") is not None
        has_prompt = ids is None or any(columns.get(name) is not None for name in (self.prompt_key, "raw_prompt"))
        if ids is None:
            ids = self._encode(columns, origin, is_made)
        elif self.images is not None:
            ids = self.images.with_images([*map(int, ids)], media_of(ids), columns.get(self.image_key))
        else:
            ids = [*map(int, ids)]
        index = columns["extra_info"].get("index", columns.get("index"))
        return {
            **columns,
            "raw_prompt": self._messages(columns, is_made) if has_prompt else None,
            "raw_prompt_ids": self._fit(ids, origin),
            "data_source": columns.get(self.config.reward_fn_key) or "unknown",
            "index": position if index is None else index,
        }

    def _messages(self, columns: Row, is_made: bool = False) -> Prompt:
        value = None if is_made else columns.get(self.prompt_key)
        return parse_prompt(columns.get("raw_prompt") if value is None else value)

    def _sampled(self, total: int) -> Iterable[int]:
        if self.max_samples == 0:
            raise ValueError("data.train_max_samples or data.val_max_samples is 0, which leaves no rows: -1 takes all.")
        if not 0 < self.max_samples < total:
            return range(total)
        if not self.config.shuffle:
            return range(self.max_samples)
        return np.random.default_rng(self.config.seed or 0).choice(total, self.max_samples, replace=False)

    def _load(self, data_files: Any) -> None:
        """Reads the rows, tokenises their prompts, and reports on them."""
        rows = read_rows(self.data_files, self.unread, files_key(self.data_files, self.config))
        self.entries = self._measure([Entry(*rows[index]) for index in self._sampled(len(rows))])
        self._report(data_files)

    def _report(self, data_files: Any) -> None:
        if not len(self.entries):
            raise ValueError(f"{type(self).__name__}: no rows are left of {data_files}.")
        print_report(data_files, len(self.entries), self._describe(), self.unusable, self.num_filtered)

    def _describe(self) -> str:
        lengths = [len(ids) for ids in self.prompt_ids]
        return f"prompts of {' to '.join(map(str, sorted({min(lengths), max(lengths)})))} tokens"

    def _measure(self, entries: Sequence[Entry], total: int = 0) -> list[Entry]:
        """Returns `entries` with the tokens of their prompts, without unusable rows and overlong prompts. `total` rows
        were read, and all others of them are usable; 0: these are all."""
        unread, self.unread = self.unread, []
        total = total or sum(entry.prompt_ids is None for entry in entries) + len(unread)
        bad, overlong, measured = BadRows(total, self.config.max_bad_fraction, unread), [], []
        for entry in track(entries, "tokenising prompts", disable=len(entries) < PROGRESS_BAR_FROM):
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
        return measured

    def _read(self, entry: Entry) -> Entry:
        """Returns a row with its labels and the tokens of its prompt; raises OverlongPrompt if they are too many."""
        origin, columns = entry.origin, self._complete(entry)
        check_is_read(columns, self.prompt_key, origin, *([] if self.images is None else [self.image_key]))
        ids = self._encode(columns, origin)
        if self.filter_overlong_prompts and len(ids) > self.max_prompt_length:
            raise OverlongPrompt(origin, len(ids), self.max_prompt_length)
        return Entry(origin, columns, np.asarray(self._fit(ids, origin), dtype=np.int32))

    def _complete(self, entry: Entry) -> Row:
        """Returns the columns of a file's row, with its labels and its source."""
        origin, key = entry.origin, self.config.reward_fn_key
        columns = with_labels(entry.columns, origin, self.config.ground_truth_key)
        if origin.source and not columns.get(key):
            columns[key] = origin.source
        return columns

    def _encode(self, columns: Row, origin: Origin, is_made: bool = False) -> list[int]:
        """Encodes a row's prompt, of any length; raises ValueError that names the bad row and the reason."""
        try:
            prompt = self._messages(columns, is_made)
            check_has_text(prompt)
            images = columns.get(self.image_key), self.image_key, self.encode_prompt
            ids = self.encode_prompt(prompt) if self.images is None else self.images.encode(prompt, *images)
        except (ValueError, TypeError, TemplateError) as error:  # the last two: a template refuses the messages
            filled = ", ".join(name for name, value in columns.items() if str(value) not in ("None", "{}"))
            read = f"It is read from data.prompt_key={self.prompt_key}; this row fills the columns"
            raise ValueError(f"{origin}: {str(error).removesuffix('.')}. {read} {filled}.") from error
        if not ids:
            raise ValueError(f"{origin}: the prompt has no tokens; remove the row.")
        return ids

    def _fit(self, ids: list[int], origin: Origin) -> list[int]:
        """Cuts `ids` to data.max_prompt_length as data.truncation says."""
        limit = self.max_prompt_length
        if len(ids) <= limit:
            return ids
        if self.truncation == "error" or media_of(ids):
            raise OverlongPrompt(origin, len(ids), limit)
        return truncate(ids, limit, self.truncation)


def has_default_getitem(dataset: Dataset) -> bool:
    """Says whether a dataset's `__getitem__` is RLHFDataset's own, which returns rows as they were read."""
    return type(dataset).__getitem__ is RLHFDataset.__getitem__


def row_maker(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Callable[[Row, int], Row]:
    """Returns the function that completes a row, given its position: the dataset's `make_row`, or RLHFDataset's."""
    if isinstance(dataset, RLHFDataset):
        return dataset.make_row
    maker = RLHFDataset(None, tokenizer, config=config)
    return partial(maker.make_row, source=type(dataset).__name__)


def report_overlong(overlong: list[OverlongPrompt], total: int, limit: int) -> None:
    """Warns which of `total` rows are left out; raises ValueError if it is all of them."""
    longer = f"longer than data.max_prompt_length={limit} tokens"
    if len(overlong) == total:
        longest = max(error.length for error in overlong)
        remedy = "raise it, or set data.filter_overlong_prompts=false data.truncation=left"
        raise ValueError(f"all {total} prompts are {longer}, the longest has {longest}: {remedy}.")
    first = "; ".join(str(error.origin) for error in overlong[:3]) + ("; …" if len(overlong) > 3 else "")
    logger.warning("dropped %d of %d prompts, %s: %s", len(overlong), total, longer, first)


def collate_fn(rows: list[Row]) -> dict[str, torch.Tensor | np.ndarray]:
    """Stacks the tensors of B rows to [B, …]; any other column becomes an object array [B] of its values."""
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
    """Returns the class that data.custom_cls names, or else the `dataset` of the data section."""
    if config.custom_cls.path is None:
        return find("dataset", config.dataset, "data")
    return load_subclass(config.custom_cls.path, config.custom_cls.name, Dataset, "data.custom_cls.name")


def create_rl_dataset(
    data_files: str | Path | Iterable[str | Path] | None,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
) -> Dataset:
    """Makes the configured dataset of `data_files`; its constructor gets the arguments that it names."""
    dataset_class = get_dataset_class(config)
    if data_files is None and dataset_class is RLHFDataset:
        raise ValueError("data.train_files is not set: name files (docs/data.md), or an environment by env.id.")
    if dataset_class is RLHFDataset and has("dataset", "many_rows"):
        dataset_class = find("dataset", "many_rows").fitting(data_files, tokenizer)
    key, kwargs = f"data.custom_cls.name={config.custom_cls.name}", config.custom_cls.kwargs
    arguments = {"data_files": data_files, "tokenizer": tokenizer, "processor": None, "config": config}
    if max_samples != -1:
        kwargs = {"max_samples": max_samples} | kwargs  # the user has set it, so the class must accept it
    return bind(dataset_class, arguments | {"max_samples": max_samples}, kwargs, key)()


def check_has_text(prompt: Prompt) -> None:
    """Raises ValueError for a prompt whose texts are all empty, or with characters that no tokenizer encodes."""
    texts = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    if all(isinstance(text, str) and not text.strip() for text in texts):
        raise ValueError("the prompt is empty.")
    check_text("".join(text for text in texts if isinstance(text, str)), "prompt")
