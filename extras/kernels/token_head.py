"""Scores tokens by a language model's head, without the logits of all tokens in memory.

From the final hidden states of N tokens to log-probs, entropy and Σπ². The head is walked in blocks of its vocabulary:
a tile of logits [N, block] stays in cache, and a softmax is the softmax over blocks of the softmaxes within them. So
a pass reads the weight once and writes each row of its gradient once, however many tokens there are; chunks of tokens
would stream all of both through memory for every chunk.

The backward needs the tiles again: those that fit in `KEPT_BYTES` are kept (head FLOPs per token and weight: 6), the
others are computed again (8). Left out: the model's body, and the choice of the positions to score.

Several ranks may have a part of the vocabulary each, and the same states: then the softmax is that over the blocks of
all, of which they tell each other three numbers a token, and the gradients of the states are added up.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from extras.kernels.products import linear, weight_gradient

TILE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}  # of one float32 tile: in a CPU's cache; enough to fill a GPU
KEPT_BYTES = 256 << 20  # of all tiles that wait for a backward
MIN_BLOCK = 256  # columns; thinner products are slow
ABSENT = -1e30  # log-normalizer of a block that a rank does not have: no share of any softmax


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    tile_bytes: int | None = None,
    kept_bytes: int = KEPT_BYTES,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores labels under softmax(cap(hidden @ weightᵀ + bias) / temperature), cap(x) = softcap·tanh(x / softcap).

    Differentiable in hidden, weight and bias, once; what needs no gradient costs none. Under autocast the matrix
    products run in its dtype, as the model's own head would; everything else is float32, or float64 if `hidden` is.

    Args:
        hidden: [N, d], the states that predict the labels.
        weight, bias: the head's, [V, d] and [V]; as DTensors, spread by their rows over ranks that call this together.
        labels: [N] int64; one outside [0, V) scores NaN.
        softcap: Gemma 2's `final_logit_softcapping`.
        tile_bytes, kept_bytes: for one tile, and for all that a backward finds again.

    Returns:
        log_probs, entropy in nats and sum_pi_squared (without gradient), [N] each; None where not asked for.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    spread = None
    if isinstance(weight, DTensor):
        hidden, weight, bias, labels, spread = _own_part(hidden, weight, bias, labels)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    sizes = tile_bytes or TILE_BYTES[device], kept_bytes if trained else 0
    head = _Head(dtype, temperature, softcap, *sizes, with_entropy, with_sum_pi_squared, spread)
    return _ScoreTokens.apply(hidden, weight, bias, labels, head)


@dataclass(frozen=True)
class _Spread:
    """The ranks of a vocabulary that is cut into parts of `width` numbers; the last ones may have fewer."""

    group: dist.ProcessGroup
    width: int


def _own_part(
    hidden: Tensor, weight: DTensor, bias: DTensor | None, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, _Spread]:
    """Returns the arguments for this rank's rows of a head: labels are counted from the first of them, and the
    gradient of `hidden` is the sum of what all ranks find."""
    mesh = weight.device_mesh
    spread = _Spread(mesh.get_group(), -(-len(weight) // mesh.size()))
    hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    bias = None if bias is None else bias.to_local()
    return hidden, weight.to_local(), bias, labels - spread.group.rank() * spread.width, spread


@dataclass(frozen=True)
class _Head:
    compute_dtype: torch.dtype
    temperature: float
    softcap: float | None
    tile_bytes: int
    kept_bytes: int
    with_entropy: bool
    with_sum_pi_squared: bool
    spread: _Spread | None

    @property
    def dtype(self) -> torch.dtype:
        """The precision of everything but the matrix products."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    def blocks(self, num_tokens: int, vocab_size: int) -> list[slice]:
        width = max(MIN_BLOCK, self.tile_bytes // (self.dtype.itemsize * max(1, num_tokens)))
        return [slice(start, min(start + width, vocab_size)) for start in range(0, vocab_size, width)]

    def tile(self, states: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
        """Computes one block's logits, capped and divided by the temperature: [N, block]."""
        bias = None if bias is None else bias[block].to(self.compute_dtype)
        logits = linear(states, weight[block].to(self.compute_dtype), bias).to(self.dtype)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def statistics(self, z: Tensor) -> Tensor:
        """Computes log-normalizer, entropy and sum of squares of each row's softmax, [3, N]; 0 where not asked for."""
        log_pi = z.log_softmax(1)  # one pass for what would be four
        normalizer = z.amax(1) - log_pi.amax(1)  # any column would do; these are the least rounded
        entropy = squares = torch.zeros_like(normalizer)
        if self.with_entropy or self.with_sum_pi_squared:
            pi = log_pi.exp()
            if self.with_entropy:
                entropy = -(pi * log_pi).sum(1)  # not by vecdot, which autocast has in bfloat16
            if self.with_sum_pi_squared:
                squares = pi.square().sum(1)
        return torch.stack([normalizer, entropy, squares])

    def gather(self, found: Tensor, chosen: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Collects the statistics of all ranks' blocks, [blocks, 3, N], and the logits that `labels` have in the parts
        that they are in, [N]."""
        group, width = self.spread.group, self.spread.width
        own = found.new_zeros(len(self.blocks(len(labels), width)) + 1, *found.shape[1:])
        own[:, 0] = ABSENT
        own[: len(found)] = found
        own[-1, 0] = chosen
        parts = own.new_empty(group.size(), *own.shape)
        dist.all_gather([*parts], own, group=group)
        owner = (labels.div(width, rounding_mode="floor") + group.rank()).clamp(0, len(parts) - 1)
        return parts[:, :-1].flatten(0, 1), parts[:, -1, 0].gather(0, owner.unsqueeze(0)).squeeze(0)


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        states, kept = hidden.to(head.compute_dtype), {}
        blocks = head.blocks(len(labels), len(weight))
        # What outlives a block is allocated before the first: small tensors in the place of a freed tile would break
        # it up for the next one, and the heap would grow by a tile a block.
        chosen = torch.full(labels.shape, torch.nan, dtype=head.dtype, device=labels.device)
        found = torch.empty(len(blocks), 3, len(labels), dtype=head.dtype, device=labels.device)
        for block, statistics in zip(blocks, found, strict=True):
            z = head.tile(states, weight, bias, block)
            if (len(kept) + 1) * z.nbytes <= head.kept_bytes:
                kept[block.start] = z
            inside, column = _find(labels, block)
            torch.where(inside, z.gather(1, column).squeeze(1), chosen, out=chosen)
            statistics.copy_(head.statistics(z))

        if head.spread is not None:
            found, chosen = head.gather(found, chosen, labels)
        normalizers, entropies, squares = found.unbind(1)  # [blocks, N] each
        normalizer = normalizers.logsumexp(0)
        log_share = normalizers - normalizer  # of a block, in a token's distribution
        share, entropy, sum_pi_squared = log_share.exp(), None, None
        if head.with_entropy:
            entropy = (share * (entropies - log_share)).sum(0)  # the chain rule of entropy
        if head.with_sum_pi_squared:
            sum_pi_squared = (share.square() * squares).sum(0)
            ctx.mark_non_differentiable(sum_pi_squared)

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, normalizer, entropy)
        ctx.head, ctx.kept = head, kept
        return chosen - normalizer, entropy, sum_pi_squared

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_log_probs: Tensor | None, d_entropy: Tensor | None, _: None) -> tuple:
        if d_log_probs is None and d_entropy is None:
            return (None,) * 5
        head: _Head = ctx.head
        hidden, weight, bias, labels, normalizer, entropy = ctx.saved_tensors
        wanted = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        d_hidden, d_weight, d_bias = (torch.empty_like(x, dtype=head.dtype) if needed else None for x, needed in wanted)
        if d_hidden is not None:
            d_hidden.zero_()  # a sum over blocks; of the others each writes its own part
        if d_log_probs is None:
            d_log_probs = torch.zeros_like(normalizer)
        # [N, 1] each; the division by the temperature is done here, once for all columns.
        upstream = (d_log_probs / head.temperature).unsqueeze(1)
        entropy_upstream = None if d_entropy is None else (d_entropy / head.temperature).unsqueeze(1)
        states = hidden.to(head.compute_dtype)
        for block in head.blocks(len(labels), len(weight)):
            z = ctx.kept.pop(block.start, None)  # overwritten below: a second backward computes it again
            if z is None:
                z = head.tile(states, weight, bias, block)
            slope = None  # of z by the logits, times the temperature; None: 1
            if head.softcap is not None:
                slope = 1 - (z * (head.temperature / head.softcap)).square_()
            log_pi = z.sub_(normalizer.unsqueeze(1))
            # ∂ log π(label) / ∂z_v = [v = label] - π_v;  ∂H / ∂z_v = -π_v (log π_v + H)
            if entropy_upstream is None:
                d_z = log_pi.exp_().mul_(-upstream)
            else:
                pi = log_pi.exp()
                d_z = pi.mul_(log_pi.add_(entropy.unsqueeze(1)).mul_(-entropy_upstream).sub_(upstream))
            inside, column = _find(labels, block)
            d_logits = d_z.scatter_add_(1, column, inside.unsqueeze(1) * upstream)
            if slope is not None:
                d_logits = d_logits.mul_(slope)
            if d_bias is not None:
                d_bias[block] = d_logits.sum(0)
            d_logits = d_logits.to(head.compute_dtype)
            if d_hidden is not None:
                d_hidden += linear(d_logits, weight[block].to(head.compute_dtype).T)
            if d_weight is not None:
                d_weight[block] = weight_gradient(d_logits, states, weight[block])
        return d_hidden, d_weight, d_bias, None, None


def _find(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Finds which labels lie in the block, [N] bool, and their columns in it, [N, 1] (any column for the others)."""
    column = (labels - block.start).clamp(0, block.stop - block.start - 1)
    return column + block.start == labels, column.unsqueeze(1)
