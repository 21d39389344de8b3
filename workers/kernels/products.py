"""Products of float32 matrices on a CPU, by oneDNN.

`F.linear` hands its products to the BLAS that torch was built with, which may leave half of another maker's CPU unused.
oneDNN comes with torch as well and picks its kernels by what the CPU can do: 390 against 180 GFLOP/s on two threads of
the AMD EPYC that this was measured on. Where it is not to be had (other devices and precisions, builds without it),
everything here is what torch does anyway.
"""

import platform
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

PLAIN = (Tensor, nn.Parameter)
# torch has it on other CPUs too, where nobody has tried what is done with it here.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


class Linear(nn.Linear):
    """nn.Linear by way of oneDNN: the same weight and bias, under the same names."""

    stand_in: Callable[[Tensor], Tensor] | None = None  # computes the same, where there is one
    siblings: Callable[["Linear", Tensor], Tensor] | None = None  # the same with gradients, for several layers

    def forward(self, values: Tensor) -> Tensor:
        if self.stand_in is not None:
            return self.stand_in(values)
        if self.siblings is not None and torch.is_grad_enabled():
            return self.siblings(self, values)
        return linear(values, self.weight, self.bias)


def use_onednn(module: nn.Module) -> None:
    """Makes a `Linear` of every layer of `module` that is exactly an nn.Linear."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """values @ weightᵀ + bias, [..., in] and [out, in] → [..., out]; differentiable once."""
    if not is_for_onednn(values, weight):
        return F.linear(values, weight, bias)
    [output] = linears(values, [weight], [bias])
    return output


def linears(values: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, ...]:
    """values @ weightᵀ + bias by several weights and biases, all for oneDNN."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (values, *weights, *biases)):
        # Rows in and out, as oneDNN would return views of them, in which autograd lets nobody write.
        outputs = _Linears.apply(values.flatten(0, -2), *weights, *biases)
        return tuple(output.unflatten(0, values.shape[:-1]) for output in outputs)
    return tuple(map(partial(onednn_linear, values), weights, biases))


def is_for_onednn(values: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can have the product of these, and is to be had."""
    return is_plain(values, weight) and values.ndim > 1 and HAS_ONEDNN


def is_plain(values: Tensor, weight: Tensor) -> bool:
    """Whether these are float32 tensors on a CPU as they stand, none of them empty or spread over processes."""
    return (
        values.dtype == weight.dtype == torch.float32
        and values.device.type == "cpu"
        and type(weight) in PLAIN
        and type(values) in PLAIN
        and values.numel() > 0
        and weight.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def pack(weight: Tensor, rows: int) -> Tensor:
    """A copy of `weight` [out, in], laid out for products with `rows` rows; opaque to all but `onednn_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def onednn_linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")


def weight_gradient(gradient: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """gradientᵀ @ values: [rows, out] and [rows, in] → [out, in], as `weight` is."""
    if not is_for_onednn(values, weight):
        return gradient.T @ values
    return onednn_weight_gradient(gradient, values.to_mkldnn(), weight)


def onednn_weight_gradient(gradient: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """gradientᵀ @ values, of values in oneDNN's layout."""
    d_weight, _ = torch.ops.aten.mkldnn_linear_backward_weights(gradient.to_mkldnn(), values, weight, False)
    return d_weight


def values_gradient(gradients: tuple[Tensor, ...], weights: list[Tensor]) -> Tensor:
    """Σ gradient @ weight, [n, out] and [out, in] → [n, in]: each product adds to the sum of those before it."""
    total = onednn_linear(gradients[0], weights[0].T)
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total = torch.ops.mkldnn._linear_pointwise.binary(gradient, total, weight.T, None, "add")
    return total


class _Linears(torch.autograd.Function):
    """Products of rows, [n, in], with several weights: [n, out] each."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = halves(parameters)
        ctx.save_for_backward(values, *weights)
        return tuple(map(partial(onednn_linear, values), weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, *weights = ctx.saved_tensors
        wants_values, *wants_parameters = ctx.needs_input_grad
        wants_weights, wants_biases = halves(wants_parameters)
        laid_out = values.to_mkldnn() if any(wants_weights) else None
        return (
            values_gradient(gradients, weights) if wants_values else None,
            *(
                onednn_weight_gradient(gradient, laid_out, weight) if wanted else None
                for gradient, weight, wanted in zip(gradients, weights, wants_weights, strict=True)
            ),
            *(gradient.sum(0) if wanted else None for gradient, wanted in zip(gradients, wants_biases, strict=True)),
        )


def halves(parameters: Sequence) -> tuple[Sequence, Sequence]:
    """Weights and biases of as many layers."""
    return parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
