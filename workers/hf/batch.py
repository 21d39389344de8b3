"""The rows that are generating: a prompt prefilled once for those that start together, then a token of each at a time.

Rows join and leave at any step. Each has its own sampling, limit and uniform numbers, drawn by its own seed when it
joins, so that its tokens do not depend on its company. What they have drawn lies in slots, which are given out again.
What the model keeps of them from token to token is a subclass's: keys and values that rows of one prompt share, here;
whatever else a model has, in workers/hf/separate.py. turn_cache.py has what is kept of episodes beyond that.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from data.seqlen_balancing import padded_parts
from data.types import Completion, Request
from workers.hf.cache import RowCache
from workers.hf.sampling import sample_rows
from workers.hf.slots import Slots
from workers.hf.turn_cache import CachedPrefix, Layers, TurnCache, cache_of
from workers.rollout import divergence


class RunningBatch(ABC):
    """The rows that generate with `module` until none is left; `alive` [b] are their slots, in the subclass's order.

    `max_num_batched_tokens`: most of a pass over prompts, padding included; a longer prompt has a pass of its own.
    `turns`: what is kept of the episodes whose requests come.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        stop_ids: Collection[int],
        pad_token_id: int,
        weight_version: int,
        max_num_batched_tokens: int,
        turns: TurnCache,
    ) -> None:
        self.module, self.pad_token_id, self.weight_version = module, pad_token_id, weight_version
        self.max_num_batched_tokens, self.turns = max_num_batched_tokens, turns
        self.stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=module.device)
        self.slots = Slots(module.device)
        self.alive = torch.empty(0, dtype=torch.long, device=module.device)

    @abstractmethod
    def _prefill(self, prompts: list[tuple[int, ...]], begun: list[CachedPrefix]) -> tuple[Any, Tensor]:
        """Computes d prompts: what the model keeps of them, and the logits after them, [d, V] float32. `begun` [d]:
        what is kept of their beginnings, which is nothing unless the subclass keeps it."""

    @abstractmethod
    def _keep(self, prefilled: Any, lengths: Tensor, source: Tensor, max_tokens: int) -> None:
        """Adds n rows of at most `max_tokens` own tokens, which answer the prompts `source` [n] of `prefilled`, of so
        many tokens: `lengths`."""

    @abstractmethod
    def _forward(self) -> Tensor:
        """Returns logits after the last token of each row that is alive: [b, V] float32."""

    @abstractmethod
    def _forget(self, gone: Tensor) -> Tensor:
        """Ends the rows at the places `gone` [n], ascending. Returns the row now at each place."""

    def _prompt_layers(self, prefilled: Any, place: int, length: int) -> Layers | None:
        """Keys and values of the prompt at `place` of `prefilled`, of so many tokens; None: this way keeps nothing."""
        return None

    def _row_layers(self, place: int) -> Layers | None:
        """Returns keys and values of all that the row at `place` has read; None: this way keeps nothing."""
        return None

    def __len__(self) -> int:
        return len(self.alive)

    def __contains__(self, request_id: int) -> bool:
        return any(request.id == request_id for request in self.slots.requests.values())

    def join(self, requests: Sequence[Request]) -> list[Completion]:
        """Draws the first token of each; those that go on join, behind the rows alive. Returns those that end by it."""
        rows: dict[tuple[int, ...], list[Request]] = {}  # of each prompt
        for request in requests:
            rows.setdefault(tuple(request.prompt_ids), []).append(request)
        prompts, finished = list(rows), []
        begun = [self.turns.take(prompt, (request.episode for request in rows[prompt])) for prompt in prompts]
        new = [len(prompt) - len(kept) for prompt, kept in zip(prompts, begun, strict=True)]
        for part in padded_parts(new, self.max_num_batched_tokens):
            finished += self._join_pass(
                {prompts[place]: rows[prompts[place]] for place in part}, [begun[place] for place in part]
            )
        return finished

    def _join_pass(self, rows: dict[tuple[int, ...], list[Request]], begun: list[CachedPrefix]) -> list[Completion]:
        """`join` for the requests of some prompts, which go through the model together."""
        prefilled, logits = self._prefill(list(rows), begun)
        device, requests = logits.device, [request for answers in rows.values() for request in answers]
        source = torch.tensor([place for place, answers in enumerate(rows.values()) for _ in answers], device=device)
        lengths = torch.tensor([*map(len, rows)], device=device)
        slots = self.slots.take(requests)
        ends = self._draw(slots, logits[source])
        for row in ends.nonzero()[:, 0].tolist():
            if requests[row].episode is not None:
                prompt = int(source[row])
                self._leave_behind(int(slots[row]), self._prompt_layers(prefilled, prompt, int(lengths[prompt])))
        if not ends.all():
            longest = max(request.sampling.max_tokens for request in requests)
            self._keep(prefilled, lengths, source[~ends], longest)
            self.alive = torch.cat([self.alive, slots[~ends]])
        return self._completions(slots[ends])

    def step(self) -> list[Completion]:
        """Draws one more token of each row that is alive; those that end by it leave."""
        gone = self._draw(self.alive, self._forward()).nonzero()[:, 0]
        for place, slot in zip(gone.tolist(), self.alive[gone].tolist(), strict=True):
            if self.slots.requests[slot].episode is not None:
                self._leave_behind(slot, self._row_layers(place))
        return self._completions(self._leave(gone)) if len(gone) else []

    def _leave_behind(self, slot: int, layers: Layers | None) -> None:
        """Keeps what the row of `slot`, which has ended, has read, for the next turn of its episode."""
        if layers is not None:
            self.turns.put(self.slots.requests[slot].episode, CachedPrefix(self.slots.read_ids(slot), layers))

    def drop(self, ids: Collection[int]) -> None:
        """Ends the rows of these requests; those that have none here are ignored."""
        dropped = [slot for slot, request in self.slots.requests.items() if request.id in ids]
        if dropped:
            self._leave(torch.isin(self.alive, self.alive.new_tensor(dropped)).nonzero()[:, 0])
            self.slots.give_back(dropped)

    def tokens_so_far(self, seen: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        """Token ids and log-probs of the rows that answer the requests in `seen`, beyond the first `seen[id]`."""
        counts, found = self.slots.counts.tolist(), {}
        for slot, request in self.slots.requests.items():
            if request.id in seen:
                new = slice(seen[request.id], counts[slot])
                found[request.id] = self.slots.tokens[slot, new].tolist(), self.slots.log_probs[slot, new].tolist()
        return found

    def _leave(self, gone: Tensor) -> Tensor:
        """Ends the rows at the places `gone` [n], ascending; returns their slots."""
        slots = self.alive[gone]
        self.alive = self.alive[self._forget(gone)]
        return slots

    def _completions(self, slots: Tensor) -> list[Completion]:
        """Returns the responses in `slots`, which are free from now on."""
        drawn = self.slots
        columns = [values[slots].tolist() for values in (drawn.tokens, drawn.log_probs, drawn.counts, drawn.stopped)]
        ended = slots.tolist()
        completions = [
            Completion(
                drawn.requests[slot].id,
                tokens[:count],
                log_probs[:count],
                "stop" if stopped else "length",
                self.weight_version,
            )
            for slot, tokens, log_probs, count, stopped in zip(ended, *columns, strict=True)
        ]
        drawn.give_back(ended)
        return completions

    def _draw(self, slots: Tensor, logits: Tensor) -> Tensor:
        """Records the next token of each of `slots` [b]; which of them end by it, [b] bool."""
        drawn, counts = self.slots, self.slots.counts[slots]
        uniforms = drawn.uniforms[slots, counts]
        sampled, log_probs = sample_rows(logits, list(drawn.samplings), drawn.kinds[slots], uniforms)
        if not log_probs.isfinite().all():
            broken = (~log_probs.isfinite()).nonzero()[:, 0]
            request, token = drawn.requests[int(slots[broken[0]])], int(counts[broken[0]]) + 1
            where = f"{len(broken)} of {len(slots)} rows (request {request.id}, token {token} of its response)"
            raise divergence(self.weight_version, where)
        drawn.tokens[slots, counts] = sampled
        drawn.log_probs[slots, counts] = log_probs
        drawn.counts[slots] = counts + 1
        stopped = torch.isin(sampled, self.stops)
        for sampling, kind in drawn.samplings.items():
            if sampling.stop_token_ids:
                own = sampled.new_tensor(sampling.stop_token_ids)
                stopped |= (drawn.kinds[slots] == kind) & torch.isin(sampled, own)
        drawn.stopped[slots] = stopped
        return stopped | (counts + 1 == drawn.max_tokens[slots])


class SharedPrompts(RunningBatch):
    """Rows whose attention reads a prompt once for all that answer it (workers/kernels/); the cache knows of it."""

    cache: RowCache | None = None

    def _prefill(self, prompts: list[tuple[int, ...]], begun: list[CachedPrefix]) -> tuple[DynamicCache, Tensor]:
        """Returns keys and values of d prompts, padded on the left, and the logits after them [d, V].

        Each has as many tokens computed as the one with the most new ones: where others have padding, a prompt that
        has begun has the last of its kept ones once more. So no row has holes.
        """
        ids, mask = pad_left(prompts, self.pad_token_id, self.module.device)
        most = max(len(prompt) - len(kept) for prompt, kept in zip(prompts, begun, strict=True))
        cache = cache_of(begun, [max(0, len(prompt) - most) for prompt in prompts])
        return cache, last_logits(self.module, ids[:, -most:], positions_of(mask)[:, -most:], mask, cache)

    def _keep(self, prefilled: DynamicCache, lengths: Tensor, source: Tensor, max_tokens: int) -> None:
        if self.cache is None:
            self.cache = RowCache(prefilled)
        self.cache.join(prefilled, lengths, source, max_tokens)

    def _forward(self) -> Tensor:
        """Returns logits after the last token of each row that is alive: [b, V]."""
        positions, last = self.cache.step(), self.slots.last_tokens(self.alive)
        no_mask = last.new_zeros(1, 1, 1, 1)  # four dimensions: transformers makes none of its own
        logits = last_logits(self.module, last, positions, no_mask, self.cache, rows=self.cache)
        self.cache.end += 1
        return logits

    def _forget(self, gone: Tensor) -> Tensor:
        return self.cache.leave(gone)

    def _prompt_layers(self, prefilled: DynamicCache, place: int, length: int) -> Layers:
        whole = [(layer.keys, layer.values) for layer in prefilled.layers]
        return [tuple(memory[place, :, -length:].transpose(0, 1).clone() for memory in pair) for pair in whole]

    def _row_layers(self, place: int) -> Layers:
        return self.cache.row_layers(place)


def pad_left(prompts: list[tuple[int, ...]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the ids of d prompts and which of them are real, 1 or 0: [d, p] each."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids.to(device), mask.to(device)


def positions_of(mask: Tensor) -> Tensor:
    """Returns positions of the real tokens of rows padded on the left, counted from 0; [b, w], as `mask` is."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def last_logits(
    module: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor,
    cache: Cache | None,
    **for_attention: RowCache,
) -> Tensor:
    """Logits after the last of `ids` [b, q]: [b, V] float32. `mask` [b, cached + q]; without a cache, `ids` are all."""
    cached = {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}
    output = module(
        input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **cached, **for_attention
    )
    return output.logits[:, -1].float()
