"""RMSNorm with a backward of its own, for the float32 norms of any model on a CPU.

As autograd takes it apart, the backward is a dozen passes over its tensors and many times the forward. Here it is
LayerNorm's, a single pass of torch's, and a correction for the mean, which RMSNorm does not subtract.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.func import functional_call

from workers.kernels.products import is_plain

PROBE_SCALES = (1.0, 1e-3)  # of what is normalised: with small numbers a wrong ε shows
TOLERANCE = 1e-5


class RMSNorm(nn.Module):
    """Goes before a norm's own class, which keeps what is not plain float32."""

    epsilon: float

    def forward(self, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not is_plain(values, self.weight):
            return super().forward(values, *args, **kwargs)
        return rms_norm(values, self.weight, self.epsilon)


def use_fast_norms(module: nn.Module) -> None:
    """Makes an `RMSNorm` of every layer of `module` that computes one.

    It is tried, not looked up in a list: each family of models has a class of its own, and some scale by 1 + weight.
    """
    for layer in module.modules():
        if is_rms_norm(layer):
            layer.epsilon, layer.__class__ = only_number(layer), faster(type(layer))


@cache
def faster(norm: type[nn.Module]) -> type[nn.Module]:
    return type(norm.__name__, (RMSNorm, norm), {})


@torch.no_grad()
def is_rms_norm(layer: nn.Module) -> bool:
    """Whether it makes of some numbers, with some weights, what `rms_norm` makes of them."""
    weights, eps = list(layer.named_parameters()), only_number(layer)
    if [name for name, _ in weights] != ["weight"] or eps is None:
        return False
    [(_, weight)] = weights
    if weight.ndim != 1 or not is_plain(weight, weight):
        return False
    values = torch.arange(3.0 * len(weight)).sin().view(1, 3, -1)
    weight = torch.arange(1.0, 1 + len(weight)).cos()
    try:
        return all(
            torch.allclose(
                functional_call(layer, {"weight": weight}, scale * values),
                rms_norm(scale * values, weight, eps),
                rtol=TOLERANCE,
                atol=TOLERANCE,
            )
            for scale in PROBE_SCALES
        )
    except (RuntimeError, TypeError):  # it takes other arguments, or shapes
        return False


def only_number(layer: nn.Module) -> float | None:
    """What it holds under whatever name; None if that is none or several."""
    numbers = [value for value in vars(layer).values() if isinstance(value, float)]
    return numbers[0] if len(numbers) == 1 else None


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · values / √(mean of values² + ε), [..., d] and [d] → [..., d]; differentiable once."""
    if torch.is_grad_enabled() and (values.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(values, weight, eps)
    return normalized(values, weight, eps)[0]


def normalized(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same, and the 1 / √… of each token, [..., 1]."""
    length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    factor = length.square_().div_(values.shape[-1]).add_(eps).rsqrt_()
    return (values * factor).mul_(weight), factor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, factor = normalized(values, weight, eps)
        ctx.save_for_backward(values, weight, factor)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, weight, factor = ctx.saved_tensors
        of_values, of_weight, _ = ctx.needs_input_grad
        mean = torch.zeros_like(factor)
        d_values, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, values, weight.shape, mean, factor, weight, None, [of_values, of_weight, False]
        )
        if of_values:  # LayerNorm has subtracted factor · mean(weight · gradient)
            d_values += (gradient @ weight).div_(len(weight)).unsqueeze(-1) * factor
        return d_values, d_weight, None
