"""Kernels for the narrow work of generation: a step has one token a row, so its matrices are a few rows high.

On a CPU, matrix products of float32 `nn.Linear` layers go through oneDNN with weights laid out for it (2 to 4 times
the speed of the library that `F.linear` calls, for 8 rows and more), and attention reads each key head once for the
query heads that share it. Both stand in for the module's own only while `fast_decoding` lasts, and change nothing but
the order of additions. On other devices and under autocast the module's own work is left as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from workers import prefix_attention

NAME = "narrow_queries"
MIN_ROWS = 4  # below, the packed layout gains nothing


@contextmanager
def fast_decoding(module: PreTrainedModel, rows: int) -> Iterator[None]:
    """`module` computes with these kernels, for batches of about `rows`, until the end of the block."""
    if module.device.type != "cpu" or torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.is_available():
        yield
        return
    linears = [layer for layer in module.modules() if is_packable(layer)] if rows >= MIN_ROWS else []
    attention = module.config._attn_implementation
    try:
        if attention == prefix_attention.NAME:  # a model that takes its attention from the registry
            module.set_attn_implementation(NAME)
        for layer in linears:
            layer.forward = partial(packed_linear, pack(layer.weight, rows), layer.bias)
        yield
    finally:
        for layer in linears:
            layer.__dict__.pop("forward", None)  # the class's is back
        if attention == prefix_attention.NAME:
            module.set_attn_implementation(attention)


def is_packable(layer: nn.Module) -> bool:
    """Whether it is exactly a linear layer, of float32 weights that are not spread over processes."""
    is_plain = type(layer) is nn.Linear and "forward" not in vars(layer)
    return is_plain and type(layer.weight) is nn.Parameter and layer.weight.dtype == torch.float32


def pack(weight: Tensor, rows: int) -> Tensor:
    """A copy of `weight` [out, in], laid out for products with `rows` rows; opaque to all but `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def packed_linear(packed: Tensor, bias: Tensor | None, values: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(values, packed, bias, "none", [], "")


def narrow_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: query [b, heads, q, d], key and value [b, key heads, k, d].

    For q = 1 the query heads of a key head are the rows of one product with it, so keys are neither repeated nor read
    twice. Returns ([b, q, heads, d], None).
    """
    shared = query.shape[1] // key.shape[1]
    if query.shape[2] > 1 or shared == 1 or "position_bias" in kwargs:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    queries = (query * scale).reshape(len(query), key.shape[1], shared, -1)
    scores = queries @ key.transpose(2, 3)  # [b, key heads, shared, k]
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, -torch.inf)
    output = scores.softmax(-1) @ value
    return output.reshape(len(query), 1, query.shape[1], -1), None


AttentionInterface.register(NAME, narrow_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
