"""The memory of the rows that are generating: their keys and values.

The keys and values of a prompt are stored once, for all rows that answer it; each row's own are written in place and
end at the column that is written next, so that rows which joined at different times step together. When a row leaves,
the last one takes its place; new prompts take the places of prompts that no row answers any more. The host knows all
these places, as no step may wait for the device. Attention to such a cache is in decode.py.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from workers.hf_rollout import device_tensor

BLOCK = 64  # columns added when the memory is full
GROWTH = 1 / 8  # of the places of prompts, at least, when others join while these are answered


class RowLayer(CacheLayerMixin):
    """One layer's keys and values: `prompt_keys` and `prompt_values` [prompts, heads, P, d], padded on the left; `keys`
    and `values` [places, heads, columns, d], whose first places are the rows of `cache`."""

    def __init__(self, cache: "RowCache", like: CacheLayerMixin) -> None:
        """Makes a layer without rows, with the heads and widths of `like`."""
        super().__init__()
        self.cache = cache
        self.prompt_keys, self.prompt_values = like.keys[:0, :, :0], like.values[:0, :, :0]
        self.keys, self.values = self.prompt_keys, self.prompt_values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("rows join by RowCache.join, before any forward")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes the new tokens, [b, heads, 1, d]. Returns all of the rows' own tokens, [b, heads, width + 1, d]."""
        rows, end = len(key_states), self.cache.end
        self.keys[:rows, :, end] = key_states[:, :, 0]
        self.values[:rows, :, end] = value_states[:, :, 0]
        used = slice(self.cache.first, end + 1)
        return self.keys[:rows, :, used], self.values[:rows, :, used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.prompt_keys.shape[2] + self.cache.end - self.cache.first

    def get_max_length(self) -> int:
        return -1

    def resize(self, places: int, columns: int) -> None:
        """Resizes the memory of the rows' own tokens; the columns in use then begin at 0."""
        rows, used = len(self.cache), slice(self.cache.first, self.cache.end)
        for name, old in (("keys", self.keys), ("values", self.values)):
            new = old.new_zeros(places, old.shape[1], columns, old.shape[3])
            new[:rows, :, : self.cache.end - self.cache.first] = old[:rows, :, used]
            setattr(self, name, new)

    def clear(self, rows: slice) -> None:
        """Writes zeros to the columns in use of these places: a masked column adds 0 times its value, and fresh memory
        may hold NaN."""
        for memory in (self.keys, self.values):
            memory[rows, :, self.cache.first : self.cache.end] = 0

    def put_prompts(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes prompts, [n, heads, p, d]; the memory must be wide enough."""
        for memory, new in ((self.prompt_keys, keys), (self.prompt_values, values)):
            memory[places, :, memory.shape[2] - new.shape[2] :] = new

    def resize_prompts(self, indices: Tensor, places: int, width: int) -> None:
        """Makes room for `places` prompts of this width, first those at `indices`, of which no column in use is cut."""
        for name, old in (("prompt_keys", self.prompt_keys), ("prompt_values", self.prompt_values)):
            new, used = old.new_zeros(places, old.shape[1], width, old.shape[3]), min(width, old.shape[2])
            new[: len(indices), :, width - used :] = old[indices, :, old.shape[2] - used :]
            setattr(self, name, new)


class RowCache(Cache):
    """The b rows that are generating.

    On the host: `prompt_of_row` [b], at which place the prompt is that a row answers; `lengths` [places of prompts] of
    prompts, in tokens; `starts` [b], the column of each row's first own token; `end`, that of the next. On the device:
    `positions` [b, 1] of the next tokens.
    """

    def __init__(self, prefilled: DynamicCache) -> None:
        """Makes a cache without rows, with the layers of `prefilled`."""
        super().__init__(layers=[RowLayer(self, layer) for layer in prefilled.layers])
        self.device = prefilled.layers[0].keys.device
        self.max_tokens = 0  # that a row may get
        self._masks: dict[int | None, Tensor | None] = {}  # of this step, by window
        none = np.zeros(0, dtype=np.int64)
        self.lengths, self.end = none, 0
        self._set_rows(none, starts=none)

    def __len__(self) -> int:
        return len(self.starts)

    def join(self, prefilled: DynamicCache, lengths: Sequence[int], source: Sequence[int], max_tokens: int) -> None:
        """Adds n rows of at most `max_tokens` own tokens, which answer the prompts `source` [n] of `prefilled`;
        `lengths` are those of its prompts."""
        self.max_tokens = max(self.max_tokens, max_tokens)
        answered, new_places = np.unique(np.array(source), return_inverse=True)
        new_lengths = np.array(lengths)[answered]
        width = int(new_lengths.max())
        if len(answered) > len(self._unanswered) or width > self.prompt_width:
            self._resize_prompts(len(answered), width)
        places = self._unanswered[: len(answered)]
        sources, targets = device_tensor(answered, self.device), device_tensor(places, self.device)
        for layer, prompts in zip(self.layers, prefilled.layers, strict=True):
            layer.put_prompts(targets, prompts.keys[sources, :, -width:], prompts.values[sources, :, -width:])
        prompt_of_row = np.concatenate([self.prompt_of_row, places[new_places]])
        self.lengths[places] = new_lengths
        if len(prompt_of_row) > self.places:
            self._resize(len(prompt_of_row))
        for layer in self.layers:
            layer.clear(slice(len(self), len(prompt_of_row)))
        self._set_rows(prompt_of_row, np.concatenate([self.starts, np.full_like(source, self.end)]))

    def leave(self, gone: Sequence[int]) -> list[int]:
        """Ends the rows `gone` [n], ascending; the last rows fill the gaps. Returns the row now at each place."""
        left, ended = len(self) - len(gone), set(gone)
        movers, gaps = [row for row in range(left, len(self)) if row not in ended], [row for row in gone if row < left]
        if gaps:
            to, moved = device_tensor(gaps, self.device), device_tensor(movers, self.device)
            for layer in self.layers:
                for memory in (layer.keys, layer.values):
                    memory[to, :, self.first : self.end] = memory[moved, :, self.first : self.end]
        order = np.arange(left)
        order[gaps] = movers
        self._set_rows(self.prompt_of_row[order], self.starts[order])
        answered = len(self.lengths) - len(self._unanswered)
        if 2 * answered <= len(self.lengths) > answered:
            self._resize_prompts(0, 0)
        return order.tolist()

    def row_layers(self, place: int) -> list[tuple[Tensor, Tensor]]:
        """Returns a row's keys and values, of its prompt and its own tokens: [tokens, heads, d] for each layer."""
        prompt = int(self.prompt_of_row[place])
        of_prompt = slice(self.prompt_width - int(self.lengths[prompt]), None)
        of_row = slice(int(self.starts[place]), self.end)

        def concat(prompts: Tensor, rows: Tensor) -> Tensor:
            return torch.cat([prompts[prompt, :, of_prompt], rows[place, :, of_row]], dim=1).transpose(0, 1)

        return [
            (concat(layer.prompt_keys, layer.keys), concat(layer.prompt_values, layer.values)) for layer in self.layers
        ]

    def make_room(self) -> None:
        """Makes room for another token of each row."""
        if self.end == self.columns:
            self._resize(len(self))
        self._masks = {}

    def advance(self) -> None:
        """Counts one more token of each row, after every layer has stored it."""
        self.end += 1
        self.positions += 1

    def mask(self, window: int | None) -> Tensor | None:
        """Returns the keys that the next tokens attend to, [b, P + width + 1] bool: prompts' columns, then the rows'.

        None: all of them. `window`: how far back they see, themselves included, if that is limited.
        """
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        window = window if window and window <= self.layers[0].get_seq_length() else None
        if not self._is_ragged and not window:
            return None
        prompt_columns = torch.arange(self.prompt_width, device=self.device) - self.prompt_width
        row_columns = torch.arange(self.first - self.end, 1, device=self.device)  # counted from the newest
        lengths = self._row_lengths[:, None]
        positions = torch.cat([lengths + prompt_columns, self.positions + row_columns], dim=1)
        attended = torch.cat([lengths + prompt_columns >= 0, self.positions + row_columns >= lengths], dim=1)
        return attended & (self.positions - positions < window) if window else attended

    def by_prompt(self, rows: Tensor) -> Tensor:
        """[b, heads, s, x] → [prompts, heads, g·s, x]: beside each other what answers one prompt, of at most g rows."""
        prompts, most = self._members.shape
        if not self._is_in_order:
            rows = rows[self._members.flatten()]
        return rows.unflatten(0, (prompts, most)).transpose(1, 2).flatten(2, 3)

    def by_row(self, grouped: Tensor) -> Tensor:
        """Undoes `by_prompt`: [prompts, heads, g·s, x] → [b, heads, s, x]."""
        rows = grouped.unflatten(2, (self._members.shape[1], -1)).transpose(1, 2).flatten(0, 1)
        return rows if self._is_in_order else rows[self._slots]

    @property
    def prompt_width(self) -> int:
        return self.layers[0].prompt_keys.shape[2]

    @property
    def places(self) -> int:
        return self.layers[0].keys.shape[0]

    @property
    def columns(self) -> int:
        return self.layers[0].keys.shape[2]

    def _resize(self, places: int) -> None:
        """Makes room for the own tokens of `places` rows, and for up to BLOCK more of each."""
        used = self.end - self.first
        for layer in self.layers:
            layer.resize(places, min(used + BLOCK, self.max_tokens))
        self.end, starts = used, self.starts - self.first
        self._set_rows(self.prompt_of_row, starts)

    def _set_rows(self, prompt_of_row: np.ndarray, starts: np.ndarray) -> None:
        self.prompt_of_row, self.starts = prompt_of_row, starts
        self.first = int(starts.min()) if len(starts) else self.end
        rows_of_prompt = np.bincount(prompt_of_row, minlength=len(self.lengths))
        self._unanswered = np.flatnonzero(rows_of_prompt == 0)
        most = int(rows_of_prompt.max()) if len(starts) else 0
        order = prompt_of_row.argsort(kind="stable")
        firsts = rows_of_prompt.cumsum() - rows_of_prompt  # of each prompt, in `order`
        slots = np.empty_like(order)
        slots[order] = prompt_of_row[order] * most + np.arange(len(order)) - firsts[prompt_of_row[order]]
        members = np.zeros(len(self.lengths) * most, dtype=np.int64)
        members[slots] = np.arange(len(slots))
        self._is_in_order = np.array_equal(slots, np.arange(len(members)))
        lengths = self.lengths[prompt_of_row]
        self._is_ragged = bool((starts != self.first).any() or (lengths != self.prompt_width).any())
        self._members = device_tensor(members.reshape(len(self.lengths), most), self.device)
        self._slots, self._row_lengths = device_tensor(slots, self.device), device_tensor(lengths, self.device)
        self.positions = device_tensor((lengths + self.end - starts)[:, None], self.device)

    def _resize_prompts(self, more: int, width: int) -> None:
        """Makes room for the prompts that rows answer, and for `more` of this width; other prompts are dropped.

        If prompts join while others are answered, it grows by more than they need, as further ones may follow.
        """
        answered, prompt_of_row = np.unique(self.prompt_of_row, return_inverse=True)
        lengths = self.lengths[answered]
        if more and len(answered):
            more = max(more, int(GROWTH * len(answered)))
            width += BLOCK if width > self.prompt_width else 0
        width = max([width, *lengths.tolist()])
        places = device_tensor(answered, self.device)
        for layer in self.layers:
            layer.resize_prompts(places, len(answered) + more, width)
        self.lengths = np.concatenate([lengths, np.zeros(more, dtype=np.int64)])
        self._set_rows(prompt_of_row, self.starts)
