"""The blocked head against the plain formulas on whole logits: values, gradients, precision, memory."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from extras.kernels.tests.operations import Operations
from extras.kernels.token_head import MIN_BLOCK, score_tokens
from tests.batches import relative_distance
from workers.scoring_model import calculate_sum_pi_squared_from_logits, logprobs_and_entropy_from_logits

EVERYTHING = {"with_entropy": True, "with_sum_pi_squared": True}
KEEP_ALL = 1 << 40


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    upstream: Tensor  # [2, N]: of log-prob and of entropy

    def leaves(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Fresh copies of what can be trained."""
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {name: x.to(dtype, copy=True).requires_grad_() for name, x in named.items() if x is not None}


def make_case(num_tokens=7, vocab_size=700, width=5, with_bias=True, scale=1.0, seed=0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias, upstream = (
        torch.randn(shape, generator=generator)
        for shape in [(num_tokens, width), (vocab_size, width), (vocab_size,), (2, num_tokens)]
    )
    labels = torch.randint(vocab_size, (num_tokens,), generator=generator)
    return Case(hidden * scale, weight, bias if with_bias else None, labels, upstream)


def whole_logits(leaves: dict[str, Tensor], temperature=1.0, softcap=None) -> Tensor:
    logits = leaves["hidden"] @ leaves["weight"].T + leaves.get("bias", 0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def plain(leaves: dict[str, Tensor], labels: Tensor, **softmax) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs, entropies and sums of squared probabilities, from whole logits and by plain autograd."""
    log_pi = whole_logits(leaves, **softmax).log_softmax(-1)
    pi = log_pi.exp()
    return log_pi.gather(1, labels.unsqueeze(1)).squeeze(1), -(pi * log_pi).sum(1), pi.square().sum(1)


def blocked(leaves: dict[str, Tensor], labels: Tensor, **options):
    return score_tokens(leaves["hidden"], leaves["weight"], labels, bias=leaves.get("bias"), **options)


def gradients(leaves: dict[str, Tensor], scores: tuple, upstream: Tensor) -> list[Tensor]:
    """Computes the gradients of a loss whose gradient by log-prob and by entropy is `upstream`; a score may be None."""
    loss = sum((score * weight).sum() for score, weight in zip(scores[:2], upstream, strict=True) if score is not None)
    return torch.autograd.grad(loss, [x for x in leaves.values() if x.requires_grad])


@given(
    num_tokens=st.integers(0, 9),
    vocab_size=st.sampled_from([1, 2, MIN_BLOCK - 1, MIN_BLOCK, MIN_BLOCK + 1, 3 * MIN_BLOCK + 7]),
    width=st.integers(1, 6),
    with_bias=st.booleans(),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    tile_bytes=st.sampled_from([1, 9 * 8 * (MIN_BLOCK + 10), None]),
    kept_bytes=st.sampled_from([0, 9 * 8 * MIN_BLOCK, KEEP_ALL]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_scores_and_gradients_are_those_of_whole_logits(
    num_tokens, vocab_size, width, with_bias, temperature, softcap, tile_bytes, kept_bytes, seed
):
    case = make_case(num_tokens, vocab_size, width, with_bias, seed=seed)
    softmax = {"temperature": temperature, "softcap": softcap}
    reference, leaves = case.leaves(torch.float64), case.leaves(torch.float64)
    expected = plain(reference, case.labels, **softmax)
    actual = blocked(leaves, case.labels, **softmax, tile_bytes=tile_bytes, kept_bytes=kept_bytes, **EVERYTHING)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    expected = gradients(reference, expected, case.upstream)
    torch.testing.assert_close(gradients(leaves, actual, case.upstream), expected, rtol=1e-9, atol=1e-9)


def test_only_what_is_asked_for_comes_back_and_squares_carry_no_gradient():
    case = make_case()
    log_probs, entropy, squares = blocked(case.leaves(), case.labels)
    assert log_probs.requires_grad and entropy is None and squares is None
    _, entropy, squares = blocked(case.leaves(), case.labels, **EVERYTHING)
    assert entropy.requires_grad and not squares.requires_grad


PRODUCTS = ("aten.mm", "aten.addmm", "mkldnn._linear_pointwise", "aten.mkldnn_linear_backward_weights")


@pytest.mark.parametrize(
    ("frozen", "kept_bytes", "expected"),
    [
        ([], KEEP_ALL, 3),  # logits, ∂hidden, ∂weight
        ([], 0, 4),  # and the logits again
        (["weight"], KEEP_ALL, 2),
        (["hidden"], KEEP_ALL, 2),
        (["hidden", "weight"], 0, 2),  # the bias alone
    ],
)
def test_frozen_parts_get_no_gradient_and_cost_no_product(frozen, kept_bytes, expected):
    case, num_blocks = make_case(vocab_size=2 * MIN_BLOCK), 2
    reference, leaves = case.leaves(), case.leaves()
    for name in frozen:
        reference[name].requires_grad_(False)
        leaves[name].requires_grad_(False)
    wanted = gradients(reference, plain(reference, case.labels), case.upstream)
    with Operations() as operations:
        scores = blocked(leaves, case.labels, tile_bytes=1, kept_bytes=kept_bytes, with_entropy=True)
        found = gradients(leaves, scores, case.upstream)
    assert sum(operations.count[name] for name in PRODUCTS) == num_blocks * expected
    for actual, reference_gradient in zip(found, wanted, strict=True):
        assert relative_distance([actual], [reference_gradient]) < 1e-5


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_logits_of_ten_thousand_stay_finite_and_accurate(softcap):
    case = make_case(num_tokens=8, width=2, scale=1e4)
    reference, leaves = case.leaves(torch.float64), case.leaves()
    case.labels[:4] = whole_logits(reference).argmax(1)[:4]  # certain tokens beside impossible ones
    expected = plain(reference, case.labels, softcap=softcap)
    actual = blocked(leaves, case.labels, tile_bytes=1, softcap=softcap, **EVERYTHING)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=5e-3)  # a logit's last bit is 2e-3
    assert all(gradient.isfinite().all() for gradient in gradients(leaves, actual, case.upstream))


def test_bf16_autocast_agrees_with_the_model_s_own_head_and_returns_float32_gradients():
    case = make_case(num_tokens=40, vocab_size=900, width=16)
    reference, leaves = case.leaves(), case.leaves()
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.nn.functional.linear(*reference.values())
        actual = blocked(leaves, case.labels, tile_bytes=1, **EVERYTHING)
    assert logits.dtype == torch.bfloat16
    expected = *logprobs_and_entropy_from_logits(logits, case.labels), calculate_sum_pi_squared_from_logits(logits)
    for found, wanted in zip(actual, expected, strict=True):
        assert found.dtype == torch.float32
        assert relative_distance([found], [wanted]) < 5e-3  # both round the logits to bf16, and nothing else
    exact = case.leaves()
    exact_gradients = gradients(exact, plain(exact, case.labels), case.upstream)
    for found, wanted in zip(gradients(leaves, actual, case.upstream), exact_gradients, strict=True):
        assert found.dtype == torch.float32
        assert relative_distance([found], [wanted]) < 0.02


class Made(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.largest = max(self.largest, made.nbytes)
        return made


def test_no_tensor_exceeds_a_tile_or_what_is_trained():
    case = make_case(num_tokens=64, vocab_size=4000, width=8, with_bias=False)
    leaves, tile_bytes = case.leaves(), 64 * 4 * MIN_BLOCK
    assert case.weight.nbytes < 2 * tile_bytes < 64 * 4 * 4000
    with Made() as made:
        scores = blocked(leaves, case.labels, tile_bytes=tile_bytes, **EVERYTHING)
        gradients(leaves, scores, case.upstream)
    assert made.largest == max(tile_bytes, case.weight.nbytes)


def test_a_label_outside_the_vocabulary_scores_nan():
    case = make_case()
    case.labels[2], case.labels[4] = -100, 700
    scores, _, _ = blocked(case.leaves(), case.labels, tile_bytes=1)
    assert scores.isnan().tolist() == [False, False, True, False, True, False, False]
