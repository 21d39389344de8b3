"""Reads the rows of all sources of a run, under one set of names, and says why some are left out.

An entry of data.train_files or data.val_files is a file, a folder or a glob, or SOURCE:NAME?KEY=VALUE&… of an extra
(kind `source` in configs/extras.py). A row that cannot be read is a `BadRow` in its place, so that whoever reads a file
counts it and goes on; a file that cannot be read at all is an error.
"""

import csv
import io
import json
import re
import reprlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerBase

from configs.checks import plural
from configs.errors import notice, notice_once
from configs.extras import TABLE
from configs.import_utils import find
from configs.paths import ENDINGS_OF_DATASETS, SAVED_TO_DISK, find_path, source_files
from data.padding import PromptIds, media_of
from data.types import Row

# What the run itself fills in a batch; "dataset_position" is the row's place in the dataset.
RUN_COLUMNS = frozenset((
    "uid", "dataset_position", "prompts", "responses", "ground_truths", "input_ids", "attention_mask", "position_ids",
    "response_mask", "rollout_log_probs", "end_reason", "token_level_scores", "token_level_rewards", "old_log_probs",
    "ref_log_prob", "values", "advantages", "returns", "loss_mask", "entropys", "sum_pi_squared", "reward_baselines",
    "rollout_is_weights", "drawn_row", "turn_ids", "episode", "episode_return", "success", "invalid_actions", "failure",
    "__num_turns__", "__messages__", "__reward_score__", "__agent_metrics__", "__environment__", "tool_call_counts",
    "tool_failures", "tool_rewards", "turn_scores", "reset_seed", "reward_outcome", "reward_results", "media",
))  # fmt: skip
NO_TEXT = ("images", "videos", "image", "video", "multi_modal_data")  # columns
HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")
OF_TOOLS = ("tools", "tool_calls", "function")  # keys of what describes tools, or calls them
LONGEST_CELL = 1 << 30  # characters; csv's own limit is 128 K
SHOWN, SHOWN_BAD = 3, 5  # rows that are spelt out: of those left out, of those that end the run
SHOWN_TEXT = 80  # characters of a prompt that is in both sets


class Origin(NamedTuple):
    """The place that a row comes from; rows count from 0, lines of text files from 1. `source` is what the entry of
    data.train_files is called in metrics, where rows name none."""

    file: str
    number: int
    line: int | None = None
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}, row {self.number}"

    @property
    def place(self) -> str:
        """The row as editors open it, where the file has lines."""
        return f"{self.file}:{self.line}" if self.line else str(self)


class BadRow(ValueError):
    """A row that cannot be used; the message says where it stands and what is wrong."""

    def __init__(self, origin: Origin, problem: str, cause: Exception | None = None) -> None:
        super().__init__(problem)
        self.origin = origin
        self.__cause__ = cause


Found = tuple[Origin, Row | BadRow]


class Entry(NamedTuple):
    """A row of a data set: its place, its columns and, once it is measured, its prompt's tokens (int32)."""

    origin: Origin
    columns: Row
    prompt_ids: np.ndarray | None = None


def rows_of(value: Any, name: str) -> list[Row]:
    """Lists the rows of a `datasets.Dataset`, a data frame or rows; `name` is what messages call them."""
    match value:
        case object(to_list=to_list):
            rows = without_nulls(to_list())
        case object(to_dict=to_dict):
            rows = to_dict("records")
        case _:
            rows = [*value]
    if not all(isinstance(row, Mapping) for row in rows):
        kinds = "a datasets.Dataset, a data frame, or rows as dictionaries"
        raise ValueError(f"{name}: self.dataframe is {reprlib.repr(value)}; it must be {kinds}.")
    return [standard_names(row) for row in rows]


def read_rows(
    data_files: str | Path | Iterable[str | Path], bad: list[BadRow] | None = None, key: str = ""
) -> list[tuple[Origin, Row]]:
    """Reads all rows of one or several sources, as plain python objects, in order.

    A row without `prompt` gets it from `instruction` (and a text in `input` below it) or from `messages` (an answer at
    the end becomes `response`); one without `response` gets it from `output`. Rows that lack a column of others hold
    None there. Rows that cannot be read are raised, or added to `bad` where it is given. Errors name `key`, the setting
    that gave the files.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown ending, a file or a row that cannot be read, or no rows at all.
    """
    sources = [data_files] if isinstance(data_files, str | Path) else list(data_files)
    rows = []
    for source in sources:
        name, entries = read_source(source, key)
        for origin, row in entries:
            if not isinstance(row, BadRow):
                rows.append((origin._replace(source=name), standard_names(row)))
            elif bad is None:
                raise row
            else:
                bad.append(row)
    if not rows and not bad:
        raise ValueError(f"no rows in {', '.join(map(str, sources)) or 'an empty list of data files'}.")
    columns = dict.fromkeys(name for _, row in rows for name in row)
    return [(origin, {name: row.get(name) for name in columns}) for origin, row in rows]


def standard_names(row: Row) -> Row:
    """Returns `row` with `prompt` and `response`, where it spells them differently, as a run's samples do."""
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


def rename_clashes(row: Row) -> Row:
    """Returns `row`; its columns that are called like one of `RUN_COLUMNS` get the prefix dataset_."""
    clashing = row.keys() & RUN_COLUMNS
    for name in sorted(clashing):
        notice_once(f"the run has a column {name!r} itself: that of the data is called 'dataset_{name}' in batches.")
    return beside(row, clashing, "dataset") if clashing else row


def beside(columns: Mapping[str, Any], renamed: Container[str], prefix: str) -> Row:
    """Returns `columns`, with PREFIX_ before the names in `renamed`."""
    return {f"{prefix}_{name}" if name in renamed else name: value for name, value in columns.items()}


def with_labels(row: Row, origin: Origin, truth_key: str = "ground_truth") -> Row:
    """Gives `row` a dictionary as extra_info and, if it has an answer, one with ground_truth as reward_model.

    Either may be given as JSON. The column `truth_key` counts where reward_model has none.
    """
    row = {**row, "extra_info": _dictionary(row, "extra_info", origin)}
    if "reward_model" in row or truth_key in row:
        labels = {"ground_truth": None} | _dictionary(row, "reward_model", origin)
        if labels["ground_truth"] is None:
            labels["ground_truth"] = row.get(truth_key)
        row["reward_model"] = labels
    return row


def kwargs_in(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns what a row tells tools (`tools_kwargs`) or a simulated user (`interaction_kwargs`): its column of this
    name, or what extra_info has under it."""
    return row.get(name) or (row.get("extra_info") or {}).get(name) or {}


class Encoded(PromptIds):
    """Token ids of a prompt, with `prompt`, its repr, which tells whether it was changed since."""

    def __init__(self, ids: list[int], prompt: str) -> None:
        super().__init__(ids, media_of(ids))
        self.prompt = prompt


def given_ids(columns: Row) -> Sequence[int] | None:
    """Returns the tokens that a row brings for its prompt, unless it was changed since: raw_prompt_ids, or what
    attention_mask leaves of input_ids, both tensors."""
    raw_ids, ids, mask = (columns.get(name) for name in ("raw_prompt_ids", "input_ids", "attention_mask"))
    if isinstance(raw_ids, Encoded) and raw_ids.prompt != repr(columns.get("raw_prompt")):
        return None
    if raw_ids is None and isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and ids.shape == mask.shape:
        return ids[mask.bool()].tolist()
    return raw_ids


def check_is_read(row: Row, key: str, origin: Origin, *image_key: str) -> None:
    """Raises ValueError for a row with media, in columns of their own or as parts of its prompt in the column `key`,
    that the model would answer without: all but images of the column `image_key`, if there is one."""
    messages = row.get(key) if isinstance(row.get(key), list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    kinds = {part.get("type", "text") for part in parts} - {"text", *(("image", "image_url") if image_key else ())}
    media = [f"the column {name!r} is filled" for name in NO_TEXT if row.get(name) and name not in image_key]
    media += [f"the column {key!r} holds a part of type {kind!r}" for kind in kinds]
    if media:
        words = f"text, and images of the column {image_key[0]!r}" if image_key else "text alone"
        raise ValueError(f"{origin}: {media[0]}, and the model reads {words}: leave such rows out.")


def _dictionary(row: Row, name: str, origin: Origin) -> dict[str, Any]:
    value = row.get(name)
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    if not isinstance(value, dict | None):
        rule = "it must be a dictionary, or one written as JSON (a bare answer: in a column ground_truth)"
        raise ValueError(f"{origin}: {name} is {reprlib.repr(row[name])}; {rule}.")
    return value or {}


def read_source(source: str | Path, key: str = "") -> tuple[str, Iterator[Found]]:
    """Returns the name of an entry of data.train_files, or of the setting `key`, and its rows in order.

    It is called by its file, its folder, the folder of a glob, or the data set of a source."""
    scheme, _, rest = str(source).partition(":")
    if scheme in TABLE["source"]:
        name, _, query = rest.partition("?")
        return name, find("source", scheme, key or "data.train_files")(str(source), name, dict(parse_qsl(query)))
    path = find_path(source)
    name = path.name if path.exists() else path.parent.name
    if path.name.endswith(ENDINGS_OF_DATASETS) or any((path / file).is_file() for file in SAVED_TO_DISK):
        return name, find("source", "datasets", key or "data.train_files")(str(source), str(path), {})
    try:
        files = source_files(source)
    except FileNotFoundError as error:
        hub = f" For a data set of the hub, write datasets:{source}." if HUB_NAME.fullmatch(str(source)) else ""
        raise FileNotFoundError(f"{from_key(error, key)}{hub}") from error
    return name, (row for file in files for row in read_file(file, key))


def files_key(data_files: list[Any], config: Any) -> str:
    """Returns which setting of a data section gave `data_files`; "" if none of these did."""
    settings = {f"data.{name}": getattr(config, name) for name in ("train_files", "val_files")}
    return next((key for key, named in settings.items() if data_files in (named, [named])), "")


def from_key(path: object, key: str) -> str:
    return f"{key}={path}" if key else f"data file {path}"


def read_file(path: Path, key: str = "") -> Iterator[Found]:
    """Reads the rows of one file, in order; raises ValueError for what is not its format."""
    try:
        if path.suffix == ".parquet":  # pandas would make floats of integers beside a null
            rows = pyarrow.parquet.ParquetFile(path).read().to_pylist()
            return ((Origin(str(path), number), without_nulls(row)) for number, row in enumerate(rows))
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # Excel's and Notepad's mark of UTF-8
        if path.suffix == ".csv":
            return iter([*read_csv(str(path), content.decode())])
        with suppress(ValueError, RecursionError):
            parsed = json.loads(content)  # one array, or one object on as many lines as it likes
            rows = parsed if isinstance(parsed, list) else [parsed]
            return (as_found(Origin(str(path), number), row) for number, row in enumerate(rows))
        if content.lstrip().startswith(b"["):
            json.loads(content)  # raises
    except (pyarrow.ArrowException, csv.Error, OSError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{from_key(path, key)}: it cannot be read as {path.suffix[1:]}: {error}") from error
    return read_json_lines(str(path), content)


def without_nulls(value: Any, of_tools: bool = False) -> Any:
    """Returns what Arrow holds without the nulls in tools and their calls, to which it gives the keys of all rows'."""
    if isinstance(value, list):
        return [without_nulls(item, of_tools) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if item is not None or not of_tools}
    return {key: without_nulls(item, of_tools or key in OF_TOOLS) for key, item in kept.items()}


def read_json_lines(file: str, content: bytes) -> Iterator[Found]:
    """Reads one JSON object a line; empty lines are passed over."""
    lines = [(line, text) for line, text in enumerate(content.split(b"\n"), start=1) if text.strip()]
    for number, (line, text) in enumerate(lines):
        origin = Origin(file, number, line)
        try:
            yield as_found(origin, json.loads(text))
        except (ValueError, RecursionError) as error:
            yield origin, BadRow(origin, f"{file}, line {line}: this is not JSON in UTF-8: {error}.")


def as_found(origin: Origin, value: Any) -> Found:
    if isinstance(value, dict):
        return origin, value
    row = f"{origin.file}, line {origin.line}" if origin.line else origin
    return origin, BadRow(origin, f"{row} is {reprlib.repr(value)}; a row must be a JSON object.")


def read_csv(file: str, text: str, separator: str = ",") -> Iterator[Found]:
    """Reads rows under the names of the first line. An empty cell is None, a JSON list of messages becomes one."""
    csv.field_size_limit(LONGEST_CELL)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    names = next(lines, [])
    if len({*names}) < len(names) or not all(names):
        raise ValueError(f"its first line is {names}; it must name each column, once, between {separator!r}")
    for number, cells in enumerate(filter(None, lines)):
        origin = Origin(file, number, lines.line_num)
        if len(cells) != len(names):
            line = f"{file}, line {lines.line_num}"
            yield origin, BadRow(origin, f"{line}: it has {len(cells)} cells, the first line names {len(names)}.")
        else:
            yield origin, {name: cell_value(cell) for name, cell in zip(names, cells, strict=True)}


def cell_value(cell: str) -> Any:
    if cell.startswith("[{"):
        with suppress(ValueError, RecursionError):
            return json.loads(cell)
    return cell or None


class BadRows:
    """Collects rows of `total` that cannot be used, the `unread` first; a share of `max_fraction` is allowed."""

    def __init__(self, total: int, max_fraction: float, unread: Iterable[BadRow] = ()) -> None:
        self.total, self.max_fraction, self.errors = total, max_fraction, [*unread]

    def add(self, error: BadRow) -> None:
        """Raises ValueError as soon as it is clear that there are too many, with a few of them."""
        self.errors.append(error)
        if len(self.errors) >= int(self.total * self.max_fraction) + SHOWN_BAD:
            self.check()

    def describe(self) -> list[str]:
        """Describes each bad row, with its place."""
        return [f"{error.origin.place}: {error}" for error in self.errors]

    def check(self) -> None:
        """Raises ValueError if there are too many; names the first ones and the remedy."""
        allowed = int(self.total * self.max_fraction)
        if len(self.errors) <= allowed:
            return
        first, *following = self.errors
        remedy = f"Mend it ({first.origin.place}), or let a share of such rows be left out: data.max_bad_fraction=0.01."
        if allowed:
            remedy = f"That is more than data.max_bad_fraction={self.max_fraction} of {self.total} rows."
        if following:
            listed = "".join(f"\n  {error}" for error in following[: SHOWN_BAD - 1])
            remedy = f"Of the rows read so far {len(self.errors)} cannot be used. {remedy} The next ones:{listed}"
        raise ValueError(f"{first} {remedy}") from (first.__cause__ or first)


def print_report(sources: Any, used: int, description: str, bad: Sequence[str] = (), overlong: int = 0) -> None:
    """Prints how many rows of `sources` are used, their `description`, and why the `bad` ones are not."""
    names = ", ".join(map(str, [sources] if isinstance(sources, str | Path) else sources))
    print(f"{names}: {used} of {used + len(bad) + overlong} rows\n  {description}")
    if bad:
        print(f"  left out, unusable: {len(bad)} ({'; '.join(bad[:SHOWN])}{'; …' * (len(bad) > SHOWN)})")


def report_overlap(
    trained: Iterable[Sequence[int]], held_out: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Counts the rows of `held_out` whose prompt, as token ids, is that of a trained row too, in a notice."""
    seen = {np.asarray(ids, dtype=np.int32).tobytes() for ids in trained}
    repeated = [row for row, ids in enumerate(held_out) if np.asarray(ids, dtype=np.int32).tobytes() in seen]
    if repeated:
        shown = repr(tokenizer.decode(held_out[repeated[0]], skip_special_tokens=True)[:SHOWN_TEXT])
        notice(
            f"the prompts of {plural(len(repeated), 'row')} of {len(held_out)} in data.val_files are in "
            f"data.train_files too, the first is row {repeated[0]}: {shown}. Take them out of one of the two."
        )


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Joins the texts of a prompt, without a template around them."""
    if isinstance(prompt, str):
        return prompt
    return "".join(message["content"] for message in prompt if isinstance(message.get("content"), str))
