"""Layers that are trained as one against each by itself: the same outputs and gradients, and nothing kept."""

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from configs.schema import ModelConfig
from tests.operations import Operations, needs_onednn
from workers.kernels.products import Linear, use_onednn
from workers.kernels.siblings import join_siblings
from workers.models import load_causal_lm

QKV = ("q_proj", "k_proj", "v_proj")
WIDTHS = (6, 2, 3)
LAYOUT = "aten.to_mkldnn"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(biased: str = "") -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(5, out, name in biased) for name, out in zip(QKV, WIDTHS, strict=True)})


def joined(parent: nn.ModuleDict) -> nn.ModuleDict:
    twin = copy.deepcopy(parent)
    use_onednn(twin)
    join_siblings(twin)
    return twin


def loss_of(parent: nn.ModuleDict, values: Tensor) -> Tensor:
    return sum((layer(values).square() * place).sum() for place, layer in enumerate(parent.values(), start=1))


def assert_same_gradients(found: nn.Module, wanted: nn.Module) -> None:
    for actual, expected in zip(found.parameters(), wanted.parameters(), strict=True):
        assert (actual.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-5, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize("frozen", ["", "values", "q_proj", "k_proj v_proj", "q_proj k_proj v_proj"])
@pytest.mark.parametrize("biased", ["", "k_proj", "q_proj k_proj v_proj"])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5), (1, 40)])
def test_outputs_and_gradients_are_those_of_each_by_itself(rows: tuple[int, ...], biased: str, frozen: str):
    plain = attention(biased)
    for name in QKV:
        plain[name].requires_grad_(name not in frozen)
    fast = joined(plain)
    inputs = [numbers(*rows, 5).requires_grad_("values" not in frozen) for _ in range(2)]
    with Operations() as operations:
        loss = loss_of(fast, inputs[0])
        loss.backward()
    wanted = loss_of(plain, inputs[1])
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)
    assert_same_gradients(fast, plain)
    if "values" not in frozen:
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-4)
    trained = sum(name not in frozen for name in QKV)
    assert operations.count[LAYOUT] == (1 + trained if trained else 0)


@needs_onednn
def test_each_gets_what_it_asked_for_whatever_was_asked_before():
    plain, values, other = attention(), numbers(4, 5).requires_grad_(), numbers(4, 5, seed=1).requires_grad_()
    fast, changed = joined(plain), numbers(4, 5, seed=2)
    for name, read in [
        ("q_proj", values),
        ("k_proj", other),
        ("v_proj", values),
        ("q_proj", values),
        ("q_proj", values),
    ]:
        torch.testing.assert_close(fast[name](read), plain[name](read))
    fast["q_proj"](changed)
    torch.testing.assert_close(fast["k_proj"](changed.neg_()), plain["k_proj"](changed))


@needs_onednn
def test_outputs_that_nobody_asks_for_take_no_part():
    plain, values = attention(), numbers(4, 5)
    fast = joined(plain)
    for parent in (fast, plain):
        parent["k_proj"](values).square().sum().backward()
    torch.testing.assert_close(fast["k_proj"].weight.grad, plain["k_proj"].weight.grad)
    assert all(fast[name].weight.grad is None or not fast[name].weight.grad.any() for name in ("q_proj", "v_proj"))


@needs_onednn
def test_nothing_is_kept_once_all_have_their_outputs():
    fast, values = joined(attention()), numbers(4, 5).requires_grad_()
    outputs = [layer(values) for layer in fast.values()]
    kept = [weakref.ref(tensor) for tensor in (values, *outputs)]
    del values, outputs
    gc.collect()
    assert [tensor() for tensor in kept] == [None] * 4


@needs_onednn
def test_without_gradients_and_off_float32_each_goes_by_itself():
    plain, values = attention("q_proj"), numbers(4, 5)
    fast = joined(plain)
    with torch.no_grad(), Operations() as operations:
        torch.testing.assert_close(fast["q_proj"](values), plain["q_proj"](values))
    assert operations.count["mkldnn._linear_pointwise"] == 1
    with torch.autocast("cpu", torch.bfloat16):
        for name in QKV:
            assert torch.equal(fast[name](values), plain[name](values))
    for name in QKV:
        assert torch.equal(fast.double()[name](values.double()), plain.double()[name](values.double()))


@needs_onednn
def test_a_copy_has_siblings_of_its_own():
    fast, values = joined(attention()), numbers(4, 5)
    fast["q_proj"](values)  # the others' wait
    twin = copy.deepcopy(fast)
    assert twin["q_proj"].siblings.layers == [twin[name] for name in QKV] and not twin["q_proj"].siblings.waiting
    before = [layer(values) for layer in twin.values()]
    with torch.no_grad():
        for weight in fast.parameters():
            weight.zero_()
    for layer, expected in zip(twin.values(), before, strict=True):
        torch.testing.assert_close(layer(values), expected)


@needs_onednn
def test_a_layer_of_another_kind_or_width_leaves_the_others_alone():
    class Doubled(nn.Linear):
        pass

    parents = [
        {"gate_proj": nn.Linear(4, 3), "up_proj": nn.Linear(5, 3)},
        {"gate_proj": nn.Linear(4, 3), "up_proj": Doubled(4, 3)},
        {"gate_proj": nn.Linear(4, 3)},
    ]
    for layers in parents:
        parent = joined(nn.ModuleDict(layers))
        assert all(layer.siblings is None for layer in parent.values() if isinstance(layer, Linear))


@needs_onednn
def test_a_model_s_gradients_are_those_of_transformers_and_it_is_saved_as_it_was(tiny_model: Path, tmp_path: Path):
    fast, plain = load_causal_lm(ModelConfig(path=str(tiny_model))), AutoModelForCausalLM.from_pretrained(tiny_model)
    together = {name.split(".")[-1] for name, layer in fast.named_modules() if type(layer) is Linear and layer.siblings}
    assert together == {*QKV, "gate_proj", "up_proj"}
    ids = torch.arange(10).view(2, 5)
    for model in (fast, plain):
        model(input_ids=ids, labels=ids).loss.backward()
    assert_same_gradients(fast, plain)
    fast.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in plain.state_dict().items():
        assert torch.equal(again[name], weight)
