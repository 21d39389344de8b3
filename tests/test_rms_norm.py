"""The faster RMSNorm against the models' own and float64's, and which layers are taken for one."""

import copy
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from configs.schema import ModelConfig
from extras.kernels.norms import EPSILONS, RMSNorm, use_fast_norms
from tests.operations import Operations
from workers.models import load_causal_lm

EPSILON = 1e-2  # large enough to be seen
FAST = "aten.native_layer_norm_backward"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_of(kind: type[nn.Module], width: int) -> nn.Module:
    norm = kind(width, eps=EPSILON)
    norm.weight.data = numbers(width, seed=1)
    return norm


def exact(values: Tensor, weight: Tensor) -> Tensor:
    return weight * values / (values.square().mean(-1, keepdim=True) + EPSILON).sqrt()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(5,), (1, 6), (70, 33), (2, 3, 8), (1, 9, 4, 16)])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen2RMSNorm, Olmo2RMSNorm])
def test_values_and_gradients_are_those_of_float64(kind: type[nn.Module], shape: tuple[int, ...], scale: float):
    norm, values, upstream = (
        norm_of(kind, shape[-1]),
        (scale * numbers(*shape)).requires_grad_(),
        numbers(*shape, seed=2),
    )
    use_fast_norms(norm)
    assert isinstance(norm, kind)
    with Operations() as operations:
        found = norm(values)
        gradients = torch.autograd.grad(found, [values, norm.weight], upstream)
        with torch.no_grad():
            torch.testing.assert_close(norm(values), found, rtol=0, atol=0)
    assert operations.count[FAST] == 1
    leaves = [leaf.detach().double().requires_grad_() for leaf in (values, norm.weight)]
    wanted = exact(*leaves)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for actual, expected in zip(gradients, torch.autograd.grad(wanted, leaves, upstream.double()), strict=True):
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1 / scale)


@pytest.mark.parametrize(("name", "module"), EPSILONS)
def test_every_norm_of_the_table_is_found_and_computes_what_its_own_class_does(name: str, module: str):
    """Forward and backward, for ordinary values and for small ones, where a wrong ε shows."""
    kind, epsilon = getattr(import_module(module), name), EPSILONS[name, module]
    plain, upstream = norm_of(kind, 16), numbers(3, 5, 16, seed=2)
    assert getattr(plain, epsilon) == EPSILON
    fast = copy.deepcopy(plain)
    use_fast_norms(fast)
    assert isinstance(fast, RMSNorm) and isinstance(fast, kind)
    for scale in (1.0, 1e-2, 1e-4):
        found, wanted = [], []
        for norm, results in ((fast, found), (plain, wanted)):
            values = (scale * numbers(3, 5, 16)).requires_grad_()
            output = norm(values)
            results += [output, *torch.autograd.grad(output, [values, norm.weight], upstream)]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


@pytest.mark.parametrize("trained", [0, 1])
def test_only_what_is_trained_gets_a_gradient(trained: int):
    norm, values = norm_of(LlamaRMSNorm, 8), numbers(3, 8)
    plain = copy.deepcopy(norm)
    use_fast_norms(norm)
    gradients = []
    for each in (norm, plain):
        leaves = [values.clone(), each.weight.requires_grad_(False)]
        leaves[trained].requires_grad_()
        each(leaves[0]).square().sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [place == trained for place in range(2)]
        gradients.append(leaves[trained].grad)
    torch.testing.assert_close(*gradients)


def test_autocast_changes_nothing():
    norm, upstream, found = norm_of(LlamaRMSNorm, 33), numbers(70, 33, seed=2), []
    use_fast_norms(norm)
    for casts in (False, True):
        values = numbers(70, 33).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts), Operations() as operations:
            output = norm(values)
            found.append([output, *torch.autograd.grad(output, [values, norm.weight], upstream)])
        assert operations.count[FAST] == 1
    assert all(map(torch.equal, *found))


def test_what_is_not_float32_goes_through_the_layer_s_own_forward():
    norm, values = norm_of(LlamaRMSNorm, 8), numbers(3, 8)
    plain = copy.deepcopy(norm)
    use_fast_norms(norm)
    assert torch.equal(norm(values.bfloat16()), plain(values.bfloat16()))
    assert torch.equal(norm(values.double()), plain(values.double()))
    assert norm(values[:0]).shape == (0, 8)
    assert torch.equal(norm.bfloat16()(values.bfloat16()), plain.bfloat16()(values.bfloat16()))


class Doubled(LlamaRMSNorm):
    def forward(self, values: Tensor) -> Tensor:
        return 2 * super().forward(values)


@pytest.mark.parametrize(
    "layer",
    [
        GemmaRMSNorm(8),  # scales by 1 + weight
        nn.LayerNorm(8, bias=False),
        nn.LayerNorm(8),
        nn.RMSNorm(8),  # its ε is the precision's
        nn.Linear(8, 8, bias=False),
        nn.PReLU(8),
        Doubled(8),  # a class of its own
    ],
)
def test_what_computes_something_else_is_left_alone(layer: nn.Module):
    before = type(layer)
    use_fast_norms(layer)
    assert type(layer) is before


def test_a_copy_has_a_weight_of_its_own():
    model, values = nn.Sequential(norm_of(LlamaRMSNorm, 8)), numbers(3, 8)
    use_fast_norms(model)
    use_fast_norms(model)  # once is enough
    before, twin = model(values), copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    assert isinstance(twin[0], RMSNorm)
    torch.testing.assert_close(twin(values), before)
    twin.load_state_dict(model.state_dict())
    assert not twin(values).any()


def test_a_model_that_was_loaded_is_saved_as_it_was(tiny_model: Path, tmp_path: Path):
    module, plain = load_causal_lm(ModelConfig(path=str(tiny_model))), AutoModelForCausalLM.from_pretrained(tiny_model)
    norms = [layer for layer in module.modules() if isinstance(layer, RMSNorm)]
    assert len(norms) == len([layer for layer in plain.modules() if isinstance(layer, LlamaRMSNorm)])
    module.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list(again.state_dict()) == list(plain.state_dict())
    for name, weight in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
