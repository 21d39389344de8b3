"""Rows of all sources of a run, under one set of names.

The names of columns are brought to verl's where rows spell them differently; what a column holds is left to datasets.
"""

import json
import reprlib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from configs.loader import notice
from data.file_formats import BadRow, Origin
from data.sources import read_source
from data.types import Row

# What the run itself fills in a batch; "dataset_position" is the row's place in the dataset.
RUN_COLUMNS = frozenset((
    "uid", "dataset_position", "prompts", "responses", "ground_truths", "input_ids", "attention_mask", "position_ids",
    "response_mask", "rollout_log_probs", "end_reason", "token_level_scores", "token_level_rewards", "old_log_probs",
    "ref_log_prob", "values", "advantages", "returns", "loss_mask", "entropys", "sum_pi_squared", "reward_baselines",
    "rollout_is_weights", "drawn_row", "turn_ids", "episode", "episode_return", "success", "invalid_actions", "failure",
    "__num_turns__", "tool_call_counts", "tool_failures",
    "tool_rewards", "turn_scores", "reset_seed", "reward_outcome", "reward_results",
))  # fmt: skip


def read_rows(
    data_files: str | Path | Iterable[str | Path], bad: list[BadRow] | None = None
) -> list[tuple[Origin, Row]]:
    """All rows of one or several sources (data/sources.py), as plain python objects, in order.

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
    """`row` with `prompt` and `response`, where it spells them differently."""
    row = dict(row)
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
        case {"messages": prompt}:
            row["prompt"] = prompt
    return row


def own_names(row: Row) -> Row:
    """`row` with those of its columns that are called like one of `RUN_COLUMNS` under the name dataset_…."""
    taken = row.keys() & RUN_COLUMNS
    for name in sorted(taken):
        _say_renamed(name)
    return {f"dataset_{name}" if name in taken else name: value for name, value in row.items()} if taken else row


@cache
def _say_renamed(name: str) -> None:
    notice(f"the run has a column {name!r} of its own: that of the data is called 'dataset_{name}' in batches.")


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
