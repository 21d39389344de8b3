"""Rows that keep their prompts to themselves, for models whose attention cannot share them or that keep more than keys
and values: slower than the shared ones, and as general as transformers.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from workers.hf.batch import RunningBatch, last_logits, pad_left, positions_of
from workers.hf.turn_cache import CachedPrefix


@dataclass
class Rows:
    """Rows that joined together: `ids` of their tokens so far, padded on the left, and `mask`, which of them are real,
    [b, w]; what the model keeps of the first `seen` columns, if it keeps anything."""

    ids: Tensor
    mask: Tensor
    cache: Cache | None
    seen: int = 0

    def select(self, places: Tensor) -> "Rows":
        """Returns the rows at `places` [n], which may repeat; the old ones may not be used any more."""
        if self.cache is not None:
            self.cache.reorder_cache(places)
        return replace(self, ids=self.ids[places], mask=self.mask[places])

    def append(self, tokens: Tensor) -> None:
        """Another token of each, [b, 1]."""
        self.ids = torch.cat([self.ids, tokens], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(tokens)], dim=1)


class SeparateRows(RunningBatch):
    """Rows in caches as transformers makes them for the model: with keys and values, with states, or with both. Those
    that joined together have one cache, so that a step is a forward of each such part."""

    COST = "each row keeps a prompt of its own"
    caches: ClassVar[bool] = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts: list[Rows] = []  # in the order of `alive`

    def _prefill(self, prompts: list[tuple[int, ...]], begun: list[CachedPrefix]) -> tuple[Rows, Tensor]:
        cache = DynamicCache(config=self.module.config) if self.caches else None
        rows = Rows(*pad_left(prompts, self.pad_token_id, self.module.device), cache)
        return rows, self._logits(rows)

    def _keep(self, prefilled: Rows, lengths: Tensor, source: Tensor, max_tokens: int) -> None:
        self.parts.append(prefilled.select(source))

    def _forward(self) -> Tensor:
        sizes = [len(part.ids) for part in self.parts]
        for part, last in zip(self.parts, self.slots.last_tokens(self.alive).split(sizes), strict=True):
            part.append(last)
        return torch.cat([self._logits(part) for part in self.parts])

    def _forget(self, gone: Tensor) -> Tensor:
        stays = torch.ones(len(self), dtype=torch.bool, device=gone.device)
        stays[gone] = False
        parts = zip(self.parts, stays.split([len(part.ids) for part in self.parts]), strict=True)
        self.parts = [part if kept.all() else part.select(kept.nonzero()[:, 0]) for part, kept in parts if kept.any()]
        return stays.nonzero()[:, 0]

    def _logits(self, rows: Rows) -> Tensor:
        """Returns logits after the last token of each, [b, V]; what the cache has not seen goes through the model."""
        new = slice(rows.seen, None)
        if self.caches:
            rows.seen = rows.ids.shape[1]
        return last_logits(self.module, rows.ids[:, new], positions_of(rows.mask)[:, new], rows.mask, rows.cache)


class NoCacheBatch(SeparateRows):
    """Rows of which the model keeps nothing: each token costs a forward of all before it. As slow as it is general."""

    COST = "each token costs a forward of all before it"
    caches = False
