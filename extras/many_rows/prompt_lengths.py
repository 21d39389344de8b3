"""Finds the few rows of many that may be unusable or too long, and keeps beside the data which ones are.

A row whose messages have the roles of others is encoded as they are: the template is looked at once for all of them,
with marks in place of what they say. As no tokenizer taken here makes more tokens of a text than it has bytes, most
rows are known to fit by their bytes alone, or by their words; others are encoded in batches, without the template.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import pyarrow
from jinja2 import TemplateError
from rich.progress import track
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from data.chat import BREAK, as_messages, special_tokens
from data.files import append, json_line, read_metrics
from data.rows import read_rows
from data.types import Row
from extras.many_rows.parquet_rows import AT_ONCE, Lazy, ParquetRows, files_of

LEFT_OUT = ".nano_verl_left_out"  # the file, beside the first of the data; it may be deleted
FORMS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}  # normalizers that make ASCII no longer
SPLITS = {"ByteLevel", "Split", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation", "BertPreTokenizer"}
MOST_WORDS = 200_000  # whose tokens are remembered
VERSION = "1"  # of the ways by which rows are left out
SHORTENS = ("strip", "lstrip", "rstrip")
COMPARES = (
    *("__contains__", "startswith", "endswith", "find", "rfind", "index", "count", "split", "rsplit"),
    *("partition", "rpartition", "replace", "removeprefix", "removesuffix"),
)


class Mark(str):
    """A text in place of what a row says, which notes for what others it is searched; None: more is asked of it."""

    def __new__(cls, text: str, asked: set[str | None] | None = None) -> "Mark":
        mark = super().__new__(cls, text)
        mark.asked = set() if asked is None else asked
        return mark

    __hash__ = str.__hash__


def watch(name: str) -> Callable[..., Any]:
    """Makes the method of a Mark that does what that of a text does, and notes it."""

    def method(mark: Mark, *arguments: Any, **options: Any) -> Any:
        first = arguments[0] if arguments else None
        if name in COMPARES:
            mark.asked.update(first if isinstance(first, tuple) else [first])
        elif name in ("__eq__", "__ne__"):
            mark.asked |= {first} if isinstance(first, str) else set()
        elif name not in SHORTENS:
            mark.asked.add(None)
        result = getattr(str, name)(mark, *arguments, **options)
        parts = [Mark(part, mark.asked) for part in result] if isinstance(result, list | tuple) else result
        return Mark(result, mark.asked) if isinstance(result, str) else parts

    return method


for _name in {*dir(str)} - {*dir(object), "__add__", "__len__", "__getnewargs__", "__mod__", "__mul__", "__rmul__"}:
    setattr(Mark, _name, watch(_name))
Mark.__eq__, Mark.__ne__ = watch("__eq__"), watch("__ne__")


class Recipe:
    """Holds what is encoded of rows of one shape: texts around what they say, and the most tokens of those."""

    def __init__(self, encoded: list[str], marks: list[Mark], other: int, tokenizer: PreTrainedTokenizerBase) -> None:
        pattern = re.compile(f"({'|'.join(map(re.escape, marks))})")
        self.texts, self.other = [pattern.split(text) for text in encoded], other
        self.place_of = {str(mark): index for index, mark in enumerate(marks)}
        self.searched = [{text for text in mark.asked if text} for mark in marks]
        around = [special_tokens(tokenizer).subn("", piece) for text in self.texts for piece in text[::2]]
        longest = 1 if all(rest.isascii() for rest, _ in around) else 11  # bytes of one that a normalizer writes
        self.most = other + sum(len(rest.encode()) * longest + count for rest, count in around)

    def compose(self, says: Sequence[str]) -> list[str]:
        """Returns the texts that are encoded of a row."""
        return [
            "".join(says[self.place_of[piece]] if index % 2 else piece for index, piece in enumerate(text))
            for text in self.texts
        ]


# How a row's prompt is built: the columns that say it, the kind of each, and of each message its role and, if that says
# nothing, its content.
Shape = tuple[tuple[str, ...], tuple[type, ...], tuple[tuple[str, str | None], ...]]


def shape_of(row: Row, keys: tuple[str, ...]) -> tuple[Shape, list[str]] | None:
    """Returns the shape of a row, and the texts that it says; None: these are neither texts nor plain messages."""
    values, messages, says = [row.get(key) for key in keys], [], []
    for value in values:
        for message in value if isinstance(value, list) else [{"role": "", "content": value}]:
            role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
            if not isinstance(role, str) or not isinstance(content, str):
                return None
            if len(message) > 2 and any(message[name] is not None for name in message.keys() - {"role", "content"}):
                return None
            messages.append((role, None if content.strip() else content))
            says.append(content)
    says = [content for content, (_, blank) in zip(says, messages, strict=True) if blank is None]
    return (keys, tuple(map(type, values)), tuple(messages)), says


def put_marks(row: Row, keys: Sequence[str], marks: Iterator[Mark]) -> Row:
    """Returns a row with the next of `marks` in place of each text that it says."""

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return next(marks) if value.strip() else value
        return [message | {"content": mark(message["content"])} for message in value]

    return row | {key: mark(row[key]) for key in keys}


class Words(dict):
    """Bounds the tokens of ASCII texts by those of their words, each with the single space before it, where a tokenizer
    cuts a text at such spaces before it makes tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.backend, self.added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder.values()

    @cached_property
    def cuts_at_spaces(self) -> bool:
        cut, ends = self.backend.pre_tokenizer, [*map(chr, range(33, 127))]
        if cut is None or any(" " in token.content or token.lstrip or token.rstrip for token in self.added):
            return False  # or one takes a space with it
        pairs = (cut.pre_tokenize_str(f"{last} {first}") for last in ends for first in ends)
        return all(any(start == 1 for _, (start, _) in parts) for parts in pairs)

    def __missing__(self, word: str) -> int:
        if len(self) >= MOST_WORDS:
            self.clear()
        count = self[word] = len(self.backend.encode(word, add_special_tokens=False).ids)
        return count

    def most_tokens(self, text: str) -> float:
        """Returns a number of tokens that a text does not exceed."""
        if not text.isascii() or not self.cuts_at_spaces:
            return inf
        first, *rest = text.split(" ")
        return self[first] + sum(self[f" {word}"] for word in rest)


class Lengths:
    """Sorts out which of many rows have to be looked at one by one.

    Args:
        keys: columns that say what is encoded; the first of these whose first is filled.
        encode: counts the tokens of a row, or raises ValueError.
        limit: the most tokens of a row.
        settings: what else decides which rows are left out.
        dicts, empty: columns that can make a row unusable, unless they hold dictionaries, or nothing.
    """

    def __init__(
        self,
        rows: ParquetRows,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keys: Sequence[tuple[str, ...]],
        encode: Callable[[Row], int],
        limit: float,
        settings: Any,
        dicts: Sequence[str] = (),
        empty: Sequence[str] = (),
    ) -> None:
        self.rows, self.tokenizer, self.keys, self.encode, self.limit = rows, tokenizer, keys, encode, limit
        self.dicts, self.empty = dicts, empty
        state = tokenizer.backend_tokenizer.to_str()
        self.bound = bound_of(tokenizer.backend_tokenizer)
        self.words = Words(tokenizer)
        self.writes_all = {*ByteLevel.alphabet()} <= tokenizer.get_vocab().keys()
        parts = [VERSION, type(tokenizer).__name__, state, str(tokenizer.chat_template), *rows.digests()]
        parts += [str(tokenizer.special_tokens_map), json.dumps([keys, limit, settings], default=str)]
        self.identity = "\0".join(parts).encode()
        self.file = rows.files[0][1].with_name(LEFT_OUT)
        self.known: dict[int, int | None] | None = None  # rows that an earlier start left out: their lengths
        self.recipes: dict[Shape, Recipe | None] = {}

    @classmethod
    def fitting(
        cls, data_files: Sequence[Any], tokenizer: PreTrainedTokenizerBase, key: str, **facts: Any
    ) -> "Lengths | None":
        """Opens the rows of parquet files, which the setting `key` names, if they are many; None: others read them."""
        if not may_be_many(data_files, tokenizer):
            return None
        try:
            return cls(ParquetRows(files_of(data_files)), tokenizer, **facts)
        except (OSError, ValueError, pyarrow.ArrowException):
            read_rows(data_files, [], key)  # says what is wrong
            raise

    def look(self, positions: Sequence[int]) -> list[int]:
        """Lists the positions of rows that have to be looked at: those that an earlier start left out, or that may be
        unusable or too long, in order."""
        self.identity = hashlib.sha256(self.identity + np.asarray(positions).tobytes()).hexdigest()
        with suppress(OSError, ValueError):
            for entry in read_metrics(self.file):
                match entry:
                    case {"identity": self.identity, "columns": [*columns], "left_out": {**left_out}}:
                        self.rows.columns = dict.fromkeys(columns)
                        self.known = {int(position): length for position, length in left_out.items()}
                        return [*self.known]
        return self._look_through(positions)

    def leave_out(self, left_out: dict[int, int | None], positions: Sequence[int], make: Callable[[int], Any]) -> Lazy:
        """Returns what `make` makes of the other rows; writes down which are left out, where the folder allows it."""
        if self.known is None:
            entry = {"identity": self.identity, "columns": [*self.rows.columns], "left_out": left_out}
            with suppress(OSError):
                append(self.file, b"\n" + json_line(entry), to_disk=False)
        positions = np.asarray(positions)
        return Lazy(make, positions[~np.isin(positions, [*left_out])])

    def like(self, rows: Iterable[Row], keys: Sequence[str], made: Lazy) -> Lazy:
        """Returns those of the rows `made` that say something which one of `rows` says in one of the columns `keys`."""
        prompts = (as_messages(row[key]) for row in rows for key in keys if row.get(key))
        messages = [message for prompt in prompts for message in prompt if message["role"] != "system"]
        texts = {message["content"] for message in messages if isinstance(message.get("content"), str)}
        return Lazy(made.make, np.intersect1d(self.rows.positions_with(texts, *keys, "messages"), made.positions))

    def _look_through(self, positions: Sequence[int]) -> list[int]:
        chosen, doubtful, waiting = np.zeros(len(self.rows), dtype=bool), set(), []
        chosen[positions] = True
        plain = np.repeat([*map(self._is_plain, self.rows.tables)], np.diff(self.rows.starts))
        rows = self.rows.look_through([key for keys in self.keys for key in keys])
        for position, row in enumerate(track(rows, "measuring prompts", total=len(self.rows))):
            verdict = not chosen[position] or (plain[position] and self._fits(position, row))
            if isinstance(verdict, tuple):
                waiting.append((position, *verdict))
            elif not verdict:
                doubtful.add(position)
            if len(waiting) >= AT_ONCE:
                doubtful |= self._longer(waiting)
                waiting = []
        doubtful |= self._longer(waiting)
        return [int(position) for position in positions if position in doubtful]

    def _is_plain(self, table: pyarrow.Table) -> bool:
        """Says whether the columns beside the prompt cannot make a row unusable."""
        types = dict(zip(table.column_names, table.schema.types, strict=True))
        kinds = [types[name] for name in self.dicts if name in types]
        dicts = all(pyarrow.types.is_struct(kind) or pyarrow.types.is_null(kind) for kind in kinds)
        return dicts and all(table[name].null_count == table.num_rows for name in self.empty if name in types)

    def _fits(self, position: int, row: Row) -> bool | tuple[int, list[str]]:
        """Says whether a row fits by its bytes, or that it has to be looked at; or what is to be counted for that."""
        keys = next((keys for keys in self.keys if row.get(keys[0]) is not None), self.keys[-1])
        if (built := shape_of(row, keys)) is None:
            return False
        shape, says = built
        if shape not in self.recipes:
            self.recipes[shape] = self._recipe(position, shape)
        if (recipe := self.recipes[shape]) is None or any(
            text in content for content, texts in zip(says, recipe.searched, strict=True) for text in texts
        ):
            return False
        writes = recipe.most > 0 or self.writes_all  # others may drop what they do not know, and leave nothing
        is_bound = writes and (self.bound == "bytes" or (self.bound == "ascii" and all(map(str.isascii, says))))
        most = recipe.most + sum(len(content.encode()) for content in says) if is_bound else inf
        if most <= self.limit and (is_bound or writes):
            return True
        if any(BREAK in content or special_tokens(self.tokenizer).search(content) for content in says):
            return False  # it is encoded as the text that it is
        texts, stripped = recipe.compose(says), [content.strip() for content in says]
        ways = [texts, *([recipe.compose(stripped)] if stripped != says else [])]  # as templates write it
        if is_bound and all(recipe.other + sum(map(self.words.most_tokens, way)) <= self.limit for way in ways):
            return True
        return (recipe.other, texts) if len(ways) == 1 else False

    def _recipe(self, position: int, shape: Shape) -> Recipe | None:
        """Looks at how rows like the one at `position` are encoded; None: that depends on more than their shape."""
        keys, _, messages = shape
        roles = [role for role, blank in messages if blank is None]
        marks = [Mark(f"Mark{index}z \"'<&>\\\n{index}Z") for index in range(len(roles))]
        encode, encoded = self.tokenizer.encode, []
        self.tokenizer.encode = lambda text, **kwargs: encoded.append(text) or encode(text, **kwargs)
        try:
            count = self.encode(put_marks(self.rows[position][1], keys, iter(marks)))
        except (ValueError, TypeError, TemplateError):
            return None
        finally:
            del self.tokenizer.encode
        encoded = encoded or [*marks]  # a text is encoded as it is
        text = "\0".join(encoded)
        if not marks or any(text.count(mark) != 1 for mark in marks):
            return None
        if any(asked is None or asked in str(mark) for mark in marks for asked in mark.asked if asked != ""):
            return None
        alone = {*map(str, encoded)}
        for role, mark in zip(roles, marks, strict=True):  # thoughts, as data/chat.py cuts them out; a list as a text
            is_shown = role == "assistant" and str(mark) not in alone
            mark.asked |= {"think>"} if is_shown else {"[{"} if not role else set()
        other = count - sum(len(encode(text, add_special_tokens=False)) for text in encoded)
        return Recipe(encoded, marks, other, self.tokenizer)

    def _longer(self, waiting: list[tuple[int, int, list[str]]]) -> set[int]:
        """Returns the rows, of those `waiting`, that have more tokens than `limit`, or none."""
        texts = [text for _, _, texts in waiting for text in texts]
        with all_threads():
            counts = iter(
                [*map(len, self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False))]
            )
        lengths = [(position, other + sum(next(counts) for _ in texts)) for position, other, texts in waiting]
        return {position for position, length in lengths if not 0 < length <= self.limit}


def may_be_many(data_files: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Says whether files hold many rows, and a tokenizer counts their tokens in batches, as it reads text alone."""
    return tokenizer.is_fast and vars(tokenizer).get("images") is None and bool(files_of(data_files))


def bound_of(backend: Tokenizer) -> str:
    """Says of which texts a tokenizer makes at most one token a byte: any ("bytes"), "ascii", or none ("")."""
    normalizer, splitter = (
        json.loads(part.__getstate__()) if part else {} for part in (backend.normalizer, backend.pre_tokenizer)
    )
    normalizers = normalizer.get("normalizers", [normalizer] if normalizer else [])
    splitters = splitter.get("pretokenizers", [splitter] if splitter else [])
    if not {each["type"] for each in normalizers} <= FORMS or not {each["type"] for each in splitters} <= SPLITS:
        return ""
    if any(each.get("add_prefix_space") for each in splitters):
        return ""
    return "ascii" if normalizers else "bytes"


@contextmanager
def all_threads() -> Iterator[None]:
    """Lets tokenizers use all threads, which a run forbids them otherwise (configs/process.py)."""
    before = os.environ.get("TOKENIZERS_PARALLELISM", "false")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before
