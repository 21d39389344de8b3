"""What became of the rows of a run's data: how many there are, how long, what is left out and why, in a few lines."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.file_formats import BadRow
from data.types import Row

SHOWN = 3  # rows, or values, that are spelt out
SHOWN_BAD = 5  # when they end the run


class BadRows:
    """Rows that cannot be used, of `total`; at most a share of `max_fraction` may be."""

    def __init__(self, total: int, max_fraction: float) -> None:
        self.total, self.allowed = total, int(total * max_fraction)
        self.max_fraction = max_fraction
        self.errors: list[BadRow] = []

    def add(self, error: BadRow) -> None:
        """Raises ValueError as soon as it is clear that there are too many, with a few of them."""
        self.errors.append(error)
        if len(self.errors) >= self.allowed + SHOWN_BAD:
            self.check()

    def said(self) -> list[str]:
        """What is wrong with each."""
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


def print_report(sources: Any, kept: int, details: Iterable[str], left_out: dict[str, list[str]]) -> None:
    """Says what became of the rows of `sources`.

    Args:
        kept: how many of them are.
        details: a line each about these.
        left_out: what is said of each row that is not kept, under the reasons.
    """
    names = ", ".join(map(str, [sources] if isinstance(sources, str | Path) else sources))
    print(f"{names}: {kept} of {kept + sum(map(len, left_out.values()))} rows")
    for detail in details:
        print(f"  {detail}")
    for reason, found in left_out.items():
        if found:
            listed = "; ".join(found[:SHOWN]) + "; …" * (len(found) > SHOWN)
            print(f"  left out, {reason}: {len(found)} ({listed})")


def spread(what: str, lengths: Sequence[int]) -> str:
    """A sentence on how many tokens `what` has: the shortest, the longest and the usual of `lengths`."""
    median, most = np.percentile(lengths, [50, 95]).astype(int)
    return f"{what} of {min(lengths)} to {max(lengths)} tokens, half of them at most {median}, 95 % at most {most}"


def by_source(rows: Sequence[Row], key: str) -> str:
    """How many rows each of the commonest values of the column `key` has."""
    counts = Counter(str(row.get(key) or "unknown") for row in rows).most_common()
    return f"{key}: " + ", ".join(f"{name} {count}" for name, count in counts[:SHOWN]) + ", …" * (len(counts) > SHOWN)


def mixed_labels(rows: Sequence[Row]) -> Iterator[str]:
    """A line if ground truths are of several types: a rule that compares texts fails on the number among them."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[type((row.get("reward_model") or {}).get("ground_truth")).__name__].append(place)
    if len(places) > 1:
        listed = ", ".join(f"{name} {len(found)} (the first is row {found[0]})" for name, found in places.items())
        yield f"ground truths are of several types: {listed}"
