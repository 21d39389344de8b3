"""Reads the rows of all sources of a run, under one set of names.

An entry of data.train_files or data.val_files is a file, a folder or a glob (configs/paths.py: source_files;
data/file_formats.py reads them), or SOURCE:NAME?KEY=VALUE&… of an extra (kind `source` in configs/extras.py). Names of
columns are brought to verl's where rows spell them differently. `Table` holds rows as verl's hooks read them.
"""

import json
import reprlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import parse_qsl

import numpy as np
import torch

from configs.errors import notice_once
from configs.extras import TABLE, find
from configs.paths import find_path, source_files
from data.file_formats import BadRow, Found, Origin, read_file
from data.types import Row

# What the run itself fills in a batch; "dataset_position" is the row's place in the dataset.
RUN_COLUMNS = frozenset((
    "uid", "dataset_position", "prompts", "responses", "ground_truths", "input_ids", "attention_mask", "position_ids",
    "response_mask", "rollout_log_probs", "end_reason", "token_level_scores", "token_level_rewards", "old_log_probs",
    "ref_log_prob", "values", "advantages", "returns", "loss_mask", "entropys", "sum_pi_squared", "reward_baselines",
    "rollout_is_weights", "drawn_row", "turn_ids", "episode", "episode_return", "success", "invalid_actions", "failure",
    "__num_turns__", "__messages__", "__reward_score__", "__agent_metrics__", "__environment__", "tool_call_counts",
    "tool_failures",
    "tool_rewards", "turn_scores", "reset_seed", "reward_outcome", "reward_results",
))  # fmt: skip
NO_TEXT = ("images", "videos", "image", "video", "multi_modal_data")  # columns for which these stand in prompts:
PLACEHOLDERS = ("<image>", "<video>")
SAVED_TO_DISK = ("dataset_dict.json", "state.json")  # what datasets.save_to_disk leaves in a folder


def read_rows(
    data_files: str | Path | Iterable[str | Path], bad: list[BadRow] | None = None
) -> list[tuple[Origin, Row]]:
    """All rows of one or several sources, as plain python objects, in order.

    A row without `prompt` gets it from `instruction` (and a text in `input` below it) or from `messages` (an answer at
    the end becomes `response`); one without `response` gets it from `output`. Rows that lack a column of others hold
    None there. Rows that cannot be read are raised, or added to `bad` where it is given.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown ending, a file or a row that cannot be read, or no rows at all.
    """
    sources = [data_files] if isinstance(data_files, str | Path) else list(data_files)
    rows = []
    for origin, row in chain.from_iterable(map(read_source, sources)):
        if not isinstance(row, BadRow):
            rows.append((origin, standard_names(row)))
        elif bad is None:
            raise row
        else:
            bad.append(row)
    if not rows and not bad:
        raise ValueError(f"no rows in {', '.join(map(str, sources)) or 'an empty list of data files'}.")
    columns = dict.fromkeys(name for _, row in rows for name in row)
    return [(origin, {name: row.get(name) for name in columns}) for origin, row in rows]


def standard_names(row: Row) -> Row:
    """`row` with `prompt` and `response`, where it spells them differently, as a run's samples do."""
    row = dict(row)
    if "gts" in row:
        row.setdefault("ground_truth", row["gts"])
    if "output" in row:
        row.setdefault("response", row["output"])
    if "prompt" in row:
        return row
    match row:
        case {"instruction": str(instruction), "input": str(text)} if text:
            row["prompt"] = f"{instruction}\n\n{text}"
        case {"instruction": instruction}:
            row["prompt"] = instruction
        case {"messages": [*prompt, {"role": "assistant", "content": answer}]}:
            row["prompt"] = prompt
            row.setdefault("response", answer)
        case {"messages": prompt} | {"input": prompt, "gts": _}:
            row["prompt"] = prompt
    return row


def own_names(row: Row) -> Row:
    """`row` with those of its columns that are called like one of `RUN_COLUMNS` under the name dataset_…."""
    taken = row.keys() & RUN_COLUMNS
    for name in sorted(taken):
        notice_once(
            f"the run has a column {name!r} of its own: that of the data is called 'dataset_{name}' in batches."
        )
    return beside(row, taken, "dataset") if taken else row


def beside(columns: Mapping[str, Any], taken: Container[str], prefix: str) -> Row:
    """Returns `columns`, those whose names are `taken` as PREFIX_NAME."""
    return {f"{prefix}_{name}" if name in taken else name: value for name, value in columns.items()}


def with_labels(row: Row, origin: Origin) -> Row:
    """`row` with a dictionary as extra_info, and, if it says what is right, one with ground_truth as reward_model.

    Either may be given as JSON. A column ground_truth counts where reward_model has none.

    Raises:
        ValueError: one of the two is no dictionary; names the row.
    """
    row = {**row, "extra_info": _dictionary(row, "extra_info", origin)}
    if "reward_model" in row or "ground_truth" in row:
        labels = {"ground_truth": None} | _dictionary(row, "reward_model", origin)
        if labels["ground_truth"] is None:
            labels["ground_truth"] = row.get("ground_truth")
        row["reward_model"] = labels
    return row


def kwargs_in(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns what a row tells tools (`tools_kwargs`) or a simulated user (`interaction_kwargs`): its column of this
    name, or what extra_info has under it."""
    return row.get(name) or (row.get("extra_info") or {}).get(name) or {}


class Encoded(list):
    """Token ids of a prompt, with `said`, its repr: whether it was changed since."""

    def __init__(self, ids: list[int], said: str) -> None:
        super().__init__(ids)
        self.said = said


def given_ids(columns: Row) -> Sequence[int] | None:
    """Returns the tokens that a row brings for its prompt, unless it was changed since: raw_prompt_ids, or what
    attention_mask leaves of input_ids, both tensors."""
    given, ids, mask = (columns.get(name) for name in ("raw_prompt_ids", "input_ids", "attention_mask"))
    if isinstance(given, Encoded) and given.said != repr(columns.get("raw_prompt")):
        return None
    if given is None and isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and ids.shape == mask.shape:
        return ids[mask.bool()].tolist()
    return given


def check_is_text(row: Row, key: str, origin: Origin) -> None:
    """Raises ValueError for a row with images or videos, beside its prompt in the column `key` or in it: a model that
    reads text would answer without them."""
    prompt = row.get(key)
    messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    kinds = [part.get("type", "text") for part in parts if isinstance(part, dict)]
    texts = [str(part.get("text", "") if isinstance(part, dict) else part) for part in parts]
    found = [f"the column {name!r} is filled" for name in NO_TEXT if row.get(name)]
    found += [f"the column {key!r} holds a part of type {kind!r}" for kind in kinds if kind != "text"]
    found += [f"the column {key!r} holds {sign!r}" for sign in PLACEHOLDERS if any(sign in text for text in texts)]
    if found:
        raise ValueError(f"{origin}: {found[0]}, and models read text alone here: leave such rows out.")


def _dictionary(row: Row, name: str, origin: Origin) -> dict[str, Any]:
    value = row.get(name)
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    if not isinstance(value, dict | None):
        bare = " A bare answer belongs into a column ground_truth." if name == "reward_model" else ""
        raise ValueError(
            f"{origin}: {name} is {reprlib.repr(row[name])}; it must be a dictionary, or one written as JSON.{bare}"
        )
    return value or {}


def read_source(source: str | Path) -> Iterator[Found]:
    """The rows of one entry of data.train_files, in order.

    Raises:
        FileNotFoundError: no such file, folder or data set.
        ValueError: a file that cannot be read, or what a source refuses.
    """
    scheme, _, rest = str(source).partition(":")
    if scheme in TABLE["source"]:
        name, _, query = rest.partition("?")
        return find("source", scheme, "data.train_files")(str(source), name, dict(parse_qsl(query)))
    folder = find_path(source)
    if any((folder / name).is_file() for name in SAVED_TO_DISK):
        return find("source", "datasets", "data.train_files")(str(source), str(folder), {})
    try:
        files = source_files(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"data file {error} data.train_files and data.val_files name a run's.") from error
    return (found for file in files for found in read_file(file))


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
        """Makes a table of one, of a `datasets.Dataset`, a data frame or rows; `name` is that of the data set.

        Raises:
            ValueError: its rows are no dictionaries.
        """
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
        return cls(rows, [Origin(name, place) for place in range(len(rows))])

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

    def __getitem__(self, place: int | str | slice) -> Any:
        if isinstance(place, str):
            return deepcopy([row.get(place) for row in self.rows])
        if isinstance(place, slice):
            return {name: deepcopy([row.get(name) for row in self.rows[place]]) for name in self.column_names}
        return deepcopy(self.rows[place])

    def to_list(self) -> list[Row]:
        return [*self]

    def select(self, indices: Iterable[int], **ignored: Any) -> "Table":
        places = [int(place) for place in indices]
        return Table(*([part[place] for place in places] for part in self.parts))

    def shuffle(self, seed: int | None = None, **ignored: Any) -> "Table":
        return self.select(np.random.default_rng(seed).permutation(len(self)))

    def filter(self, function: Callable[..., Any], with_indices: bool = False, **options: Any) -> "Table":
        """Keeps the rows of which `function(row)` is true."""
        kwargs = self._arguments("filter", options)
        return self.select(place for place, row in enumerate(self) if function(row, *[place] * with_indices, **kwargs))

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
        for place, row in enumerate(self):
            made = function(row, *[place] * with_indices, **kwargs)
            rows.append({name: value for name, value in row.items() if name not in removed} | dict(made or {}))
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


@runtime_checkable
class HasColumns(Protocol):
    """A dataset that gives a whole column at once: `column("extra_info.difficulty")`, one value a row."""

    def column(self, name: str) -> Sequence[Any]: ...


def column_of(dataset: Any, name: str) -> Sequence[Any]:
    """A column of `dataset`, one value a row; dots lead into dictionaries; None where there is none.

    A dataset of another class that has no `column` is asked for row after row.
    """
    if isinstance(dataset, HasColumns):
        return dataset.column(name)
    return [value_in(dataset[position], name) for position in range(len(dataset))]


def value_in(row: Mapping[str, Any], name: str) -> Any:
    """row["a"]["b"] for "a.b"; None where there is none."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
