"""Reports on the rows of a run's data: how many are used and why others are not, prompts in both sets, and characters
that the tokenizer does not know."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.checks import plural
from configs.errors import notice
from data.file_formats import BadRow
from data.types import Row

SHOWN = 3  # rows, or values, that are spelt out
SHOWN_BAD = 5  # when they end the run
SHOWN_TEXT = 80  # characters of a prompt that is in both sets
SHOWN_UNKNOWN = 8  # without a token, that a notice spells out


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


def print_report(sources: Any, kept: int, details: Iterable[str], left_out: dict[str, list[str]]) -> None:
    """Prints how many rows of `sources` are used, and why others are not.

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
    """Describes how many tokens `what` has: the shortest, the longest and the usual of `lengths`."""
    median, most = np.percentile(lengths, [50, 95]).astype(int)
    return f"{what} of {min(lengths)} to {max(lengths)} tokens, half of them at most {median}, 95 % at most {most}"


def filled_columns(row: Row) -> str:
    """Lists the columns in which a row has something, but for what a run adds to it."""
    added, empty = ("raw_prompt", "raw_prompt_ids", "index"), ("None", "{}", "{'ground_truth': None}")
    return ", ".join(name for name, value in row.items() if name not in added and str(value) not in empty)


def by_source(rows: Sequence[Row], key: str) -> str:
    """Counts the rows of the commonest values of the column `key`."""
    counts = Counter(str(row.get(key) or "unknown") for row in rows).most_common()
    return f"{key}: " + ", ".join(f"{name} {count}" for name, count in counts[:SHOWN]) + ", …" * (len(counts) > SHOWN)


def mixed_labels(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line if ground truths are of several types: a rule that compares texts fails on a number among them."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        kind = type((row.get("reward_model") or {}).get("ground_truth")).__name__
        places[kind.replace("NoneType", "none")].append(place)
    if len(places) > 1:
        listed = ", ".join(f"{name} {len(found)} (the first is row {found[0]})" for name, found in places.items())
        yield f"ground truths are of several types: {listed}"


def report_overlap(
    trained: Iterable[Sequence[int]], held_out: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Counts the rows of `held_out` whose prompt is that of a trained row too, in a notice with the first, if there are
    any.

    Args:
        trained, held_out: token ids of prompts, a row each, as the model reads them.
    """
    places = shared_prompts(trained, held_out)
    if not places:
        return
    text = tokenizer.decode(held_out[places[0]], skip_special_tokens=True)
    shown = repr(text[:SHOWN_TEXT]) + "…" * (len(text) > SHOWN_TEXT)
    notice(
        f"the prompts of {plural(len(places), 'row')} of {len(held_out)} in data.val_files are in data.train_files "
        f"too, the first is row {places[0]}: {shown}. What validation finds there may be memory: take them out of one "
        "of the two."
    )


def shared_prompts(trained: Iterable[Sequence[int]], held_out: Iterable[Sequence[int]]) -> list[int]:
    """Finds the positions in `held_out` of prompts that `trained` has too."""
    keys = [prompt_key(ids) for ids in held_out]
    unseen = set(keys)
    seen = {own for ids in trained if (own := prompt_key(ids)) in unseen}
    return [place for place, own in enumerate(keys) if own in seen]


def prompt_key(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


def report_unknown_characters(
    texts: Iterable[tuple[str, Sequence[int]]], tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    """Prints a notice that counts and names the characters without a token, if there are any.

    Args:
        texts: each row's text and its token ids.
        source: where the rows come from, for the notice.
    """
    found, rows = unknown_characters(texts, tokenizer)
    if not found:
        return
    spelt = ", ".join(repr(character) for character, _ in found.most_common(SHOWN_UNKNOWN)) + ", …" * (
        len(found) > SHOWN_UNKNOWN
    )
    notice(
        f"{plural(found.total(), 'character')} of {plural(rows, 'row')} of {source} have no token in "
        f"{tokenizer.name_or_path}: {spelt}. The model reads them all as one, or not at all: replace them, or take a "
        "tokenizer that has them."
    )


def unknown_characters(
    texts: Iterable[tuple[str, Sequence[int]]], tokenizer: PreTrainedTokenizerBase
) -> tuple[Counter[str], int]:
    """Counts each character without a token, and the rows that have any.

    Without a token is a character that alone becomes the unknown token, or nothing at all. Where there is an unknown
    token, rows without it are passed over. Spaces that vanish do not count: many tokenizers fold them.
    """
    found, rows = Counter(), 0
    known: dict[str, bool] = {}
    for text, ids in texts:
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id not in ids:
            continue
        characters = set(text)
        known |= {character: has_token(character, tokenizer) for character in characters - known.keys()}
        missing = {character: text.count(character) for character in characters if not known[character]}
        found.update(missing)
        rows += bool(missing)
    return found, rows


def has_token(character: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = tokenizer.encode(character, add_special_tokens=False)
    return tokenizer.unk_token_id not in ids if ids else character.isspace()


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Joins the texts of a prompt, without a template around them."""
    if isinstance(prompt, str):
        return prompt
    return "".join(message["content"] for message in prompt if isinstance(message.get("content"), str))
