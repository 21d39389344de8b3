"""The memory of the rows that are generating: their keys and values (`RowCache`), and their tokens (`Slots`).

The keys and values of a prompt are kept once, for all rows that answer it; each row's own are written in place. A row's
own tokens end at the column that is written next, so that rows which joined at different times step together. Rows
leave by giving their place to the last one, and prompts that join take the places of those that no row answers any
more. Both memories are a little larger than what is in use, and are cut to that and enlarged again when they are full.
Attention to such a cache is in workers/kernels/.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from data.types import Request, SamplingParams

BLOCK = 64  # columns added when the memory is full
GROWTH = 1 / 8  # of the places of prompts, at least, when others join while these are answered


class RowLayer(CacheLayerMixin):
    """One layer's keys and values: `prompt_keys` and `prompt_values` [prompts, heads, P, d], padded on the left; `keys`
    and `values` [places, heads, columns, d], whose first places are the rows of `cache`."""

    def __init__(self, cache: "RowCache", like: CacheLayerMixin) -> None:
        """Without rows; its heads and their widths are those of `like`."""
        super().__init__()
        self.cache = cache
        self.prompt_keys, self.prompt_values = like.keys[:0, :, :0], like.values[:0, :, :0]
        self.keys, self.values = self.prompt_keys, self.prompt_values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("rows join by RowCache.join, before any forward")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes the new token's [b, heads, 1, d]. Returns all of the rows' own, [b, heads, width + 1, d]."""
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
        """Memory of this size for own tokens, with what is in use from column 0 on."""
        rows, used = len(self.cache), slice(self.cache.first, self.cache.end)
        for name, old in (("keys", self.keys), ("values", self.values)):
            new = old.new_empty(places, old.shape[1], columns, old.shape[3])
            new[:rows, :, : self.cache.end - self.cache.first] = old[:rows, :, used]
            setattr(self, name, new)

    def clear(self, rows: slice) -> None:
        """Zeros in what is in use of these places: a masked column adds 0 times its value, and that of memory as it
        comes may be NaN."""
        for memory in (self.keys, self.values):
            memory[rows, :, self.cache.first : self.cache.end] = 0

    def put_prompts(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes prompts, [n, heads, p, d], which the memory has to be wide enough for."""
        for memory, new in ((self.prompt_keys, keys), (self.prompt_values, values)):
            memory[places, :, memory.shape[2] - new.shape[2] :] = new

    def resize_prompts(self, kept: Tensor, places: int, width: int) -> None:
        """Memory of this size for prompts, of which the first are those at `kept`; of these no column in use is cut."""
        for name, old in (("prompt_keys", self.prompt_keys), ("prompt_values", self.prompt_values)):
            new, used = old.new_zeros(places, old.shape[1], width, old.shape[3]), min(width, old.shape[2])
            new[: len(kept), :, width - used :] = old[kept, :, old.shape[2] - used :]
            setattr(self, name, new)


class RowCache(Cache):
    """The b rows that are generating.

    `prompt_of_row` [b]: at which place the prompt is that a row answers; `lengths` [places of prompts]: their tokens;
    `starts` [b]: the column of each row's first own token; `end`: that of the next.
    """

    def __init__(self, prefilled: DynamicCache) -> None:
        """Without rows; of the layers of `prefilled`."""
        super().__init__(layers=[RowLayer(self, layer) for layer in prefilled.layers])
        self.max_tokens = 0  # that a row may get
        self._masks: dict[int | None, Tensor | None] = {}  # of this step, by window
        none = torch.empty(0, dtype=torch.long, device=prefilled.layers[0].keys.device)
        self.lengths, self.end = none, 0
        self._set_rows(none, starts=none)

    def __len__(self) -> int:
        return len(self.starts)

    def join(self, prefilled: DynamicCache, lengths: Tensor, source: Tensor, max_tokens: int) -> None:
        """n more rows of at most `max_tokens` own ones, which answer the prompts `source` [n] of `prefilled`; `lengths`
        are those of its prompts."""
        self.max_tokens = max(self.max_tokens, max_tokens)
        answered, new_places = source.unique(return_inverse=True)
        width = int(lengths[answered].max())
        places = self._places_for(len(answered), width)
        for layer, prompts in zip(self.layers, prefilled.layers, strict=True):
            layer.put_prompts(places, prompts.keys[answered, :, -width:], prompts.values[answered, :, -width:])
        prompt_of_row = torch.cat([self.prompt_of_row, places[new_places]])
        self.lengths = self.lengths.index_copy(0, places, lengths[answered])
        if len(prompt_of_row) > self.places:
            self._resize(len(prompt_of_row))
        for layer in self.layers:
            layer.clear(slice(len(self), len(prompt_of_row)))
        self._set_rows(prompt_of_row, torch.cat([self.starts, torch.full_like(source, self.end)]))

    def leave(self, gone: Tensor) -> Tensor:
        """Ends the rows `gone` [n], ascending; the last fill the gaps. Returns the row now at each place."""
        left = len(self) - len(gone)
        is_mover = torch.ones(len(self) - left, dtype=torch.bool, device=gone.device)
        is_mover[gone[gone >= left] - left] = False
        movers, gaps = left + is_mover.nonzero()[:, 0], gone[gone < left]
        for layer in self.layers if len(gaps) else ():
            for memory in (layer.keys, layer.values):
                memory[gaps, :, self.first : self.end] = memory[movers, :, self.first : self.end]
        order = torch.arange(left, device=gone.device).index_copy(0, gaps, movers)
        self._set_rows(self.prompt_of_row[order], self.starts[order])
        if 2 * len(self._unanswered) >= len(self.lengths):
            self._resize_prompts(0, 0)
        return order

    def row_layers(self, place: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of what a row has read, its prompt and its own tokens: [tokens, heads, d] for each layer."""
        prompt = int(self.prompt_of_row[place])
        of_prompt = slice(self.prompt_width - int(self.lengths[prompt]), None)
        own = slice(int(self.starts[place]), self.end)

        def concat(prompts: Tensor, rows: Tensor) -> Tensor:
            return torch.cat([prompts[prompt, :, of_prompt], rows[place, :, own]], dim=1).transpose(0, 1)

        return [
            (concat(layer.prompt_keys, layer.keys), concat(layer.prompt_values, layer.values)) for layer in self.layers
        ]

    def step(self) -> Tensor:
        """Makes room for a token of each row; its position, [b, 1]."""
        if self.end == self.columns:
            self._resize(len(self))
        self._masks = {}
        return (self.lengths[self.prompt_of_row] + self.end - self.starts)[:, None]

    def mask(self, window: int | None) -> Tensor | None:
        """The keys that the next tokens attend to, [b, P + width + 1] bool: their prompts' columns, then their own.

        None: all of them. `window`: how far back they see, themselves included, if that is limited.
        """
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        columns = self.layers[0].get_seq_length() + 1
        window = window if window and window < columns else None
        if not self._is_ragged and not window:
            return None
        prompt_columns = torch.arange(self.prompt_width, device=self.starts.device) - self.prompt_width
        own = torch.arange(self.first, self.end + 1, device=self.starts.device)
        lengths, starts = self.lengths[self.prompt_of_row, None], self.starts[:, None]
        positions = torch.cat([lengths + prompt_columns, lengths + own - starts], dim=1)
        attended = torch.cat([lengths + prompt_columns >= 0, own >= starts], dim=1)
        return attended & (lengths + self.end - starts - positions < window) if window else attended

    def by_prompt(self, rows: Tensor) -> Tensor:
        """[b, heads, s, x] → [prompts, heads, g·s, x]: beside each other what answers one prompt, of at most g rows."""
        prompts, most = len(self.lengths), self._most_rows
        if not self._is_in_order:
            grouped = rows.new_zeros(prompts * most, *rows.shape[1:])
            rows = grouped.index_copy_(0, self._slots, rows)
        return rows.unflatten(0, (prompts, most)).transpose(1, 2).flatten(2, 3)

    def by_row(self, grouped: Tensor) -> Tensor:
        """Undoes `by_prompt`: [prompts, heads, g·s, x] → [b, heads, s, x]."""
        rows = grouped.unflatten(2, (self._most_rows, -1)).transpose(1, 2).flatten(0, 1)
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
        """Room for the own tokens of `places` rows, and for up to BLOCK more of each."""
        used = self.end - self.first
        for layer in self.layers:
            layer.resize(places, min(used + BLOCK, self.max_tokens))
        self.starts = self.starts - self.first
        self.first, self.end = 0, used

    def _set_rows(self, prompt_of_row: Tensor, starts: Tensor) -> None:
        self.prompt_of_row, self.starts = prompt_of_row, starts
        self.first = int(starts.min()) if len(starts) else self.end
        rows_of_prompt = prompt_of_row.bincount(minlength=len(self.lengths))
        self._unanswered = (rows_of_prompt == 0).nonzero()[:, 0]
        self._most_rows = int(rows_of_prompt.max()) if len(starts) else 0
        order = prompt_of_row.argsort(stable=True)
        firsts = rows_of_prompt.cumsum(0) - rows_of_prompt  # of each prompt, in `order`
        ranks = torch.arange(len(order), device=order.device) - firsts[prompt_of_row[order]]
        self._slots = torch.empty_like(order).index_copy(0, order, prompt_of_row[order] * self._most_rows + ranks)
        all_slots = torch.arange(len(self.lengths) * self._most_rows, device=order.device)
        self._is_in_order = torch.equal(self._slots, all_slots)
        lengths = self.lengths[prompt_of_row]
        self._is_ragged = bool((starts != self.first).any() or (lengths != self.prompt_width).any())

    def _places_for(self, prompts: int, width: int) -> Tensor:
        """Returns the places of so many new prompts of this width, and makes room for them: [prompts]."""
        if prompts > len(self._unanswered) or width > self.prompt_width:
            self._resize_prompts(prompts, width)
        return self._unanswered[:prompts]

    def _resize_prompts(self, more: int, width: int) -> None:
        """Room for the prompts that are answered, and for `more` of this width; other prompts are forgotten.

        Where others join those that are answered, it grows by more than they need, as still others may follow.
        """
        answered, prompt_of_row = self.prompt_of_row.unique(return_inverse=True)
        kept = self.lengths[answered]
        if more and len(answered):
            more = max(more, int(GROWTH * len(answered)))
            width += BLOCK if width > self.prompt_width else 0
        width = max([width, *kept.tolist()])
        for layer in self.layers:
            layer.resize_prompts(answered, len(answered) + more, width)
        self.lengths = torch.cat([kept, kept.new_zeros(more)])
        self._set_rows(prompt_of_row, self.starts)


class Slots:
    """The tokens that the running rows have drawn, and the numbers by which they will draw.

    By slot: `tokens`, `log_probs` and `uniforms` [S, M]; `counts` of tokens so far, `max_tokens`, `kinds` (which of
    `samplings`) and `stopped` (whether the last token is a stop id) [S]. S and M are as large as it took so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.requests: dict[int, Request] = {}  # by the slots in use
        self.free: list[int] = []
        self.samplings: dict[SamplingParams, int] = {}  # the distinct ones, numbered
        self.tokens = torch.zeros(0, 0, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(0, 0, device=device)
        self.uniforms = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self.counts, self.max_tokens, self.kinds = (torch.zeros(0, dtype=torch.long, device=device) for _ in range(3))
        self.stopped = torch.zeros(0, dtype=torch.bool, device=device)

    def take(self, requests: Sequence[Request]) -> Tensor:
        """Returns a slot for each request: [n]."""
        limits = [request.sampling.max_tokens for request in requests]
        self._reserve(len(requests), max(limits))
        taken = [self.free.pop() for _ in requests]
        self.requests |= dict(zip(taken, requests, strict=True))
        uniforms = np.zeros((len(requests), max(limits)))
        for row, request in enumerate(requests):
            uniforms[row, : limits[row]] = np.random.default_rng(request.seed).random(limits[row])
        asked = [replace(request.sampling, max_tokens=0) for request in self.requests.values()]
        self.samplings = dict(zip(dict.fromkeys(asked), range(len(asked)), strict=False))  # of running rows alone
        kinds = [*map(self.samplings.__getitem__, asked)]
        device = self.tokens.device
        slots = torch.tensor(taken, device=device)
        self.uniforms[slots, : max(limits)] = torch.from_numpy(uniforms).to(device)
        self.counts[slots] = 0
        self.max_tokens[slots] = torch.tensor(limits, device=device)
        self.kinds[torch.tensor([*self.requests], device=device)] = torch.tensor(kinds, device=device)
        return slots

    def give_back(self, slots: Collection[int]) -> None:
        for slot in slots:
            del self.requests[slot]
        self.free += slots

    def _reserve(self, rows: int, width: int) -> None:
        """At least `rows` free slots, for `width` tokens each; what is too small doubles, so that it seldom is."""
        size, old_width = self.tokens.shape
        width = max(width, old_width)
        new_size = size if rows <= len(self.free) else max(len(self.requests) + rows, 2 * size)
        if (new_size, width) == (size, old_width):
            return
        for name in ("tokens", "log_probs", "uniforms"):
            setattr(self, name, enlarge(vars(self)[name], new_size, width))
        for name in ("counts", "max_tokens", "kinds", "stopped"):
            setattr(self, name, enlarge(vars(self)[name], new_size))
        self.free += range(size, new_size)

    def last_tokens(self, slots: Tensor) -> Tensor:
        """Returns the newest token of each of `slots` [b]: [b, 1]."""
        return self.tokens[slots, self.counts[slots] - 1, None]

    def read_ids(self, slot: int) -> list[int]:
        """Returns the ids that the model has read of a row: its prompt's and its own, without the newest."""
        return [*self.requests[slot].prompt_ids, *self.tokens[slot, : int(self.counts[slot]) - 1].tolist()]


def enlarge(memory: Tensor, *shape: int) -> Tensor:
    """`memory` as the first part of a tensor of this shape, which is 0 elsewhere."""
    larger = memory.new_zeros(shape)
    larger[tuple(map(slice, memory.shape))] = memory
    return larger
