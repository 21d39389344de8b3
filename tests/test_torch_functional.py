"""Masked statistics, log-probs and entropy, padding and truncation, learning-rate schedules."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.torch_functional import (
    clip_by_value,
    constant_schedule_multiplier,
    cosine_schedule_multiplier,
    entropy_from_logits,
    get_response_mask,
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    pad_2d_list_to_length,
    pad_sequence_to_length,
    postprocess_data,
    wsd_schedule_multiplier,
    zero_masked,
)

NAN, INF = math.nan, math.inf

# verl's anchor input (spec 12.2).
VALUES = torch.tensor([[1.0, -1.0, -2.0, 1.0], [0.5, 0.5, -0.5, 1.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected), rtol=tolerance, atol=tolerance, check_dtype=False
    )


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


@given(st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_masked_statistics_equal_those_of_the_selected_list(entries):
    selected = [value for value, keep in entries if keep]
    values = torch.tensor([value if keep else NAN for value, keep in entries], dtype=torch.float64)
    mask = torch.tensor([keep for _, keep in entries])
    mean = sum(selected) / max(len(selected), 1)
    close(masked_sum(values, mask), float(sum(selected)))
    close(masked_mean(values, mask), mean)
    if len(selected) > 1:
        variance = sum((value - mean) ** 2 for value in selected) / (len(selected) - 1)
        close(masked_var(values, mask), variance)
        expected = [(value - mean) / math.sqrt(variance + 1e-8) for value in selected]
        close(masked_whiten(values, mask)[mask], torch.tensor(expected, dtype=torch.float64))


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
    with pytest.raises(ValueError, match="selects 1 elements"):
        masked_whiten(values, torch.tensor([0, 1, 0]))


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
    log_probs, entropy = logprobs_from_logits(logits, labels), entropy_from_logits(logits)
    assert log_probs.dtype == entropy.dtype == torch.float32
    for row, position in [(row, position) for row in range(2) for position in range(3)]:
        weights = [math.exp(z) for z in logits[row, position].tolist()]
        probs = [weight / sum(weights) for weight in weights]
        close(log_probs[row, position], math.log(probs[labels[row, position]]), 1e-5)
        close(entropy[row, position], -sum(p * math.log(p) for p in probs), 1e-5)
    both = logprobs_and_entropy_from_logits(logits, labels)
    assert torch.equal(both[0], log_probs) and torch.equal(both[1], entropy)


def test_logprobs_and_entropy_have_the_gradients_of_softmax():
    torch.manual_seed(1)
    logits = torch.randn(2, 4, requires_grad=True)
    labels = torch.tensor([3, 0])
    probs = logits.detach().softmax(-1)
    (by_log_prob,) = torch.autograd.grad(logprobs_from_logits(logits, labels).sum(), logits)
    close(by_log_prob, torch.nn.functional.one_hot(labels, 4) - probs)
    (by_entropy,) = torch.autograd.grad(entropy_from_logits(logits).sum(), logits)
    entropy = -(probs * probs.log()).sum(-1, keepdim=True)
    close(by_entropy, -probs * (probs.log() + entropy))


def test_logits_of_any_size_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    close(logprobs_from_logits(logits, torch.tensor([2])), [-2e4])
    close(entropy_from_logits(logits), [0.0])


def test_response_mask_ends_with_the_first_eos_of_any_kind():
    response = torch.tensor([[5, 2, 7, 2], [5, 6, 7, 8], [2, 2, 2, 2], [5, 6, 9, 2]])
    assert get_response_mask(response).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    either = get_response_mask(response, eos_token=[2, 9], dtype=torch.bool)
    assert either.dtype == torch.bool
    assert either.tolist()[3] == [True, True, True, False]


def test_ragged_lists_are_padded_on_the_right_to_the_longest_or_more():
    ragged = [[1, 2, 3], [], [4]]
    assert pad_2d_list_to_length(ragged, 0).tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert pad_2d_list_to_length(ragged, 9, max_length=4).tolist() == [[1, 2, 3, 9], [9, 9, 9, 9], [4, 9, 9, 9]]
    assert pad_2d_list_to_length(ragged, 9, max_length=2).shape == (3, 3)
    assert pad_2d_list_to_length([[-0.5], [-1.0, -2.0]], 0.0).dtype == torch.float32


def test_sequences_are_padded_on_the_chosen_side_and_never_truncated():
    ids = torch.tensor([[1, 2]])
    assert pad_sequence_to_length(ids, 4, 9).tolist() == [[1, 2, 9, 9]]
    assert pad_sequence_to_length(ids, 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
    assert pad_sequence_to_length(ids, 1, 9).tolist() == [[1, 2]]


def test_postprocess_pads_ids_and_mask_alike():
    ids, mask = torch.tensor([[1, 2]]), torch.tensor([[1, 1]])
    left = postprocess_data(ids, mask, 3, pad_token_id=9)
    right = postprocess_data(ids, mask, 3, pad_token_id=9, left_pad=False)
    assert [t.tolist() for t in left] == [[[9, 1, 2]], [[0, 1, 1]]]
    assert [t.tolist() for t in right] == [[[1, 2, 9]], [[1, 1, 0]]]


@pytest.mark.parametrize(
    ("truncation", "max_length", "kept"),
    [
        ("left", 3, [4, 5, 6]),
        ("right", 3, [1, 2, 3]),
        ("middle", 3, [1, 5, 6]),
        ("middle", 4, [1, 2, 5, 6]),
        ("middle", 1, [6]),
        ("error", 6, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_truncation_names_the_side_that_is_cut(truncation, max_length, kept):
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    out_ids, out_mask = postprocess_data(ids, ids * 10, max_length, pad_token_id=0, truncation=truncation)
    assert out_ids.tolist() == [kept]
    assert out_mask.tolist() == [[10 * token for token in kept]]


def test_postprocess_refuses_what_it_may_not_cut():
    ids = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="5 tokens, but at most 3"):
        postprocess_data(ids, ids, 3, pad_token_id=0)
    with pytest.raises(AssertionError, match="truncation is 'both'"):
        postprocess_data(ids, ids, 3, pad_token_id=0, truncation="both")
    with pytest.raises(AssertionError, match=r"shape \(5,\)"):
        postprocess_data(ids[0], ids[0], 3, pad_token_id=0)


def test_constant_schedule_warms_up_from_zero():
    assert [constant_schedule_multiplier(step, 4) for step in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert constant_schedule_multiplier(0, 0) == 1


def test_cosine_schedule_reaches_its_minimum_at_the_last_step():
    multipliers = [cosine_schedule_multiplier(step, 2, 6, min_lr_ratio=0.2) for step in range(7)]
    quarter = 0.4 * math.cos(math.pi / 4)
    close(multipliers, [0, 0.5, 1, 0.6 + quarter, 0.6, 0.6 - quarter, 0.2])


def test_cosine_schedule_may_start_above_zero_and_run_whole_cycles():
    assert cosine_schedule_multiplier(1, 2, 6, init_lr_ratio=0.5) == 0.75
    close([cosine_schedule_multiplier(step, 0, 4, num_cycles=1.0) for step in range(5)], [1, 0.5, 0, 0.5, 1])
    assert cosine_schedule_multiplier(0, 0, 0, min_lr_ratio=None, init_lr_ratio=None) == 1


def test_wsd_schedule_warms_up_holds_and_decays():
    # 2 warm-up steps, then 10: 8 stable, 2 of decay.
    multipliers = [wsd_schedule_multiplier(step, 2, 12, min_lr_ratio=0.1, stable_ratio=0.8) for step in range(14)]
    close(multipliers, [0, 0.5] + [1.0] * 9 + [0.55] + [0.1] * 2)
    assert wsd_schedule_multiplier(7, 5, 3) == 0  # a warm-up longer than the run


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_ratios_outside_the_unit_interval_are_refused(ratio):
    with pytest.raises(AssertionError, match=f"min_lr_ratio is {ratio}"):
        cosine_schedule_multiplier(0, 0, 1, min_lr_ratio=ratio)
    with pytest.raises(AssertionError, match=f"init_lr_ratio is {ratio}"):
        cosine_schedule_multiplier(0, 0, 1, init_lr_ratio=ratio)
