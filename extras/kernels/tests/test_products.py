"""Products by oneDNN against torch's own and float64's, and what `start_process` asks of malloc."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from configs.schema import ModelConfig
from extras.kernels import products
from extras.kernels.products import Linear, is_for_onednn, linear, packed_linear, use_onednn
from extras.kernels.tests.operations import Operations, needs_onednn
from workers.models import load_causal_lm


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(autouse=True)
def onednn_has_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets oneDNN have all products on any CPU: else half of this file would try nothing where MKL is the faster."""
    monkeypatch.setattr(products, "IS_FASTER", products.HAS_ONEDNN)


def test_where_torch_is_faster_it_has_the_products(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "IS_FASTER", False)
    values, weight = numbers(5, 11).requires_grad_(), numbers(6, 11, seed=1).requires_grad_()
    with Operations() as operations:
        linear(values, weight).sum().backward()
    assert not any("mkldnn" in name for name in operations.count)


@needs_onednn
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (130,), (1, 7), (3, 4)])
def test_values_and_gradients_are_those_of_float64(rows: tuple[int, ...], with_bias: bool):
    """A model may write into the output."""
    shapes = [(*rows, 11), (6, 11), *([(6,)] if with_bias else [])]
    leaves = [numbers(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    upstream = numbers(*rows, 6, seed=9)
    with Operations() as operations:
        found = linear(*leaves)
        found *= 2
        gradients = torch.autograd.grad(found, leaves, upstream)
    wanted = 2 * F.linear(*exact)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for actual, expected in zip(gradients, torch.autograd.grad(wanted, exact, upstream.double()), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    assert "mkldnn._linear_pointwise" in operations.count
    assert not operations.count.keys() & {"aten.mm", "aten.addmm", "aten.linear"}


def test_tensors_that_are_not_for_onednn_go_through_torch():
    weight = numbers(6, 11)
    assert not is_for_onednn(numbers(11), weight)
    assert not is_for_onednn(numbers(0, 11), weight)
    assert not is_for_onednn(numbers(5, 11, dtype=torch.float64), weight.double())
    assert not is_for_onednn(numbers(5, 11).bfloat16(), weight.bfloat16())
    assert linear(numbers(11), weight).shape == (6,)
    assert linear(numbers(0, 11), weight).shape == (0, 6)
    values = numbers(5, 11, dtype=torch.float64)
    assert torch.equal(linear(values, weight.double()), F.linear(values, weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_for_onednn(numbers(5, 11), weight)
        assert linear(numbers(5, 11), weight).dtype == torch.bfloat16


def test_layers_keep_their_names_a_copy_has_weights_of_its_own_and_other_classes_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, values: Tensor) -> Tensor:
            return 2 * super().forward(values)

    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 2, bias=False)), Doubled(2, 2))
    names, values = list(model.state_dict()), numbers(5, 4)
    before = model(values)
    use_onednn(model)
    assert list(model.state_dict()) == names
    assert [type(layer) for layer in model.modules() if isinstance(layer, nn.Linear)] == [Linear, Linear, Doubled]
    torch.testing.assert_close(model(values), before)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    torch.testing.assert_close(twin(values), before)


@needs_onednn
def test_a_model_s_gradients_are_those_of_transformers_and_it_is_saved_as_it_was(tiny_model: Path, tmp_path: Path):
    fast, plain = load_causal_lm(ModelConfig(path=str(tiny_model))), AutoModelForCausalLM.from_pretrained(tiny_model)
    assert {type(layer) for layer in fast.modules() if isinstance(layer, nn.Linear)} == {Linear}
    ids = torch.arange(10).view(2, 5)
    for model in (fast, plain):
        model(input_ids=ids, labels=ids).loss.backward()
    for one, other in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    fast.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in plain.state_dict().items():
        assert torch.equal(again[name], weight)


@needs_onednn
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_a_packed_weight_gives_the_same_products(rows: int):
    weight, bias, values = numbers(17, 40), numbers(17, seed=1), numbers(rows, 1, 40, seed=2)
    found, wanted = packed_linear(weight, bias, rows)(values), F.linear(values, weight, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
