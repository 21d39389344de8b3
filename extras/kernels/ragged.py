"""Lays out sequences of several lengths as padded batches, and attends to them causally by PyTorch's SDPA.

A batch is cut into blocks of columns. A block has only the sequences that reach it and attends only to the keys up to
it, so neither a few long sequences nor the upper half of the score matrix cost what they would as one rectangle.
"""

from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from workers.micro_batches import to_device

BLOCK = 64  # columns; fewer compute less in vain, at a lower speed


class Block(NamedTuple):
    """Some columns of a padded batch, and how many of its rows reach them: the first ones."""

    rows: int
    start: int
    end: int


class Ragged:
    """n sequences of several lengths, one after another, and as the rows of a batch [n, width]: the longest first,
    padded on the right, and cut into blocks of columns."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths = to_device(torch.tensor(lengths, dtype=torch.long), device)
        self.shape = (len(lengths), max(lengths, default=0))
        self.total = sum(lengths)
        self.is_full = self.total == self.shape[0] * self.shape[1]
        self.order = self.lengths.argsort(descending=True, stable=True)  # [n], the sequence of each row
        self.ranks = torch.empty_like(self.order)  # [n], the row of each sequence
        self.ranks[self.order] = torch.arange(len(lengths), device=device)
        self.blocks = [
            Block(sum(length > start for length in lengths), start, min(start + BLOCK, self.shape[1]))
            for start in range(0, self.shape[1], BLOCK)
        ]
        # Where the elements of each block begin when those of all are written one after another, and where they end.
        self.starts = [0, *accumulate(block.rows * (block.end - block.start) for block in self.blocks)]
        self.elements = self.starts[-1]

    def each(self, values: Tensor) -> Tensor:
        """Repeats each sequence's value for all its tokens: [n] → [total]."""
        return values.repeat_interleave(self.lengths, output_size=self.total)

    def pad(self, values: Tensor) -> Tensor:
        """Pads [heads, total, d] to [n, heads, width, d], 0 where there is no token."""
        if not self.is_full:
            rows, columns = self._cells
            padded = values.new_zeros(len(values), self.shape[0] * self.shape[1], values.shape[-1])
            values = padded.index_copy(1, rows * self.shape[1] + columns, values)
        return values.unflatten(1, self.shape).transpose(0, 1)

    @cached_property
    def places(self) -> Tensor:
        """[total], where each token stands among the elements of all blocks."""
        rows, columns = self._cells
        block = columns // BLOCK
        widths = (self.shape[1] - BLOCK * block).clamp(max=BLOCK)
        return to_device(torch.tensor(self.starts), rows.device)[block] + rows * widths + columns % BLOCK

    @cached_property
    def _cells(self) -> tuple[Tensor, Tensor]:
        """Row and column of each token, [total] each."""
        starts = self.lengths.cumsum(0) - self.lengths
        return self.each(self.ranks), torch.arange(self.total, device=starts.device) - self.each(starts)


class MaskedBlock(NamedTuple):
    """A block, and what is added to its scores: [rows or 1, 1, columns, keys]."""

    block: Block
    mask: Tensor


def masked_blocks(ragged: Ragged, mask: Tensor) -> list[MaskedBlock]:
    """Cuts `mask` [n or 1, 1, width, P + width] into those of the blocks."""
    before = mask.shape[3] - mask.shape[2]
    return [
        MaskedBlock(block, mask[: block.rows, :, block.start : block.end, : before + block.end])
        for block in ragged.blocks
    ]


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: list[MaskedBlock], options: dict[str, Any]) -> Tensor:
    """Attends from padded queries [n, heads, S, d] to keys and values [n, key heads, P + S, d], of which those from P
    on are the queries' own. `options` are SDPA's.

    Returns the elements of all blocks, one block after another: [heads, Σ rows·columns, d].
    """
    if len(blocks) == 1 and blocks[0].block.rows == len(query):
        return in_a_row([F.scaled_dot_product_attention(query, key, value, blocks[0].mask, **options)])
    outputs = []
    for block, mask in blocks:
        query, key, value, *views = _Views.apply(query, key, value, block)
        outputs.append(F.scaled_dot_product_attention(*views, mask, **options))
    return in_a_row(outputs)


def views_of(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts out the queries of a block, and the keys and values that they see."""
    rows, seen = slice(block.rows), slice(key.shape[2] - query.shape[2] + block.end)
    return query[rows, :, block.start : block.end], key[rows, :, seen], value[rows, :, seen]


def in_a_row(outputs: list[Tensor]) -> Tensor:
    """Puts blocks [rows, heads, columns, d] one after another: [heads, Σ rows·columns, d]."""
    flat = [output.transpose(0, 1).flatten(1, 2) for output in outputs]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


class _Views(torch.autograd.Function):
    """Queries, keys and values as they came, for the next block, and those of one block. In the backward, which reaches
    the last block first, a block adds to the gradients of all in place: autograd would make new ones for every view."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.block, ctx.like = block, [torch.empty_like(tensor, device="meta") for tensor in (query, key, value)]
        return query, key, value, *views_of(query, key, value, block)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        totals, parts = gradients[:3], gradients[3:]
        if totals[0] is None:  # the last block
            totals = [torch.zeros_like(like, device=parts[0].device) for like in ctx.like]
        for total, part in zip(views_of(*totals, ctx.block), parts, strict=True):
            total += part
        return *totals, None
