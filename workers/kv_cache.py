"""Keys and values of the rows that are generating, written in place.

A row's tokens end at the column that is written next, so that rows of any length step together, and one that joins
late needs no columns of its own: its prompt is laid so as to end there. Rows leave by giving their place to the last
one. The memory is a little wider than what is in use, and is cut to that and widened again when it is full.
transformers sees a cache of full attention; a sliding window is the business of the mask that it makes.
"""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

BLOCK = 64  # columns added when the memory is full


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, [places, heads, columns, d]; the rows of `cache` are its first places."""

    def __init__(self, cache: "RowCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("rows join by RowCache.join, before any forward")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes the new token's [b, heads, 1, d] and returns all that is in use, [b, heads, width + 1, d]."""
        rows, end = len(key_states), self.cache.end
        self.keys[:rows, :, end] = key_states[:, :, 0]
        self.values[:rows, :, end] = value_states[:, :, 0]
        used = slice(self.cache.first, end + 1)
        return self.keys[:rows, :, used], self.values[:rows, :, used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.end - self.cache.first

    def get_max_length(self) -> int:
        return -1

    def resize(self, places: int, columns: int, offset: int) -> None:
        """Memory of this size, with what is in use from column `offset` on."""
        rows, used = len(self.cache), self.get_seq_length()
        for name, old in (("keys", self.keys), ("values", self.values)):
            # Zeros: a masked column adds 0 times its value, and that of memory as it comes may be NaN.
            new = old.new_zeros(places, old.shape[1], columns, old.shape[3])
            new[:rows, :, offset : offset + used] = old[:rows, :, self.cache.first : self.cache.end]
            setattr(self, name, new)


class RowCache(Cache):
    """The rows that are generating. `starts` [b]: the column of each row's first token; `end`: that of the next."""

    def __init__(self, prefilled: DynamicCache) -> None:
        """Without rows; of the layers of `prefilled`."""
        super().__init__(layers=[RowLayer(self) for _ in prefilled.layers])
        for layer, prompts in zip(self.layers, prefilled.layers, strict=True):
            layer.keys, layer.values = prompts.keys[:0, :, :0], prompts.values[:0, :, :0]
            layer.is_initialized = True
        self.starts = torch.empty(0, dtype=torch.long, device=prefilled.layers[0].keys.device)
        self.first, self.end, self.is_ragged = 0, 0, False

    def __len__(self) -> int:
        return len(self.starts)

    def join(self, prefilled: DynamicCache, source: Tensor, lengths: Tensor) -> None:
        """n more rows: the prompts at `source` [n] of `prefilled`, padded on the left, of `lengths` [n] tokens."""
        width, rows, new = prefilled.get_seq_length(), len(self), len(source)
        if rows + new > self.places or width > self.end:
            self._resize(rows + new, offset=max(width - (self.end - self.first), 0))
        for layer, prompts in zip(self.layers, prefilled.layers, strict=True):
            layer.keys[rows : rows + new, :, self.end - width : self.end] = prompts.keys[source]
            layer.values[rows : rows + new, :, self.end - width : self.end] = prompts.values[source]
        self._set_starts(torch.cat([self.starts, self.end - lengths]))

    def leave(self, gone: Tensor) -> Tensor:
        """The rows `gone` [n], ascending, end, and the last fill the gaps. Returns the row now at each place."""
        left = len(self) - len(gone)
        is_mover = torch.ones(len(self) - left, dtype=torch.bool, device=gone.device)
        is_mover[gone[gone >= left] - left] = False
        movers, gaps = left + is_mover.nonzero()[:, 0], gone[gone < left]
        for layer in self.layers if len(gaps) else ():
            for memory in (layer.keys, layer.values):
                memory[gaps, :, self.first : self.end] = memory[movers, :, self.first : self.end]
        order = torch.arange(left, device=gone.device).index_copy(0, gaps, movers)
        self._set_starts(self.starts[order])
        return order

    def step(self) -> tuple[Tensor, Tensor | None]:
        """Makes room for a token of each row: its position [b, 1], and a mask [b, width + 1] if rows are ragged."""
        if self.end == self.columns:
            self._resize(len(self), offset=0)
        mask = None
        if self.is_ragged:
            mask = (torch.arange(self.first, self.end + 1, device=self.starts.device) >= self.starts[:, None]).long()
        return (self.end - self.starts)[:, None], mask

    @property
    def places(self) -> int:
        return self.layers[0].keys.shape[0]

    @property
    def columns(self) -> int:
        return self.layers[0].keys.shape[2]

    def _resize(self, places: int, offset: int) -> None:
        """Room for `places` rows and BLOCK more tokens of each; the columns in use start at `offset`."""
        used = self.end - self.first
        for layer in self.layers:
            layer.resize(places, offset + used + BLOCK, offset)
        self.starts = self.starts - self.first + offset
        self.first, self.end = offset, offset + used

    def _set_starts(self, starts: Tensor) -> None:
        self.starts = starts
        extremes = (int(starts.min()), int(starts.max())) if len(starts) else (self.end, self.end)
        self.first, self.is_ragged = extremes[0], extremes[0] < extremes[1]
