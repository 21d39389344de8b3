"""The data set of rows that are many: as `RLHFDataset`, but that a row is made, and encoded, when it is drawn."""

from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.rl_dataset import OverlongPrompt, RLHFDataset
from data.rows import NO_TEXT, Entry, Origin, files_key
from extras.many_rows.parquet_rows import Lazy
from extras.many_rows.prompt_lengths import Lengths, may_be_many


class ManyRows(RLHFDataset):
    """Rows of large parquet files; those left out are the same as of `RLHFDataset`, and so are all messages.

    Rows that may be unusable or too long are read one by one (extras/many_rows/prompt_lengths.py), all others when they
    are drawn. Which ones are left out is kept beside the data, for the next start.
    """

    @staticmethod
    def fitting(data_files: Any, tokenizer: PreTrainedTokenizerBase) -> type[RLHFDataset]:
        """Returns this class for many rows of parquet files and a tokenizer that is fast, else RLHFDataset."""
        files = [data_files] if isinstance(data_files, str | Path) else list(data_files)
        return ManyRows if may_be_many(files, tokenizer) else RLHFDataset

    def _load(self, data_files: Any) -> None:
        """Finds the rows that are left out, and reports on them."""
        limit = self.max_prompt_length if self.filter_overlong_prompts or self.truncation == "error" else inf
        settings = [self.apply_chat_template_kwargs, self.config.ground_truth_key, self.config.reward_fn_key]
        facts = {"keys": [(self.prompt_key,)], "limit": limit, "settings": settings, "empty": NO_TEXT}
        facts |= {"dicts": ("extra_info", "reward_model"), "encode": lambda row: len(self._encode(row, Origin("", 0)))}
        key = files_key(self.data_files, self.config)
        self.lengths = Lengths.fitting(self.data_files, self.tokenizer, key, **facts)
        self.read, positions = self.lengths.rows, self._sampled(len(self.lengths.rows))
        looked_at, known = self.lengths.look(positions), self.lengths.known or {}
        self.too_long = {self.read.origin(each): length for each, length in known.items() if length}
        kept = {entry.origin for entry in self._measure(Lazy(self._entry, looked_at), len(positions))}
        origins = {each: self.read.origin(each) for each in looked_at}
        left_out = {each: self.too_long.get(origin) for each, origin in origins.items() if origin not in kept}
        self.entries = self.lengths.leave_out(left_out, positions, lambda position: self._read(self._entry(position)))
        self._report(data_files)

    @property
    def column_names(self) -> Iterable[str]:
        return self.read.columns

    @property
    def rows(self) -> Lazy:
        return Lazy(lambda position: self._complete(self._entry(position)), self.entries.positions)

    @property
    def prompt_ids(self) -> Lazy:
        return Lazy(lambda position: self._read(self._entry(position)).prompt_ids, self.entries.positions)

    def prompt_ids_like(self, other: RLHFDataset) -> Lazy:  # whatever it has too says the same somewhere
        return self.lengths.like(other.rows, [self.prompt_key], self.prompt_ids)

    def _entry(self, position: int) -> Entry:
        return Entry(*self.read[position])

    def _read(self, entry: Entry) -> Entry:
        """Reads a row; one that is known to be too long is not encoded for it."""
        try:
            if length := self.too_long.get(entry.origin):
                raise OverlongPrompt(entry.origin, length, self.max_prompt_length)
            return super()._read(entry)
        except OverlongPrompt as error:
            self.too_long[error.origin] = error.length
            raise

    def _describe(self) -> str:
        return f"prompts of at most {self.max_prompt_length} tokens"
