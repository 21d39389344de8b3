"""Small tensor functions that the algorithms and workers share, and the learning-rate schedules.

Masked statistics, log-probs and entropy from logits, padding and truncation. Everything is pure: no module, no batch,
no config. A mask is bool, int or float, and what lies under its zeros never matters, not even a NaN.
Left out: log-probs straight from hidden states without whole logits (the workers' chunked head).
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-8  # verl's, in every masked denominator: part of the numerics to agree with
MAX_LOG_RATIO = 20.0  # keeps exp() finite; a token further off policy than this gets no gradient through its ratio


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
    """Within ±20: exp() of it is finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_by_value(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Clamp between tensors; where the bounds cross, `lo` wins."""
    return torch.maximum(torch.minimum(x, hi), lo)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label: logits [..., V] of any float dtype, labels [...] int64 -> [...] float32."""
    return _chosen(logits, labels) - logits.float().logsumexp(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of each softmax: [..., V] of any float dtype -> [...] float32."""
    logits = logits.float()
    return _entropy(logits, logits.logsumexp(-1))


def logprobs_and_entropy_from_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both of the above from one float32 copy of the logits and one logsumexp."""
    logits = logits.float()
    log_normalizer = logits.logsumexp(-1)
    return _chosen(logits, labels) - log_normalizer, _entropy(logits, log_normalizer)


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Σ_v π_v² of the softmax π of logits [..., V]: [...] float32, 1 where one token is certain and 1/V where none is.

    As exp(logsumexp(2z) - 2 logsumexp(z)).
    """
    logits = logits.float()
    return ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp()


def _chosen(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()


def _entropy(logits: Tensor, log_normalizer: Tensor) -> Tensor:
    log_probs = logits - log_normalizer.unsqueeze(-1)
    return -(log_probs.exp() * log_probs).sum(-1)  # not normalizer - Σ p·logits, which cancels where logits are large


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end-of-sequence token (any of `eos_token`), 0 after it; [B, R] -> [B, R]."""
    is_eos = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()
    eos_before = is_eos.cumsum(-1) - is_eos
    return (eos_before == 0).to(dtype)


def pad_2d_list_to_length(response: Sequence[Sequence], pad_token_id: float, max_length: int | None = None) -> Tensor:
    """Ragged rows -> one right-padded tensor [len(response), max(longest row, max_length)]."""
    width = max(max(map(len, response), default=0), max_length or 0)
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """Pad the last axis to `max_seq_len`; a tensor that is as long already comes back as it is, never truncated."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Pad or truncate ids and attention mask, both [B, L], to [B, max_length].

    `truncation` names the side that is cut: "left" keeps the last tokens, "right" the first, "middle" the first
    max_length // 2 and the rest from the end; "error" raises NotImplementedError on rows that are too long.
    """
    assert truncation in ("left", "right", "middle", "error"), (
        f"truncation is {truncation!r}, but must be one of 'left', 'right', 'middle', 'error'"
    )
    assert input_ids.ndim == 2, f"input_ids has shape {tuple(input_ids.shape)}, but must be [batch, length]"
    length = input_ids.shape[-1]
    if length <= max_length:
        padded_ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        return padded_ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    if truncation == "error":
        raise NotImplementedError(
            f"a sequence has {length} tokens, but at most {max_length} are allowed and truncation='error' forbids "
            "cutting it: raise the maximum length, filter the row out, or choose 'left', 'right' or 'middle'"
        )
    num_head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    first_of_tail = length - (max_length - num_head)
    kept = [*range(num_head), *range(first_of_tail, length)]
    return input_ids[:, kept], attention_mask[:, kept]


# Learning-rate multipliers: `step` counts from 0 and is the number of updates already made.


def constant_schedule_multiplier(step: int, warmup_steps: int) -> float:
    """Linear warm-up from 0, then 1."""
    return _warmup(step, warmup_steps) if step < warmup_steps else 1.0


def cosine_schedule_multiplier(
    step: int,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float | None = 0.0,
    num_cycles: float = 0.5,
    init_lr_ratio: float | None = 0.0,
) -> float:
    """Linear warm-up from `init_lr_ratio` to 1, then a cosine down to `min_lr_ratio`; half a cycle ends at the minimum.

    Both ratios are fractions of the peak rate, in [0, 1]; None means 0.
    """
    low = _ratio("min_lr_ratio", min_lr_ratio)
    start = _ratio("init_lr_ratio", init_lr_ratio)
    if step < warmup_steps:
        return _warmup(step, warmup_steps, start)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return low + (1 - low) * _cosine(progress, num_cycles)


def wsd_schedule_multiplier(
    step: int,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float | None = 0.0,
    num_cycles: float = 0.5,
    stable_ratio: float = 0.9,
) -> float:
    """Warm-up, stable, decay: linear from 0, then 1 for `stable_ratio` of the rest, then a cosine to `min_lr_ratio`."""
    low = _ratio("min_lr_ratio", min_lr_ratio)
    after_warmup = total_steps - warmup_steps
    stable_steps = int(after_warmup * stable_ratio)
    decay_steps = after_warmup - stable_steps
    if step < warmup_steps:
        return _warmup(step, warmup_steps)
    if step < warmup_steps + stable_steps:
        return 1.0
    if step < total_steps:
        progress = (step - warmup_steps - stable_steps) / decay_steps
        return low + (1 - low) * _cosine(progress, num_cycles)
    return low


def _warmup(step: int, warmup_steps: int, start: float = 0.0) -> float:
    return start + (1 - start) * step / warmup_steps


def _cosine(progress: float, num_cycles: float) -> float:
    return 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress))


def _ratio(name: str, value: float | None) -> float:
    value = 0.0 if value is None else value
    assert 0 <= value <= 1, f"{name} is {value}, but must lie in [0, 1]: it is a fraction of the peak learning rate"
    return value
