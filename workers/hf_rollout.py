"""Rollouts by the Hugging Face model itself: no second copy of the weights, nothing to synchronise.

A sampling loop of our own in place of `generate`. A prompt is prefilled once for all samples of it that start
together; finished rows leave at once and waiting ones take their places; the log-prob comes out of the softmax that is
sampled from. Each token of each row has its own uniform number from the start, by the row's seed, so that draws do not
depend on who shares the batch. No CUDA graphs: on a GPU, a step costs the launch of its kernels.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from configs.schema import RolloutConfig
from training.roles import SamplingParams
from workers.kernels import decoding
from workers.kv_cache import RowCache
from workers.rollout import Completion, Request, Rollout

REFILL = 1 / 8  # of max_num_seqs: so many places have to be free before waiting rows are prefilled
BLOCK = 128  # tokens of the vocabulary whose probabilities are summed before a block is chosen


class HFRollout(Rollout):
    """Samples from `model`, which is the actor's own."""

    def __init__(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(config, tokenizer, model)
        self.module = model
        kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
        if unknown := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
            names = ", ".join(sorted(kind.__name__ for kind in unknown))
            raise ValueError(
                f"{type(model).__name__} keeps more than keys and values from token to token ({names}), which "
                "actor_rollout_ref.rollout.name=hf cannot do: use vllm or sglang"
            )

    @torch.no_grad()
    def generate(self, requests: list[Request]) -> list[Completion]:
        if not requests:
            return []
        prompts, seeds = [request.prompt_ids for request in requests], [request.seed for request in requests]
        sampling = requests[0].sampling
        assert all(request.sampling == sampling for request in requests), "one sampling a batch"
        self.module.eval()
        try:
            rows = min(len(prompts), self.config.max_num_seqs)
            with decoding(self.module, sampling.max_tokens - 1, rows) as shares_prompts:
                stops, pad = self.stop_ids, self.pad_token_id
                batch = Batch(self.module, prompts, stops, pad, sampling, seeds, shares_prompts=shares_prompts)
                batch.run(self.config.max_num_seqs)
        finally:
            self.module.train()
        completions = batch.completions()
        return [
            Completion(request.id, *done, self.weight_version)
            for request, done in zip(requests, completions, strict=True)
        ]


class Batch:
    """The rows of one call: those that wait, those that generate (`alive`, in the cache's order), and their tokens."""

    def __init__(
        self,
        module: PreTrainedModel,
        prompts: list[list[int]],
        stop_ids: set[int],
        pad_token_id: int,
        sampling: SamplingParams,
        seeds: list[int],
        *,
        shares_prompts: bool,
    ) -> None:
        self.module, self.prompts, self.sampling, self.pad_token_id = module, prompts, sampling, pad_token_id
        self.shares_prompts = shares_prompts
        device, shape = module.device, (len(prompts), sampling.max_tokens)
        uniforms = np.stack([np.random.default_rng(seed).random(sampling.max_tokens) for seed in seeds])
        self.uniforms = torch.from_numpy(uniforms).to(device)
        self.stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(shape, device=device)
        self.counts = torch.zeros(len(prompts), dtype=torch.long, device=device)  # of tokens so far
        self.stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.waiting = 0  # the first row that has not joined; rows join in order
        self.alive = torch.empty(0, dtype=torch.long, device=device)
        self.cache: RowCache | None = None

    def run(self, max_num_seqs: int) -> None:
        least_free = max_num_seqs * REFILL if self.shares_prompts else max_num_seqs
        while self.waiting < len(self.prompts) or len(self.alive):
            free = max_num_seqs - len(self.alive)
            if self.waiting < len(self.prompts) and free >= least_free:
                self._join(free)
            if len(self.alive):
                self._step()

    def completions(self) -> list[tuple[list[int], list[float], str]]:
        columns = (self.tokens.tolist(), self.log_probs.tolist(), self.counts.tolist(), self.stopped.tolist())
        return [
            (tokens[:count], log_probs[:count], "stop" if stopped else "length")
            for tokens, log_probs, count, stopped in zip(*columns, strict=True)
        ]

    def _join(self, count: int) -> None:
        """Up to `count` waiting rows draw their first token; those that go on join, behind those alive."""
        first, self.waiting = self.waiting, min(self.waiting + count, len(self.prompts))
        prompts = [tuple(prompt) for prompt in self.prompts[first : self.waiting]]
        distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        prefilled, logits = self._prefill(list(distinct))
        device = logits.device
        source = torch.tensor([distinct[prompt] for prompt in prompts], device=device)
        lengths = torch.tensor([len(prompt) for prompt in distinct], device=device)
        rows = torch.arange(first, self.waiting, device=device)
        stays = ~self._draw(rows, logits[source])
        if stays.any():
            if self.cache is None:
                self.cache = RowCache(prefilled, self.shares_prompts, self.sampling.max_tokens)
            self.cache.join(prefilled, lengths, source[stays])
            self.alive = torch.cat([self.alive, rows[stays]])

    def _step(self) -> None:
        """One more token of each row that is alive; those that end by it leave."""
        gone = self._draw(self.alive, self._forward()).nonzero()[:, 0]
        if len(gone):
            self.alive = self.alive[self.cache.leave(gone)]

    def _draw(self, rows: Tensor, logits: Tensor) -> Tensor:
        """Records the next token of each of `rows` [b]; which of them end by it, [b] bool."""
        counts = self.counts[rows]
        sampled, log_probs = sample(logits, self.sampling, self.uniforms[rows, counts])
        self.tokens[rows, counts] = sampled
        self.log_probs[rows, counts] = log_probs
        self.counts[rows] = counts + 1
        stopped = torch.isin(sampled, self.stops)
        self.stopped[rows] = stopped
        return stopped | (counts + 1 == self.sampling.max_tokens)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[DynamicCache, Tensor]:
        """Keys and values of d prompts, padded on the left, and the logits after them [d, V]."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache()  # not told of sliding windows, so it keeps whole prompts
        ids, mask, positions = (column.to(self.module.device) for column in (ids, mask, positions))
        return cache, last_logits(self.module, ids, positions, mask, cache)

    def _forward(self) -> Tensor:
        """Logits after the last token of each row that is alive: [b, V]."""
        positions = self.cache.step()
        last = self.tokens[self.alive, self.counts[self.alive] - 1, None]
        if self.shares_prompts:
            no_mask = last.new_zeros(1, 1, 1, 1)  # four dimensions: transformers makes none of its own
            logits = last_logits(self.module, last, positions, no_mask, self.cache, rows=self.cache)
        else:
            mask = self.cache.mask(window=None)
            logits = last_logits(self.module, last, positions, None if mask is None else mask.long(), self.cache)
        self.cache.end += 1
        return logits


def last_logits(
    module: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    cache: DynamicCache | RowCache,
    **of_attention: RowCache,
) -> Tensor:
    """Logits after the last of `ids` [b, q]: [b, V] float32. `mask` [b, cached + q]; None if nothing is padding."""
    output = module(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **of_attention,
    )
    return output.logits[:, -1].float()


def sample(logits: Tensor, sampling: SamplingParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [b, V], and its log-prob under the distribution it was drawn from: both [b].

    `uniforms` [b] float64 in [0, 1) decide: the token is the first at which the cumulative probability passes them.
    """
    if not sampling.do_sample:
        best, chosen = logits.max(-1)
        return chosen, best - logits.logsumexp(-1)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    logits = keep_top_p(keep_top_k(logits, sampling.top_k), sampling.top_p)
    powers = (logits - logits.amax(-1, keepdim=True)).exp_()
    chosen, total = first_beyond(powers, uniforms)
    return chosen, (powers.gather(-1, chosen[:, None])[:, 0] / total).log().float()


def first_beyond(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of each row of `weights` [b, V] ≥ 0 whose cumulative sum passes that share of the row's sum, [b],
    never one of weight 0; and the sum [b] float64.

    In two stages, first a block of tokens and then a token of it: one pass over V, and float64 where sums get long.
    """
    weights = F.pad(weights, (0, -weights.shape[-1] % BLOCK)) if weights.shape[-1] % BLOCK else weights
    blocks = weights.unflatten(-1, (-1, BLOCK))
    masses = blocks.sum(-1).double()
    total = masses.sum(-1)
    block, share = pick(masses, uniforms[:, None])
    token, _ = pick(blocks[torch.arange(len(blocks), device=block.device), block[:, 0]].double(), share)
    return (block * BLOCK + token)[:, 0], total


def pick(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The place that `uniforms` [b, 1] fall on in `weights` [b, n], and how far into it they reach, in [0, 1)."""
    sums = weights.cumsum(-1)
    below_total = torch.nextafter(sums[:, -1:], torch.zeros_like(uniforms))  # rounding must not lead beyond the end
    targets = torch.minimum(uniforms * sums[:, -1:], below_total)
    place = torch.searchsorted(sums, targets, right=True)
    mass = weights.gather(-1, place)
    return place, ((targets - sums.gather(-1, place) + mass) / mass).clamp(0, 1)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k largest logits of each row, the others −∞; k < 1 or k ≥ V keeps all. Ties with the k-th stay."""
    if k < 1 or k >= logits.shape[-1]:
        return logits
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches p, the others −∞ (nucleus, arXiv:1904.09751)."""
    if p >= 1:
        return logits
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= p  # the mass before this token already reaches p
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
