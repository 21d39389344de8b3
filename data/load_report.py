"""What became of the rows of a run's data: how many there are, how long, what is left out and why, in a few lines."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.file_formats import BadRow, Row

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


def report_lines(
    sources: Any, rows: Sequence[Row], lengths: Sequence[int], left_out: dict[str, list[str]], key: str
) -> Iterator[str]:
    """The report, a line at a time.

    Args:
        rows, lengths: those that are kept, and the tokens of their prompts.
        left_out: what is said of each that is not, under the reasons.
        key: the column of data sources.
    """
    names = ", ".join(map(str, [sources] if isinstance(sources, str | Path) else sources))
    total = len(rows) + sum(map(len, left_out.values()))
    yield f"{names}: {len(rows)} of {total} rows"
    median, most = np.percentile(lengths, [50, 95]).astype(int)
    spread = f"prompts of {min(lengths)} to {max(lengths)} tokens, half of them at most {median}, 95 % at most {most}"
    counts = Counter(str(row.get(key) or "unknown") for row in rows).most_common()
    listed = ", ".join(f"{name} {count}" for name, count in counts[:SHOWN]) + ", …" * (len(counts) > SHOWN)
    yield f"  {spread}; {key}: {listed}"
    for reason, found in left_out.items():
        if found:
            yield f"  left out, {reason}: {len(found)} ({'; '.join(found[:SHOWN])}{'; …' * (len(found) > SHOWN)})"
    yield from (f"  {line}" for line in mixed_labels(rows))


def mixed_labels(rows: Sequence[Row]) -> Iterator[str]:
    """A line if ground truths are of several types: a rule that compares texts fails on the number among them."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[type((row.get("reward_model") or {}).get("ground_truth")).__name__].append(place)
    if len(places) > 1:
        listed = ", ".join(f"{name} {len(found)} (the first is row {found[0]})" for name, found in places.items())
        yield f"ground truths are of several types: {listed}"
