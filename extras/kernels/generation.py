"""Generates by the kernels: reads a prompt once for all its samples, and keeps an episode's turns."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from data.types import Completion, Request
from extras.kernels.cache import RowCache
from extras.kernels.decode import decoding, lay_out_weights
from extras.kernels.packed_attention import known_padding
from extras.kernels.turn_cache import CachedPrefix, Layers, TurnCache, cache_of
from workers.hf_rollout import Rows, RunningBatch, RunningRow, SeparateRows, last_logits, pad_left, positions_of


class LaidOut(RunningBatch):
    """Rows whose module is set up for decoding meanwhile, its weights laid out for narrow products."""

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
    """Rows whose attention reads a prompt once for all that answer it; the cache knows of it. It keeps what episodes
    have read between their turns."""

    COST = "nothing"
    cache: RowCache | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns = TurnCache(self.max_kept_tokens)
        self.begun: dict[tuple[int, ...], CachedPrefix] = {}

    def join(self, requests: Sequence[Request]) -> list[Completion]:
        self.turns.episodes.update(request.episode for request in requests if request.episode is not None)
        return super().join(requests)

    def _new_tokens(
        self, prompts: list[tuple[int, ...]], rows: Mapping[tuple[int, ...], Sequence[Request]]
    ) -> list[int]:
        episodes = {prompt: (request.episode for request in rows[prompt]) for prompt in prompts}
        self.begun = {prompt: self.turns.take(prompt, episodes[prompt]) for prompt in prompts}
        return [len(prompt) - len(self.begun[prompt]) for prompt in prompts]

    def _left(self, row: RunningRow, prefilled: DynamicCache | None, place: int) -> None:
        if row.request.episode is None:
            return
        if prefilled is None:
            layers = self.cache.row_layers(place)
        else:
            layers = self._prompt_layers(prefilled, place, len(row.request.prompt_ids))
        self.turns.put(row.request.episode, CachedPrefix(row.read_ids, layers))

    def goes_on(self) -> bool:
        return bool(self.turns.episodes) or super().goes_on()

    def forget(self, episodes: Iterable[int]) -> None:
        self.turns.forget(episodes)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[DynamicCache, Tensor]:
        """Returns keys and values of d prompts, padded on the left, and the logits after them [d, V].

        Each has as many tokens computed as the one with the most new ones: where others have padding, a prompt that
        has begun has the last of its kept ones once more. So no row has holes.
        """
        begun = [self.begun[prompt] for prompt in prompts]
        ids, mask = pad_left(prompts, self.pad_token_id, self.module.device)
        most = max(len(prompt) - len(kept) for prompt, kept in zip(prompts, begun, strict=True))
        cache = cache_of(begun, [max(0, len(prompt) - most) for prompt in prompts])
        with known_padding(len({*map(len, prompts)}) > 1):
            return cache, last_logits(self.module, ids[:, -most:], positions_of(mask)[:, -most:], mask, cache)

    def _keep(self, prefilled: DynamicCache, lengths: Sequence[int], source: Sequence[int], max_tokens: int) -> None:
        if self.cache is None:
            self.cache = RowCache(prefilled)
        self.cache.join(prefilled, lengths, source, max_tokens)

    def _forward(self) -> Tensor:
        """Returns logits after the last token of each row that is alive: [b, V]."""
        self.cache.make_room()
        no_mask = self.last.new_zeros(1, 1, 1, 1)  # four dimensions: transformers makes none of its own
        ids, positions = self.last[:, None], self.cache.positions
        logits = last_logits(self.module, ids, positions, no_mask, self.cache, rows=self.cache)
        self.cache.advance()
        return logits

    def _forget(self, gone: Sequence[int]) -> list[int]:
        return self.cache.leave(gone)

    def _prompt_layers(self, prefilled: DynamicCache, place: int, length: int) -> Layers:
        whole = [(layer.keys, layer.values) for layer in prefilled.layers]
        return [tuple(memory[place, :, -length:].transpose(0, 1).clone() for memory in pair) for pair in whole]
