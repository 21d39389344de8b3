"""Scores tokens by a language model's head, without the logits of all tokens in memory.

The head is walked in blocks of its vocabulary: a tile of logits [N, block] stays in cache, and a softmax is the softmax
over blocks of the softmaxes within them. Tiles are computed again for their backward (torch's checkpointing), but for
as many as fit into KEPT_BYTES. Several ranks may have a part of the vocabulary each: they tell each other four numbers
a token and rank.
"""

from functools import partial
from itertools import repeat

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from extras.kernels.products import linear

TILE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}  # of one float32 tile: in a CPU's cache; enough to fill a GPU
KEPT_BYTES = 256 << 20  # of all tiles that wait for a backward
MIN_BLOCK = 256  # columns; thinner products are slow


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

    The products run in autocast's dtype, everything else in float32, or float64 if `hidden` is.

    Args:
        hidden: [N, d], the states that predict the labels.
        weight, bias: the head's, [V, d] and [V]; as DTensors, spread by their rows over ranks that call this together.
        labels: [N] int64; one outside [0, V) scores NaN.
        softcap: Gemma 2's `final_logit_softcapping`.
        tile_bytes, kept_bytes: limits of one tile, and of all tiles kept for the backward.

    Returns:
        log_probs, entropy in nats and sum_pi_squared (without gradient), [N] each; None where not asked for.
    """
    mesh, first, vocabulary, device = None, 0, len(weight), hidden.device.type
    if isinstance(weight, DTensor):  # from here on only this rank's rows, and labels counted from the first of them
        mesh = weight.device_mesh
        first = mesh.get_local_rank() * -(-vocabulary // mesh.size())
        hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()

    with_moments = with_entropy or with_sum_pi_squared
    score = partial(score_block, temperature=temperature, softcap=softcap, with_moments=with_moments)
    width = max(MIN_BLOCK, (tile_bytes or TILE_BYTES[device]) // (4 * max(1, len(labels))))
    shifts = repeat(None) if bias is None else bias.split(width)
    kept_blocks, parts = kept_bytes // (4 * width * max(1, len(labels))), []
    for index, (rows, shift) in enumerate(zip(weight.split(width), shifts, strict=False)):
        block = hidden, rows, shift, labels - first - index * width
        again = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
        parts.append(score(*block) if index < kept_blocks else again(*block))
    scores = join_softmaxes(torch.stack(parts))
    if mesh is not None:
        scores = join_softmaxes(DTensor.from_local(scores[None], mesh, [Shard(0)], run_check=False).full_tensor())
    normalizer, entropy, squares, chosen = (scores[kind] for kind in range(4))
    log_probs = (chosen - normalizer).where((labels >= 0) & (labels < vocabulary), torch.nan)
    return log_probs, entropy if with_entropy else None, squares.detach() if with_sum_pi_squared else None


def score_block(
    states: Tensor,
    rows: Tensor,
    shift: Tensor | None,
    column: Tensor,
    *,
    temperature: float,
    softcap: float | None,
    with_moments: bool,
) -> Tensor:
    """Computes log-normalizer, entropy, Σπ² and the label's logit (0: it is elsewhere) of a block's softmax, [4, N]."""
    z = linear(states, rows, shift)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z if temperature == 1 else z / temperature
    inside = (column >= 0) & (column < len(rows))
    chosen = z.gather(1, column.clamp(0, len(rows) - 1).unsqueeze(1)).squeeze(1).where(inside, 0.0)
    entropy = squares = torch.zeros_like(chosen)
    if with_moments:
        log_pi = z.log_softmax(1)
        pi = log_pi.exp()
        entropy, squares = -(pi * log_pi).sum(1), pi.detach().square().sum(1)
    return torch.stack([z.logsumexp(1), entropy, squares, chosen])


def join_softmaxes(parts: Tensor) -> Tensor:
    """Joins log-normalizer, entropy, Σπ² and the label's logit (0: it is elsewhere) of the parts of a vocabulary into
    those of the whole: [parts, 4, N] → [4, N]."""
    normalizers, entropies, squares, chosen = (parts[:, kind] for kind in range(4))
    normalizer = normalizers.logsumexp(0)
    log_share = normalizers - normalizer  # of a part, in a token's distribution
    share = log_share.exp()
    entropy = (share * (entropies - log_share)).sum(0)  # the chain rule of entropy
    return torch.stack([normalizer, entropy, (share.square() * squares).sum(0), chosen.sum(0)])
