"""Multiplies float32 matrices on a CPU by oneDNN.

`F.linear` uses MKL, which leaves the AVX-512 of other makers' CPUs unused: 180 GFLOP/s against oneDNN's 390 on two
threads of an AMD EPYC. Without AVX-512 MKL is the faster of the two, except in products with few rows whose weight was
laid out beforehand. Where oneDNN is not to be had, everything here is what torch does anyway.
"""

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from workers.upstream import onednn_has_bfloat16, onednn_layout, onednn_linear

PLAIN = (Tensor, nn.Parameter)
# torch has it on other CPUs too, where nobody has tried what is done with it here.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
HAS_BFLOAT16 = HAS_ONEDNN and onednn_has_bfloat16()  # with AVX-512, of bfloat16 or by float32
IS_FASTER = HAS_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512"


class Linear(nn.Linear):
    """Does what nn.Linear does by way of oneDNN: the same weight and bias, under the same names."""

    stand_in: Callable[[Tensor], Tensor] | None = None  # computes the same, where there is one

    def forward(self, values: Tensor) -> Tensor:
        return linear(values, self.weight, self.bias) if self.stand_in is None else self.stand_in(values)


def use_onednn(module: nn.Module) -> None:
    """Makes a `Linear` of every layer of `module` that is exactly an nn.Linear."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes values @ weightᵀ + bias, [..., in] and [out, in] → [..., out]; differentiable once."""
    if not (IS_FASTER and is_for_onednn(values, weight)):
        return F.linear(values, weight, bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (values, weight, bias)):
        # Rows in and out, as oneDNN would return a view of them, in which autograd lets nobody write.
        return _Linear.apply(values.flatten(0, -2), weight, bias).unflatten(0, values.shape[:-1])
    return onednn_linear(values, weight, bias)


def is_for_onednn(values: Tensor, weight: Tensor) -> bool:
    """Says whether oneDNN is there and can multiply these, in float32."""
    plain = is_float32(values) and is_float32(weight) and not torch.is_autocast_enabled("cpu")
    return plain and values.ndim > 1 and HAS_ONEDNN


def is_float32(tensor: Tensor) -> bool:
    """Says whether this is a float32 tensor on a CPU, not empty, and not spread over processes."""
    plain = tensor.device.type == "cpu" and type(tensor) in PLAIN
    return plain and tensor.dtype == torch.float32 and tensor.numel() > 0


def packed_linear(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor] | None:
    """Copies `weight` [out, in], in the precision that autocast asks for, laid out for products with `rows` rows.

    Returns:
        The product with it, [..., in] → [..., out]; None where oneDNN has no such layout.
    """
    casts = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if casts else torch.float32
    known = dtype == torch.float32 or (dtype == torch.bfloat16 and HAS_BFLOAT16)
    if not (HAS_ONEDNN and known and is_float32(weight)):
        return None
    packed = onednn_layout(weight.detach().to(dtype), rows)
    bias = None if bias is None else bias.detach().to(dtype)
    return lambda values: onednn_linear(values.to(dtype), packed, bias)


def weight_gradient(gradient: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """Computes gradientᵀ @ values: [rows, out] and [rows, in] → [out, in], as `weight` is."""
    if not (IS_FASTER and is_for_onednn(values, weight)):
        return gradient.T @ values
    d_weight, _ = torch.ops.aten.mkldnn_linear_backward_weights(gradient.to_mkldnn(), values.to_mkldnn(), weight, False)
    return d_weight


class _Linear(torch.autograd.Function):
    """The product of rows, [n, in], with a weight."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight)
        return onednn_linear(values, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        values, weight = ctx.saved_tensors
        wants_values, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            onednn_linear(gradient, weight.T) if wants_values else None,
            weight_gradient(gradient, values, weight) if wants_weight else None,
            gradient.sum(0) if wants_bias else None,
        )
