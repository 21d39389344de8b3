"""Small tensor functions that the algorithms and workers share, and the learning-rate schedules.

Masked statistics, log-probs and entropy from logits. Everything is pure: no module, no batch, no config. A mask is
bool, int or float, and what lies under its zeros never matters, not even a NaN.
Left out: log-probs straight from hidden states without whole logits (the workers' chunked head).
"""

import math

import torch
from torch import Tensor

EPSILON = 1e-8  # verl's, in every masked denominator: part of the numerics to agree with
MAX_LOG_RATIO = 20.0  # keeps exp() finite; a token further off policy than this gets no gradient through its ratio


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns `values` on `device`, to which the host copies without waiting for the work that it has launched there:
    a GPU waits by itself, if the memory is pinned."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set and 0 elsewhere, broadcasting; NaN and Inf leak neither forward nor backward."""
    return torch.where(mask.bool(), values, 0)


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum of `values · mask` over `axis` (all axes if None)."""
    return (zero_masked(values, mask) * mask).sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean over the mask; 0 where the mask is empty."""
    return masked_sum(values, mask, axis) / (mask.sum(axis) + EPSILON)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Scalar variance over the mask, with Bessel's correction n / (n - 1) if `unbiased`.

    Raises ValueError if `unbiased` and the mask holds fewer than two elements.
    """
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if count <= 1:
        raise ValueError(
            f"the mask selects {int(count)} elements, but an unbiased variance needs at least 2: "
            "pass more valid tokens, or unbiased=False"
        )
    return variance * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale to unit variance over the mask and, if `shift_mean`, to mean 0; positions outside the mask move along."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + EPSILON)
    return whitened if shift_mean else whitened + mean


def bound_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log_ratio` clamped to ±20, so that its exp() is finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_by_value(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Clamp between tensors; where the bounds cross, `lo` wins."""
    return torch.maximum(torch.minimum(x, hi), lo)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label: logits [..., V] of any float dtype, labels [...] int64 -> [...] float32."""
    return _chosen(logits, labels) - logits.float().logsumexp(-1)


def logprobs_and_entropy_from_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`logprobs_from_logits` and the entropy in nats of each softmax, [...] float32, from one logsumexp."""
    logits = logits.float()
    log_normalizer = logits.logsumexp(-1)
    log_probs = logits - log_normalizer.unsqueeze(-1)
    # not normalizer - Σ p·logits, which cancels where logits are large
    return _chosen(logits, labels) - log_normalizer, -(log_probs.exp() * log_probs).sum(-1)


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Σ_v π_v² of the softmax π of logits [..., V]: [...] float32, 1 where one token is certain and 1/V where none is.

    As exp(logsumexp(2z) - 2 logsumexp(z)).
    """
    logits = logits.float()
    return ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp()


def _chosen(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()


# Learning-rate multipliers: `step` counts from 0 and is the number of updates already made.


def constant_schedule_multiplier(step: int, warmup_steps: int) -> float:
    """Linear warm-up from 0, then 1."""
    return step / warmup_steps if step < warmup_steps else 1.0


def linear_schedule_multiplier(step: int, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0) -> float:
    """Linear warm-up from 0 to 1, then linear down to `min_lr_ratio`."""
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1 - (1 - min_lr_ratio) * progress


def cosine_schedule_multiplier(
    step: int, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0, num_cycles: float = 0.5
) -> float:
    """Linear warm-up from 0 to 1, then a cosine down to `min_lr_ratio`; half a cycle ends at the minimum."""
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_lr_ratio + (1 - min_lr_ratio) * _cosine(progress, num_cycles)


def wsd_schedule_multiplier(
    step: int,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    stable_ratio: float = 0.9,
) -> float:
    """Warm-up, stable, decay: linear from 0, then 1 for `stable_ratio` of the rest, then a cosine to `min_lr_ratio`."""
    after_warmup = total_steps - warmup_steps
    stable_steps = int(after_warmup * stable_ratio)
    decay_steps = after_warmup - stable_steps
    if step < warmup_steps:
        return step / warmup_steps
    if step < warmup_steps + stable_steps:
        return 1.0
    if step < total_steps:
        progress = (step - warmup_steps - stable_steps) / decay_steps
        return min_lr_ratio + (1 - min_lr_ratio) * _cosine(progress, num_cycles)
    return min_lr_ratio


def _cosine(progress: float, num_cycles: float) -> float:
    return 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress))
