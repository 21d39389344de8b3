"""Says of the rows of a run's data how many are used and why others are not, and which prompts are in both sets."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.checks import plural
from configs.errors import notice
from data.file_formats import BadRow
from data.types import Row

SHOWN, SHOWN_BAD = 3, 5  # rows that are spelt out: of those left out, of those that end the run
SHOWN_TEXT = 80  # characters of a prompt that is in both sets


class BadRows:
    """Rows that cannot be used, of `total`, first the `unread`; at most a share of `max_fraction` may be."""

    def __init__(self, total: int, max_fraction: float, unread: Iterable[BadRow] = ()) -> None:
        self.total, self.allowed = total, int(total * max_fraction)
        self.max_fraction = max_fraction
        self.errors: list[BadRow] = []
        for error in unread:
            self.add(error)

    def add(self, error: BadRow) -> None:
        """Raises ValueError as soon as it is clear that there are too many, with a few of them."""
        self.errors.append(error)
        if len(self.errors) >= self.allowed + SHOWN_BAD:
            self.check()

    def describe(self) -> list[str]:
        """Describes each bad row, with its place."""
        return [f"{error.origin.place}: {error}" for error in self.errors]

    def check(self) -> None:
        """Raises ValueError if there are too many; names the first ones and the remedy."""
        if len(self.errors) <= self.allowed and len(self.errors) < self.total:
            return
        first, *others = self.errors
        remedy = f"Mend it ({first.origin.place}), or let a share of such rows be left out: data.max_bad_fraction=0.01."
        if self.allowed:
            remedy = f"That is more than data.max_bad_fraction={self.max_fraction} of {self.total} rows."
        if others:
            listed = "".join(f"\n  {error}" for error in others[: SHOWN_BAD - 1])
            remedy = f"Of the rows read so far {len(self.errors)} cannot be used. {remedy} The next ones:{listed}"
        raise ValueError(f"{first} {remedy}") from (first.__cause__ or first)


def print_report(sources: Any, kept: int, about: str, left_out: dict[str, list[str]]) -> None:
    """Prints how many rows of `sources` are used, what they are `about`, and why others are not: words for each row."""
    names = ", ".join(map(str, [sources] if isinstance(sources, str | Path) else sources))
    print(f"{names}: {kept} of {kept + sum(map(len, left_out.values()))} rows\n  {about}")
    for reason, found in left_out.items():
        if found:
            listed = "; ".join(found[:SHOWN]) + "; …" * (len(found) > SHOWN)
            print(f"  left out, {reason}: {len(found)} ({listed})")


def filled_columns(row: Row) -> str:
    """Lists the columns in which a row has something, but for what a run adds to it."""
    added, empty = ("raw_prompt", "raw_prompt_ids", "index"), ("None", "{}", "{'ground_truth': None}")
    return ", ".join(name for name, value in row.items() if name not in added and str(value) not in empty)


def report_overlap(
    trained: Iterable[Sequence[int]], held_out: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Counts the rows of `held_out` whose prompt, as token ids, is that of a trained row too, in a notice."""
    places = shared_prompts(trained, held_out)
    if places:
        shown = repr(tokenizer.decode(held_out[places[0]], skip_special_tokens=True)[:SHOWN_TEXT])
        notice(
            f"the prompts of {plural(len(places), 'row')} of {len(held_out)} in data.val_files are in data.train_files "
            f"too, the first is row {places[0]}: {shown}. Take them out of one of the two."
        )


def shared_prompts(trained: Iterable[Sequence[int]], held_out: Iterable[Sequence[int]]) -> list[int]:
    """Finds the positions in `held_out` of prompts that `trained` has too."""
    seen = {np.asarray(ids, dtype=np.int32).tobytes() for ids in trained}
    return [place for place, ids in enumerate(held_out) if np.asarray(ids, dtype=np.int32).tobytes() in seen]


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Joins the texts of a prompt, without a template around them."""
    if isinstance(prompt, str):
        return prompt
    return "".join(message["content"] for message in prompt if isinstance(message.get("content"), str))
