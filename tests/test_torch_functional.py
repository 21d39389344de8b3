"""Masked statistics, log-probs and entropy, learning-rate schedules."""

import math

import pytest
import torch

from tests.batches import close
from training.core_algos import (
    clip_by_value,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    whiten_advantages,
    zero_masked,
)
from workers.scoring_model import logprobs_and_entropy_from_logits, logprobs_from_logits

NAN, INF = math.nan, math.inf

# verl's anchor input (spec 12.2).
VALUES = torch.tensor([[1.0, -1.0, -2.0, 1.0], [0.5, 0.5, -0.5, 1.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_statistics_agree_with_verl_for_every_mask_dtype(mask_dtype):
    mask = MASK.to(mask_dtype)
    close(masked_sum(VALUES, mask), -0.5)
    close(masked_sum(VALUES, mask, axis=-1), [-2.0, 1.5])
    close(masked_mean(VALUES, mask), -0.071429)
    close(masked_mean(VALUES, mask, axis=0), [0.75, -0.25, -1.25, 1.0])
    close(masked_var(VALUES, mask), 1.285714)
    close(masked_var(VALUES, mask, unbiased=False), 1.285714 * 6 / 7)
    whitened = [[0.944911, -0.818923, -1.70084, 0.944911], [0.503953, 0.503953, -0.377965, 0.944911]]
    close(masked_whiten(VALUES, mask), whitened)
    close(masked_whiten(VALUES, mask, shift_mean=False), torch.tensor(whitened) - 0.071429)


@pytest.mark.parametrize("hidden", [NAN, INF, -INF])
def test_what_is_masked_leaks_into_neither_value_nor_gradient(hidden):
    values = torch.tensor([1.0, hidden, 3.0], requires_grad=True)
    mask = torch.tensor([1, 0, 1])
    mean = masked_mean(values, mask)
    mean.backward()
    close(mean, 2.0)
    close(values.grad, [0.5, 0.0, 0.5])
    close(zero_masked(values, mask), [1.0, 0.0, 3.0])


def test_an_empty_mask_has_mean_zero_and_no_variance():
    values, empty = torch.ones(3), torch.zeros(3)
    assert masked_mean(values, empty) == 0
    assert masked_var(values, empty, unbiased=False) == 0
    with pytest.raises(ValueError, match="selects 0 elements"):
        masked_var(values, empty)
    one = torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match="selects 1 elements"):
        masked_whiten(values, one)
    assert not whiten_advantages(values, one).any(), "a batch of one token ends no run"


def test_clip_by_value_takes_tensor_bounds_and_the_lower_one_wins():
    x = torch.tensor([0.0, 5.0, 2.0, 0.0])
    close(
        clip_by_value(x, torch.tensor([1.0, 1.0, 1.0, 3.0]), torch.tensor([3.0, 3.0, 3.0, 1.0])), [1.0, 3.0, 2.0, 3.0]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logprobs_and_entropy_are_float32_and_equal_a_loop_over_positions(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(2, 3, 5) * 4).to(dtype)
    labels = torch.randint(5, (2, 3))
    log_probs, entropy = logprobs_and_entropy_from_logits(logits, labels)
    assert log_probs.dtype == entropy.dtype == torch.float32
    for row, position in [(row, position) for row in range(2) for position in range(3)]:
        weights = [math.exp(z) for z in logits[row, position].tolist()]
        probs = [weight / sum(weights) for weight in weights]
        close(log_probs[row, position], math.log(probs[labels[row, position]]), 1e-5)
        close(entropy[row, position], -sum(p * math.log(p) for p in probs), 1e-5)
    assert torch.equal(logprobs_from_logits(logits, labels), log_probs)
