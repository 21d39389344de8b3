"""Keys and values that episodes leave behind between their turns, so that a next turn computes its new tokens alone.

The prompt of an episode's next turn begins with what the model has read in the turn before. What it shares with that,
token for token, need not go through the model again; nothing else of an episode is looked at.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

Layers = list[tuple[Tensor, Tensor]]  # keys and values by layer, [tokens, heads, d] each


@dataclass(frozen=True)
class CachedPrefix:
    """The keys and values of the tokens `ids` in `layers`, which have as many or more."""

    ids: Sequence[int] = ()
    layers: Layers = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def common_prefix(self, prompt: Sequence[int]) -> "CachedPrefix":
        """Returns the tokens that `prompt` begins with; never all of it, as the logits after its last are needed."""
        most = min(len(self), len(prompt) - 1)
        differs = (place for place in range(most) if self.ids[place] != prompt[place])
        return CachedPrefix(prompt[: next(differs, most)], self.layers)


class TurnCache:
    """Keeps what each episode that may go on has read; of more than `most_tokens` in all, the oldest go.

    Attributes:
        episodes: that may go on, added by the engine: nothing is kept of others.
        prefilled_tokens: of prompts that nothing was kept of.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens, self.tokens, self.prefilled_tokens = most_tokens, 0, 0
        self.episodes: set[int] = set()
        self.turns: dict[int, CachedPrefix] = {}  # by episode, the oldest first

    def put(self, episode: int, turn: CachedPrefix) -> None:
        """Keeps what an episode has read, unless it was forgotten meanwhile."""
        if episode not in self.episodes:
            return
        self._pop(episode)
        self.turns[episode] = turn
        self.tokens += len(turn)
        while self.tokens > self.most_tokens:
            self._pop(next(iter(self.turns)))

    def take(self, prompt: Sequence[int], episodes: Iterable[int | None]) -> CachedPrefix:
        """Takes out what is kept of these episodes, and returns the longest beginning of `prompt` in it."""
        found = [turn.common_prefix(prompt) for episode in episodes if (turn := self._pop(episode))]
        best = max(found, key=len, default=CachedPrefix())
        self.prefilled_tokens += len(prompt) - len(best)
        return best

    def forget(self, episodes: Iterable[int]) -> None:
        for episode in [*episodes]:
            self.episodes.discard(episode)
            self._pop(episode)

    def _pop(self, episode: int | None) -> CachedPrefix | None:
        turn = self.turns.pop(episode, None)
        self.tokens -= len(turn or ())
        return turn


class PromptCache(DynamicCache):
    """Whole prompts, in the precision that attention multiplies in: rotations leave float32, which autocast would make
    of it again in every step."""

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
            [kept[:length] for kept in turn.layers[index]] if length else [kept[:0] for kept in like]
            for turn, length in zip(turns, lengths, strict=True)
        ]
        keys, values = (pad_sequence(rows, True, padding_side="left") for rows in zip(*beginnings, strict=True))
        cache.update(keys.transpose(1, 2), values.transpose(1, 2), index)
    return cache
