"""Draws tokens from logits, by uniform numbers that each row brings."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from data.types import SamplingParams

VOCABULARY_BLOCK = 128  # tokens whose probabilities are summed before a block is chosen


def sample_rows(logits: Tensor, kinds: Mapping[SamplingParams, Tensor], uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [b, V] and its log-prob, as `sample` draws them: the rows at `kinds[s]` by s."""
    if len(kinds) == 1:
        return sample(logits, next(iter(kinds)), uniforms)
    chosen, log_probs = torch.zeros_like(uniforms, dtype=torch.long), logits.new_zeros(len(logits))
    for sampling, rows in kinds.items():
        chosen[rows], log_probs[rows] = sample(logits[rows], sampling, uniforms[rows])
    return chosen, log_probs


def sample(logits: Tensor, sampling: SamplingParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [b, V], and its log-prob under the distribution it was drawn from: both [b].

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
    """The first place of each row of `weights` [b, V] ≥ 0 whose cumulative sum passes that share of the row's sum, [b],
    never one of weight 0; and the sum [b] float64.

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
    """The place that `uniforms` [b, 1] fall on in `weights` [b, n], and how far into it they reach, in [0, 1)."""
    sums = weights.cumsum(-1)
    below_total = torch.nextafter(sums[:, -1:], torch.zeros_like(uniforms))  # rounding must not lead beyond the end
    targets = torch.minimum(uniforms * sums[:, -1:], below_total)
    place = torch.searchsorted(sums, targets, right=True).clamp_(max=weights.shape[-1] - 1)  # only NaN leads beyond
    mass = weights.gather(-1, place)
    return place, ((targets - sums.gather(-1, place) + mass) / mass).clamp(0, 1)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Returns the tokens that are at least `p` times as likely as the likeliest, the others −∞ (arXiv:2407.01082)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -torch.inf)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Returns the k largest logits of each row, the others −∞. Ties with the k-th stay."""
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches p, the others −∞ (nucleus, arXiv:1904.09751)."""
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= p  # the mass before this token already reaches p
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
