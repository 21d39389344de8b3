"""Generates by the Hugging Face model itself: no second copy of the weights, nothing to synchronise.

A sampling loop in place of `generate`: a prompt is prefilled once for the rows that start together, then a step draws
one token of each row. Rows join and leave at any step. Each has its own sampling, limit and uniform numbers, drawn by
its own seed, so its tokens do not depend on other rows; the log-prob comes out of the softmax that is sampled from.
What a model keeps of the rows from token to token is a subclass's of `RunningBatch`: here, transformers' caches.
extras/kernels has rows that share their prompts, and keep what episodes have read.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import RolloutConfig
from data.padding import PromptIds, collate, media_of
from data.pretrained import position_count
from data.protocol import DataProto
from data.seqlen_balancing import padded_parts
from data.types import Completion, Request, Sample, SamplingParams
from data.wire import positions
from workers.collectives import common_notice
from workers.forward_check import FAILURES, check_width, ragged_batch, scaled_up_weights, tolerance, trained_log_probs
from workers.micro_batches import to_device
from workers.rollout import Rollout, check_request, divergence, sample_of

REFILL = 1 / 8  # of max_num_seqs, which must be free before waiting rows are prefilled
TRIAL_TOKENS = 5  # of a trial's responses, enough steps for the kernels of long ones
VOCABULARY_BLOCK = 128  # tokens whose probabilities are summed before a block is chosen


@dataclass(eq=False)
class RunningRow:
    """A request that is being answered; `uniforms` decide its next tokens, and one of `stops` ends it."""

    request: Request
    stops: frozenset[int]
    uniforms: np.random.Generator
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def ends(self) -> bool:
        return self.token_ids[-1] in self.stops or len(self.token_ids) == self.request.sampling.max_tokens

    def completion(self, weight_version: int) -> Completion:
        reason = "stop" if self.token_ids[-1] in self.stops else "length"
        return Completion(self.request.id, self.token_ids, self.log_probs, reason, weight_version)


def sampling_kinds(rows: Sequence[RunningRow], device: torch.device) -> dict[SamplingParams, Tensor]:
    """Groups `rows` by how their tokens are drawn: the indices of each kind, [n]."""
    indices: dict[SamplingParams, list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(replace(row.request.sampling, max_tokens=0, stop_token_ids=()), []).append(index)
    return {kind: device_tensor(rows_of_kind, device) for kind, rows_of_kind in indices.items()}


class RunningBatch:
    """The rows that generate with `module` until none is left: `alive`, b of them in the subclass's order.

    Args:
        max_num_batched_tokens: of a pass over prompts, padding included; a longer prompt has a pass of its own.
        max_kept_tokens: of episodes between their turns, for a subclass that keeps them.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        stop_ids: Collection[int],
        pad_token_id: int,
        weight_version: int,
        max_num_batched_tokens: int,
        max_kept_tokens: int,
    ) -> None:
        self.module, self.pad_token_id, self.weight_version = module, pad_token_id, weight_version
        self.max_num_batched_tokens, self.max_kept_tokens = max_num_batched_tokens, max_kept_tokens
        self.stop_ids = frozenset(stop_ids)
        self._set_alive([], device_tensor([], module.device))

    def _set_alive(self, rows: list[RunningRow], last: Tensor) -> None:
        """Goes on with these `rows`, whose newest tokens are `last`, [b] on the device."""
        self.alive, self.last = rows, last
        self.kinds = sampling_kinds(rows, last.device)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[Any, Tensor]:
        """Computes d prompts: what the model keeps of them, and the logits after them, [d, V] float32."""

    def _keep(self, prefilled: Any, lengths: Sequence[int], source: Sequence[int], max_tokens: int) -> None:
        """Adds n rows of at most `max_tokens` own tokens, which answer the prompts `source` [n] of `prefilled`, of so
        many tokens: `lengths`."""

    def _forward(self) -> Tensor:
        """Returns logits after the last token of each row that is alive: [b, V] float32."""

    def _forget(self, ended: Sequence[int]) -> list[int]:
        """Ends the rows at the indices `ended` [n], ascending. Returns the row now at each index."""

    def _left(self, row: RunningRow, prefilled: Any, index: int) -> None:
        """Hears of a row that has ended: by its first token, which answers the prompt at `index` of `prefilled`; or
        later (prefilled None), at `index` of the rows alive."""

    def _new_tokens(
        self, prompts: list[tuple[int, ...]], rows: Mapping[tuple[int, ...], Sequence[Request]]
    ) -> list[int]:
        """Counts the tokens of each prompt that have to go through the model; before `_prefill`."""
        return [*map(len, prompts)]

    def goes_on(self) -> bool:
        """Says whether something is kept for requests that may come."""
        return len(self) > 0

    def forget(self, episodes: Iterable[int]) -> None:
        """Drops what is kept of these episodes."""

    def close(self) -> None:
        """Leaves the module as it was, to be trained."""

    def __len__(self) -> int:
        return len(self.alive)

    def __contains__(self, request_id: int) -> bool:
        return any(row.request.id == request_id for row in self.alive)

    def join(self, requests: Sequence[Request]) -> list[Completion]:
        """Draws the first token of each; those that go on join, behind the rows alive. Returns those that end by it."""
        rows: dict[tuple[int, ...], list[Request]] = {}  # of each prompt
        for request in requests:
            rows.setdefault(PromptIds(request.prompt_ids, media_of(request.prompt_ids)), []).append(request)
        prompts, finished = list(rows), []
        new = self._new_tokens(prompts, rows)
        for part in padded_parts(new, self.max_num_batched_tokens):
            finished += self._join_pass({prompts[index]: rows[prompts[index]] for index in part})
        return finished

    def _join_pass(self, prompts: dict[tuple[int, ...], list[Request]]) -> list[Completion]:
        """Joins the requests of some prompts, which go through the model together."""
        prefilled, logits = self._prefill(list(prompts))
        source = [index for index, answers in enumerate(prompts.values()) for _ in answers]
        rows = [self._row(request) for answers in prompts.values() for request in answers]
        device, lengths = logits.device, [*map(len, prompts)]
        ends, last = self._draw(rows, sampling_kinds(rows, device), logits[device_tensor(source, device)])
        for index in ends:
            self._left(rows[index], prefilled, source[index])
        if len(ends) < len(rows):
            stays = sorted({*range(len(rows))}.difference(ends))
            longest = max(row.request.sampling.max_tokens for row in rows)
            self._keep(prefilled, lengths, [source[index] for index in stays], longest)
            last = torch.cat([self.last, last[device_tensor(stays, device)]])
            self._set_alive(self.alive + [rows[index] for index in stays], last)
        return [rows[index].completion(self.weight_version) for index in ends]

    def _row(self, request: Request) -> RunningRow:
        stops = self.stop_ids.union(request.sampling.stop_token_ids)
        return RunningRow(request, stops, np.random.default_rng(request.seed))

    def step(self) -> list[Completion]:
        """Draws one more token of each row that is alive; those that end by it leave."""
        ended, self.last = self._draw(self.alive, self.kinds, self._forward())
        for index in ended:
            self._left(self.alive[index], None, index)
        return [row.completion(self.weight_version) for row in self._leave(ended)] if ended else []

    def drop(self, ids: Collection[int]) -> None:
        """Ends the rows of these requests; those that have none here are ignored."""
        if dropped := [index for index, row in enumerate(self.alive) if row.request.id in ids]:
            self._leave(dropped)

    def tokens_so_far(self, seen: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        """Returns tokens and log-probs of the rows that answer the requests in `seen`, beyond the first `seen[id]`."""
        rows = {row.request.id: row for row in self.alive if row.request.id in seen}
        return {number: (row.token_ids[seen[number] :], row.log_probs[seen[number] :]) for number, row in rows.items()}

    def _leave(self, indices: Sequence[int]) -> list[RunningRow]:
        """Ends the rows at `indices` [n], ascending; returns them."""
        ended = [self.alive[index] for index in indices]
        order = self._forget(indices)
        self._set_alive([self.alive[index] for index in order], self.last[device_tensor(order, self.last.device)])
        return ended

    def _draw(
        self, rows: Sequence[RunningRow], kinds: Mapping[SamplingParams, Tensor], logits: Tensor
    ) -> tuple[list[int], Tensor]:
        """Gives each of `rows` [b] its next token. Returns the indices of those that end by it, ascending, and the
        tokens, [b], on the device."""
        uniforms = device_tensor(np.array([row.uniforms.random() for row in rows]), logits.device)
        sampled, log_probs = sample_rows(logits, kinds, uniforms)
        # The one time in a step that the host waits for the device. Token ids are exact in float64.
        drawn = torch.stack([sampled.double(), log_probs.double()]).tolist()
        if broken := [index for index, log_prob in enumerate(drawn[1]) if not math.isfinite(log_prob)]:
            request, token = rows[broken[0]].request, len(rows[broken[0]].token_ids) + 1
            location = f"{len(broken)} of {len(rows)} rows (request {request.id}, token {token} of its response)"
            raise divergence(self.weight_version, location)
        for row, token, log_prob in zip(rows, *drawn, strict=True):
            row.token_ids.append(int(token))
            row.log_probs.append(log_prob)
        return [index for index, row in enumerate(rows) if row.ends], sampled


@dataclass
class Rows:
    """Rows that joined together: `ids` of their tokens so far, padded on the left, and `mask`, which of them are real,
    [b, w]; what the model keeps of the first `seen` columns, if it keeps anything; and what their prompts show, [b]."""

    ids: Tensor
    mask: Tensor
    cache: Cache | None
    media: Sequence[Any]
    seen: int = 0

    def select(self, rows: Sequence[int]) -> "Rows":
        """Returns the rows at the indices `rows` [n], which may repeat; the old ones may not be used any more."""
        indices = device_tensor(rows, self.ids.device)
        if self.cache is not None:
            self.cache.reorder_cache(indices)
        return replace(self, ids=self.ids[indices], mask=self.mask[indices], media=[self.media[row] for row in rows])

    def append(self, tokens: Tensor) -> None:
        """Adds another token of each, [b, 1]."""
        self.ids = torch.cat([self.ids, tokens], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(tokens)], dim=1)


class SeparateRows(RunningBatch):
    """Rows that keep their prompts to themselves, in transformers' caches for the model: keys and values, states, or
    both. Those that joined together have one cache, and a step is a forward of each such part."""

    COST = "each row keeps a prompt of its own"
    caches: ClassVar[bool] = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts: list[Rows] = []  # in the order of `alive`

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[Rows, Tensor]:
        cache = DynamicCache(config=self.module.config) if self.caches else None
        rows = Rows(*pad_left(prompts, self.pad_token_id, self.module.device), cache, [*map(media_of, prompts)])
        return rows, self._logits(rows)

    def _keep(self, prefilled: Rows, lengths: Sequence[int], source: Sequence[int], max_tokens: int) -> None:
        self.parts.append(prefilled.select(source))

    def _forward(self) -> Tensor:
        sizes = [len(part.ids) for part in self.parts]
        for part, last in zip(self.parts, self.last[:, None].split(sizes), strict=True):
            part.append(last)
        return torch.cat([self._logits(part) for part in self.parts])

    def _forget(self, ended: Sequence[int]) -> list[int]:
        stays, first, parts = sorted({*range(len(self))}.difference(ended)), 0, []
        for part in self.parts:
            size = len(part.ids)
            staying = [index - first for index in stays if first <= index < first + size]
            if staying:
                parts.append(part if len(staying) == size else part.select(staying))
            first += size
        self.parts = parts
        return stays

    def _logits(self, rows: Rows) -> Tensor:
        """Returns logits after the last token of each, [b, V]; what the cache has not seen goes through the model."""
        new = slice(rows.seen, None)
        if self.caches:
            rows.seen = rows.ids.shape[1]
        inputs = inputs_of(self.module, rows.ids, rows.mask, new, rows.media)
        return last_logits(self.module, inputs, rows.mask, rows.cache)


class NoCacheBatch(SeparateRows):
    """Rows of which the model keeps nothing: as slow as it is general."""

    COST = "each token costs a forward of all before it"
    caches = False


BATCH_CLASSES = (SeparateRows, NoCacheBatch)  # tried after those of the model's kernels


class HFRollout(Rollout):
    """Samples from the actor's own `model`, by the first kind of batch whose log-probs are the trainer's: they are
    tried, in the precision of the block in which the engine is made.

    From the first request until none is left and no episode may go on, the module is in eval mode, set up for decoding.

    Raises:
        ValueError: no kind of batch has the trainer's log-probs.
    """

    is_probed = takes_media = True
    reads = ()

    def __init__(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(config, tokenizer, model)
        self.positions = position_count(model.config.get_text_config())
        self.batch: RunningBatch | None = None  # while there are requests
        self.set_up = ExitStack()  # undoes the set-up of the module at the end
        self.batch_class: type[RunningBatch] = self._choose_batch_class()

    def _choose_batch_class(self) -> type[RunningBatch]:
        name, problems = type(self.module).__name__, []
        candidates = self.module.kernels.batches(self.module, self.config) or BATCH_CLASSES
        with scaled_up_weights(self.module):
            for batch_class in candidates:
                self.batch_class = batch_class
                problem = self._problem()
                if problem is None:
                    if problems:
                        common_notice(f"{name} generates slower, as {batch_class.COST} ({problems[-1]}).")
                    return batch_class
                problems.append(problem)
        raise ValueError(
            f"actor_rollout_ref.rollout.name=hf: {name} samples with other log-probs than it is trained with "
            f"({problems[-1]}). Choose another model (docs/models.md)."
        )

    def _problem(self) -> str | None:
        """Returns why `batch_class` cannot be used, or None: tries rows past any length that the run reaches."""
        mode, stops, self.stop_ids = self.module.training, self.stop_ids, set()
        try:
            batch = self._sample_trial()
            sampled, trained = batch.batch["rollout_log_probs"], trained_log_probs(self.module, batch)
            with torch.autocast(self.module.device.type, enabled=False):
                exact = trained_log_probs(self.module, batch)
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.stop_ids = stops
            self.module.train(mode)
        distance = (sampled - trained).abs().max().item()
        return None if distance < tolerance(trained, exact) else f"log_probs differ by {distance:.1g}"

    def _sample_trial(self) -> DataProto:
        """Samples responses to a prompt twice, to a shorter one, and to one that ends before the length that they go
        past; and to what the latter two begin, as their next turns."""
        width = check_width(self.module, self.config.prompt_length + self.config.response_length)
        rows, prompt_width = ragged_batch(self.module, width).batch["input_ids"] % self.vocab_size, width - TRIAL_TOKENS
        lengths = {0: prompt_width, 1: max(1, prompt_width // 2), 2: max(1, prompt_width - TRIAL_TOKENS)}
        sampling = SamplingParams(True, 1.0, -1, 1.0, TRIAL_TOKENS)
        samples: list[Sample] = []
        try:
            for turn in ([(0, lengths[0]), *lengths.items()], [(1, prompt_width - 1), (2, prompt_width)]):
                requests = [
                    Request(i, rows[row, :length].tolist(), sampling, seed=i, episode=row)
                    for i, (row, length) in enumerate(turn)
                ]
                samples += map(sample_of, requests, self.generate(requests))
        finally:
            self.forget(range(len(rows)))
        return collate(samples, prompt_width, TRIAL_TOKENS, self.pad_token_id)

    def add(self, request: Request) -> None:
        check_request(request, self.vocab_size, self.positions)
        assert self.batch is None or request.id not in self.batch, f"request {request.id} is running already"
        super().add(request)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Lets waiting requests join, if it is time, and draws one token of every row."""
        if not self.has_unfinished_requests():
            return []
        goes_on = False
        try:
            if self.batch is None:
                self._start()
            finished = self._join()
            if len(self.batch):
                finished += self.batch.step()
            goes_on = self._goes_on()
        finally:
            if not goes_on:  # nothing is left to do, or it failed
                self._stop()
        return finished

    @torch.no_grad()
    def abort(self, ids: Iterable[int]) -> None:
        dropped = set(ids)
        super().abort(dropped)
        if self.batch is not None:
            self.batch.drop(dropped)
            if not self._goes_on():
                self._stop()

    def forget(self, episodes: Iterable[int]) -> None:
        if self.batch is not None:
            self.batch.forget(episodes)
            if not self._goes_on():
                self._stop()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_weights(weights, version)
        HFRollout.sleep(self)  # an engine built on this one may sleep otherwise

    def sleep(self) -> None:
        """Keeps nothing any more; the module is as it was, once no request is left."""
        if self.batch is not None and not self.has_unfinished_requests():
            self._stop()

    close = sleep

    def _goes_on(self) -> bool:
        """Returns True if there is something to do, or may soon be, as an episode may have another turn."""
        return self.has_unfinished_requests() or (self.batch is not None and self.batch.goes_on())

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting) or (self.batch is not None and len(self.batch) > 0)

    def tokens_so_far(self, seen: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        return {} if self.batch is None else self.batch.tokens_so_far(seen)

    def _join(self) -> list[Completion]:
        """Gives waiting requests the free places, if there are enough; returns those that end by their first token."""
        free = self.config.max_num_seqs - len(self.batch)
        if not self.waiting or free < self.config.max_num_seqs * REFILL:
            return []
        joining = [self.waiting.pop(request_id) for request_id in [*islice(self.waiting, free)]]
        return self.batch.join(joining)

    def _start(self) -> None:
        self.module.eval()
        self.set_up.callback(self.module.train)
        config, stop_ids, pad_token_id = self.config, self.stop_ids, self.pad_token_id
        limits = config.max_num_batched_tokens, (config.prompt_length + config.response_length) * config.max_num_seqs
        self.batch = self.batch_class(self.module, stop_ids, pad_token_id, self.weight_version, *limits)
        self.set_up.callback(self.batch.close)

    def _stop(self) -> None:
        """Forgets all requests and episodes, and leaves the module as it was before them, to be trained."""
        self.waiting.clear()
        self.batch = None
        self.set_up.close()


def device_tensor(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Copies numbers of the host to `device`, without waiting for it: int64 from a list."""
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=np.int64)
    return to_device(torch.from_numpy(array), device)


def pad_left(prompts: list[tuple[int, ...]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the ids of d prompts and which of them are real, 1 or 0: [d, p] each."""
    width = max(map(len, prompts))
    ids = np.array([[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = np.array([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return device_tensor(ids, device), device_tensor(mask, device)


def inputs_of(module: PreTrainedModel, ids: Tensor, mask: Tensor, new: slice, media: Sequence[Any]) -> dict[str, Any]:
    """Returns what the model is given of the columns `new` of prompts, [b, w], that show `media`."""
    if any(media):
        return module.vision.inputs(ids, mask, media, new)
    return {"input_ids": ids[:, new], "position_ids": positions(mask)[:, new]}


def last_logits(
    module: PreTrainedModel,
    inputs: dict[str, Any],
    mask: Tensor,
    cache: Cache | None,
    **for_attention: Any,
) -> Tensor:
    """Computes the logits after the last of q tokens, [b, V] float32; `mask` [b, cached + q] has the cache too."""
    inputs = {**inputs, "attention_mask": mask, **for_attention}
    if cache is not None:
        inputs["past_key_values"] = cache
    output = module(**inputs, logits_to_keep=1, use_cache=cache is not None)
    return output.logits[:, -1].float()


def sample_rows(logits: Tensor, kinds: Mapping[SamplingParams, Tensor], uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token per row of `logits` [b, V] and its log-prob, as `sample` does: the rows at `kinds[s]` by s."""
    if len(kinds) == 1:
        return sample(logits, next(iter(kinds)), uniforms)
    chosen, log_probs = torch.zeros_like(uniforms, dtype=torch.long), logits.new_zeros(len(logits))
    for sampling, rows in kinds.items():
        chosen[rows], log_probs[rows] = sample(logits[rows], sampling, uniforms[rows])
    return chosen, log_probs


def sample(logits: Tensor, sampling: SamplingParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token per row of `logits` [b, V], and its log-prob under the distribution it was drawn from: both [b].

    `uniforms` [b] float64 in [0, 1) decide: the token is the first at which the cumulative probability passes them.
    """
    if not sampling.do_sample:
        best, chosen = logits.max(-1)
        return chosen, best - logits.logsumexp(-1)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.min_p > 0:
        logits = keep_min_p(logits, sampling.min_p)
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    powers = (logits - logits.amax(-1, keepdim=True)).exp_()
    chosen, total = first_beyond(powers, uniforms)
    return chosen, (powers.gather(-1, chosen[:, None])[:, 0] / total).log().float()


def first_beyond(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the first index of each row of `weights` [b, V] ≥ 0 at which the cumulative sum passes that share of the
    row's sum, [b], never one of weight 0; and the sum [b] float64.

    In two stages, first a block of tokens and then a token of it: one pass over V, and float64 where sums get long.
    """
    width = weights.shape[-1]
    if padding := -width % VOCABULARY_BLOCK:
        weights = F.pad(weights, (0, padding))
    blocks = weights.unflatten(-1, (-1, VOCABULARY_BLOCK))
    masses = blocks.sum(-1).double()
    total = masses.sum(-1)
    block, share = pick(masses, uniforms[:, None])
    token, _ = pick(blocks[torch.arange(len(blocks), device=block.device), block[:, 0]].double(), share)
    return (block * VOCABULARY_BLOCK + token)[:, 0].clamp_(max=width - 1), total


def pick(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the index that `uniforms` [b, 1] fall on in `weights` [b, n], and how far into it they reach, in [0, 1)."""
    sums = weights.cumsum(-1)
    below_total = torch.nextafter(sums[:, -1:], torch.zeros_like(uniforms))  # rounding must not lead beyond the end
    targets = torch.minimum(uniforms * sums[:, -1:], below_total)
    index = torch.searchsorted(sums, targets, right=True).clamp_(max=weights.shape[-1] - 1)  # only NaN leads beyond
    mass = weights.gather(-1, index)
    return index, ((targets - sums.gather(-1, index) + mass) / mass).clamp(0, 1)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Returns the tokens that are at least `p` times as likely as the likeliest, the others −∞ (arXiv:2407.01082)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -torch.inf)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Returns the k largest logits of each row, the others −∞. Ties with the k-th stay."""
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the fewest likeliest tokens whose probability reaches p, the others −∞ (nucleus, arXiv:1904.09751)."""
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= p  # the mass before this token already reaches p
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
