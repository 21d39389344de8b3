"""What a CPU needs to be fast: the process's threads and memory, and products of float32 matrices.

`F.linear` hands its products to the BLAS that torch was built with, which may leave half of another maker's CPU unused.
oneDNN comes with torch as well and picks its kernels by what the CPU can do: 390 against 180 GFLOP/s on two threads of
the AMD EPYC that this was measured on. Where it is not to be had (other devices and precisions, builds without it),
everything here is what torch does anyway.
"""

import ctypes
import gc
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
MAX_INT = 2**31 - 1
KEPT_SHARE, KEPT_BYTES = 1 / 2, 1 << 30  # of what a step needs, or so much: the larger may be kept beyond the need
SETTLING_STEPS = 3  # the first makes the optimiser's moments, and the next two find places for everything beside them
IS_GLIBC = platform.libc_ver()[0] == "glibc"  # other C libraries have no such settings
PLAIN = (Tensor, nn.Parameter)
# torch has it on other CPUs too, where nobody has tried what is done with it here.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


def start_process(n_threads: int) -> None:
    """Sets the size of torch's pool of threads, and keeps freed memory in the process. What has been loaded so far is
    taken to stay: the garbage collector walks it no more (half a million objects, a tenth of a small model's step).

    A step asks for the same large tensors as the one before. By default malloc gives each back to the kernel and has
    it zeroed again page by page, which took longer than the arithmetic on them for tensors of 100 MB (183 against 18
    ms, in a virtual machine). The price: the process keeps what it needed at its peak, and more (`KeptMemory`).
    """
    torch.set_num_threads(n_threads)
    gc.collect()
    gc.freeze()
    if IS_GLIBC:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, MAX_INT)


class KeptMemory:
    """Bounds the memory that `start_process` has the process keep.

    Sizes that differ from step to step break up what is free, so that the process grows where the steps do not. When
    it has grown too far beyond what the first steps needed, all that is free goes back to the kernel, and the next
    steps say anew.
    """

    def __init__(self) -> None:
        self.needed = 0  # bytes of the process
        self.steps = 0  # since it began, or gave back

    def step_done(self) -> None:
        if not IS_GLIBC:
            return
        self.steps += 1
        resident = resident_bytes()
        if self.steps <= SETTLING_STEPS:
            self.needed = max(self.needed, resident)
        elif resident - self.needed > max(KEPT_SHARE * self.needed, KEPT_BYTES):
            ctypes.CDLL(None).malloc_trim(0)
            self.steps = 0


def resident_bytes() -> int:
    """Of this process, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    """The same by several weights and biases, all for oneDNN."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (values, *weights, *biases)):
        return _Linears.apply(values, *weights, *biases)
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
    """The same of values in oneDNN's layout."""
    of_weight, _ = torch.ops.aten.mkldnn_linear_backward_weights(gradient.to_mkldnn(), values, weight, False)
    return of_weight


def values_gradient(gradients: tuple[Tensor, ...], weights: list[Tensor]) -> Tensor:
    """Σ gradient @ weight, [..., out] and [out, in] → [..., in]: each product adds to the sum of those before it."""
    total = onednn_linear(gradients[0], weights[0].T)
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total = torch.ops.mkldnn._linear_pointwise.binary(gradient, total, weight.T, None, "add")
    return total


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = halves(parameters)
        ctx.save_for_backward(values, *weights)
        return tuple(map(partial(onednn_linear, values), weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, *weights = ctx.saved_tensors
        of_values, *of_parameters = ctx.needs_input_grad
        of_weights, of_biases = halves(of_parameters)
        rows = [gradient.flatten(0, -2) for gradient in gradients]
        laid_out = values.flatten(0, -2).to_mkldnn() if any(of_weights) else None
        return (
            values_gradient(gradients, weights) if of_values else None,
            *(
                onednn_weight_gradient(row, laid_out, weight) if wanted else None
                for row, weight, wanted in zip(rows, weights, of_weights, strict=True)
            ),
            *(row.sum(0) if wanted else None for row, wanted in zip(rows, of_biases, strict=True)),
        )


def halves(parameters: Sequence) -> tuple[Sequence, Sequence]:
    """Weights and biases of as many layers."""
    return parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
