"""Makes generation faster, whose matrices are a few rows high: a step has one token a row.

Attention reads a prompt's keys and values once for all rows that answer it, and each key head once for the query heads
that share it. On a CPU, the weights of `Linear` layers are copied in the run's precision, laid out for narrow products.
Both stand in for the module's own only while `decoding` lasts, and change nothing but the order of additions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from extras.kernels.cache import RowCache
from extras.kernels.packed_attention import is_packed, known_sdpa_mask, layer_window
from extras.kernels.products import Linear, packed_linear
from workers.upstream import attention_of

NAME = "prefix_rows"
MIN_ROWS, MIN_STEPS = 4, 4  # below, the packed layout gains less than it costs to make


@contextmanager
def decoding(model: PreTrainedModel) -> Iterator[bool]:
    """Has `model` decode fast for the block. Yields whether its attention then reads a prompt once for all rows that
    answer it, and is to be given them as `rows=`; not that of a model which was not prepared."""
    attention = attention_of(model)
    shares_prompts = is_packed(model)
    try:
        if shares_prompts:
            model.set_attn_implementation(NAME)
        yield shares_prompts
    finally:
        for layer in model.modules():
            vars(layer).pop("stand_in", None)
        if shares_prompts:
            model.set_attn_implementation(attention)


def lay_out_weights(model: PreTrainedModel, steps: int, rows: int) -> bool:
    """Lays the weights of `model` out for products with `rows` rows, as they are now, until `decoding` ends.
    Returns whether that is done, which takes some rows and some steps to gain what it costs."""
    gains = rows >= MIN_ROWS and steps >= MIN_STEPS
    for layer in model.modules() if gains else ():
        if isinstance(layer, Linear):
            layer.stand_in = packed_linear(layer.weight, layer.bias, rows)
    return gains


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: RowCache | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends, by transformers' interface, from one token a row to its prompt and its own: query [b, heads, 1, d], key
    and value of own tokens [b, key heads, k, d]. Returns ([b, 1, heads, d], None).

    The queries that answer a prompt are the rows of one product with its keys. Without `rows` it is plain SDPA.
    """
    if rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    layer, (b, heads, _, d) = rows.layers[module.layer_idx], query.shape
    queries = query.reshape(b, key.shape[1], -1, d) * (scaling if scaling is not None else d**-0.5)
    to_prompt = rows.by_row(rows.by_prompt(queries) @ layer.prompt_keys.transpose(2, 3))
    scores = torch.cat([to_prompt, queries @ key.transpose(2, 3)], dim=-1)  # [b, key heads, heads a key head, P + k]
    mask = rows.mask(layer_window(module, kwargs))
    if mask is not None:
        scores.masked_fill_(~mask[:, None, None], -torch.inf)
    widths = [layer.prompt_keys.shape[2], key.shape[2]]
    prompt_weights, own_weights = scores.softmax(-1).to(value.dtype).split(widths, dim=-1)
    output = rows.by_row(rows.by_prompt(prompt_weights) @ layer.prompt_values) + own_weights @ value
    return output.reshape(b, 1, heads, -1), None


def register_row_attention() -> None:
    """Makes the attention known to transformers by its name."""
    AttentionInterface.register(NAME, decode_attention)
    AttentionMaskInterface.register(NAME, known_sdpa_mask)
