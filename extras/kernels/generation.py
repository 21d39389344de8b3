"""Generates by the kernels: reads a prompt once for all its samples, and keeps episodes' keys and values between turns.

The prompt of an episode's next turn begins with the tokens of the turn before; the shared tokens need not go through
the model again.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from data.padding import media_of
from data.types import Completion, Request
from extras.kernels.cache import RowCache
from extras.kernels.decode import decoding, lay_out_weights
from extras.kernels.packed_attention import known_padding
from workers.hf_rollout import (
    Rows,
    RunningBatch,
    RunningRow,
    SeparateRows,
    device_tensor,
    inputs_of,
    last_logits,
    pad_left,
)

Layers = list[tuple[Tensor, Tensor]]  # keys and values by layer, [tokens, heads, d] each


class LaidOut(RunningBatch):
    """Rows whose module is set up for decoding while they run: its weights are laid out for narrow products."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.set_up, self.has_laid_out = ExitStack(), False
        self.set_up.enter_context(decoding(self.module))

    def join(self, requests: Sequence[Request]) -> list[Completion]:
        if not self.has_laid_out:
            steps, rows = max(request.sampling.max_tokens for request in requests) - 1, len(self) + len(requests)
            self.has_laid_out = lay_out_weights(self.module, steps, rows)
        return super().join(requests)

    def close(self) -> None:
        self.set_up.close()


class LaidOutRows(LaidOut, SeparateRows):
    """`SeparateRows` of a model whose layers are prepared, and whose attention cannot share prompts."""

    def _logits(self, rows: Rows) -> Tensor:
        with known_padding(not bool(rows.mask.all()) if rows.mask.device.type == "cpu" else True):
            return super()._logits(rows)


class SharedPrompts(LaidOut):
    """Rows whose attention reads a prompt once for all rows that answer it, from a cache made for that. Keeps episodes'
    keys and values between their turns."""

    COST = "nothing"
    cache: RowCache | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns = TurnCache(self.max_kept_tokens)
        self.begun: dict[tuple[int, ...], CachedPrefix] = {}

    def _set_alive(self, rows: list[RunningRow], last: Tensor) -> None:
        super()._set_alive(rows, last)
        shifts = [media.shift if media else 0 for media in (media_of(row.request.prompt_ids) for row in rows)]
        self.shifts = device_tensor(shifts, last.device)[:, None] if any(shifts) else 0  # of positions, by images

    def join(self, requests: Sequence[Request]) -> list[Completion]:
        self.turns.episodes.update(request.episode for request in requests if request.episode is not None)
        return super().join(requests)

    def _new_tokens(
        self, prompts: list[tuple[int, ...]], rows: Mapping[tuple[int, ...], Sequence[Request]]
    ) -> list[int]:
        episodes = {prompt: (request.episode for request in rows[prompt]) for prompt in prompts}
        self.begun = {prompt: self.turns.take(prompt, episodes[prompt]) for prompt in prompts}
        return [len(prompt) - len(self.begun[prompt]) for prompt in prompts]

    def _left(self, row: RunningRow, prefilled: DynamicCache | None, index: int) -> None:
        if row.request.episode is None:
            return
        if prefilled is None:
            layers = self.cache.row_layers(index)
        else:
            layers = self._prompt_layers(prefilled, index, len(row.request.prompt_ids))
        ids = [*row.request.prompt_ids, *row.token_ids[:-1]]
        self.turns.put(row.request.episode, CachedPrefix(ids, layers, media_of(row.request.prompt_ids)))

    def goes_on(self) -> bool:
        return bool(self.turns.episodes) or super().goes_on()

    def forget(self, episodes: Iterable[int]) -> None:
        self.turns.forget(episodes)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[DynamicCache, Tensor]:
        """Returns keys and values of d prompts, padded on the left, and the logits after them [d, V].

        Each prompt has as many tokens computed as the one with the most new tokens: where others have padding, a prompt
        with kept tokens has the last of them computed again. So no row has holes.
        """
        begun = [self.begun[prompt] for prompt in prompts]
        ids, mask = pad_left(prompts, self.pad_token_id, self.module.device)
        most = max(len(prompt) - len(prefix) for prompt, prefix in zip(prompts, begun, strict=True))
        cache = cache_of(begun, [max(0, len(prompt) - most) for prompt in prompts])
        with known_padding(len({*map(len, prompts)}) > 1):
            inputs = inputs_of(self.module, ids, mask, slice(-most, None), [*map(media_of, prompts)])
            return cache, last_logits(self.module, inputs, mask, cache)

    def _keep(self, prefilled: DynamicCache, lengths: Sequence[int], source: Sequence[int], max_tokens: int) -> None:
        if self.cache is None:
            self.cache = RowCache(prefilled)
        self.cache.join(prefilled, lengths, source, max_tokens)

    def _forward(self) -> Tensor:
        """Returns logits after the last token of each row that is alive: [b, V]."""
        self.cache.make_room()
        no_mask = self.last.new_zeros(1, 1, 1, 1)  # four dimensions: transformers makes none of its own
        inputs = {"input_ids": self.last[:, None], "position_ids": self.cache.positions + self.shifts}
        logits = last_logits(self.module, inputs, no_mask, self.cache, rows=self.cache)
        self.cache.advance()
        return logits

    def _forget(self, ended: Sequence[int]) -> list[int]:
        return self.cache.leave(ended)

    def _prompt_layers(self, prefilled: DynamicCache, place: int, length: int) -> Layers:
        pairs = [(layer.keys, layer.values) for layer in prefilled.layers]
        return [tuple(memory[place, :, -length:].transpose(0, 1).clone() for memory in pair) for pair in pairs]


@dataclass(frozen=True)
class CachedPrefix:
    """The keys and values of the tokens `ids` in `layers`, which have as many or more."""

    ids: Sequence[int] = ()
    layers: Layers = field(default_factory=list)
    media: Any = None  # what the tokens show

    def __len__(self) -> int:
        return len(self.ids)

    def common_prefix(self, prompt: Sequence[int]) -> "CachedPrefix":
        """Returns the tokens that `prompt` begins with, but never all, as the logits after its last are needed."""
        most = min(len(self), len(prompt) - 1) if (self.media or None) == (media_of(prompt) or None) else 0
        differs = (index for index in range(most) if self.ids[index] != prompt[index])
        return CachedPrefix(prompt[: next(differs, most)], self.layers, self.media)


class TurnCache:
    """Keeps the keys and values of episodes that may continue; beyond `most_tokens` in all, the oldest are dropped.

    Attributes:
        episodes: those that may continue, added by the engine; others are not kept.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens, self.tokens = most_tokens, 0
        self.episodes: set[int] = set()
        self.turns: dict[int, CachedPrefix] = {}  # by episode, the oldest first

    def put(self, episode: int, turn: CachedPrefix) -> None:
        """Keeps an episode's keys and values, unless the engine has forgotten the episode meanwhile."""
        if episode not in self.episodes:
            return
        self._pop(episode)
        self.turns[episode] = turn
        self.tokens += len(turn)
        while self.tokens > self.most_tokens:
            self._pop(next(iter(self.turns)))

    def take(self, prompt: Sequence[int], episodes: Iterable[int | None]) -> CachedPrefix:
        """Takes out the kept turns of these episodes, and returns the longest beginning of `prompt` among them."""
        prefixes = [turn.common_prefix(prompt) for episode in episodes if (turn := self._pop(episode))]
        return max(prefixes, key=len, default=CachedPrefix())

    def forget(self, episodes: Iterable[int]) -> None:
        for episode in [*episodes]:
            self.episodes.discard(episode)
            self._pop(episode)

    def _pop(self, episode: int | None) -> CachedPrefix | None:
        turn = self.turns.pop(episode, None)
        self.tokens -= len(turn or ())
        return turn


class PromptCache(DynamicCache):
    """Whole prompts, in the precision that attention multiplies in: rotations leave float32, which autocast would
    convert again in every step."""

    def __init__(self) -> None:
        super().__init__()  # not told of sliding windows

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        device = keys.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else keys.dtype
        return super().update(keys.to(dtype), values.to(dtype), layer_idx, *args, **kwargs)


def cache_of(turns: Sequence[CachedPrefix], lengths: Sequence[int]) -> PromptCache:
    """Returns the first `lengths` tokens of each of `turns`, padded on the left; empty if there are none."""
    cache = PromptCache()
    for index, like in enumerate(next((turn.layers for turn in turns if turn.layers), []) if any(lengths) else []):
        beginnings = [
            [tensor[:length] for tensor in turn.layers[index]] if length else [tensor[:0] for tensor in like]
            for turn, length in zip(turns, lengths, strict=True)
        ]
        keys, values = (pad_sequence(rows, True, padding_side="left") for rows in zip(*beginnings, strict=True))
        cache.update(keys.transpose(1, 2), values.transpose(1, 2), index)
    return cache
