"""Cutting a batch into what fits a forward pass, and the padded forward itself.

A micro-batch is trimmed to its own longest prompt and response. Results come back as [B, R] in the batch's order, so
nobody outside sees how it was cut; losses are normalised by counts of the whole mini-batch, so no gradient does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.protocol import DataProto
from data.seqlen_balancing import micro_batch_indices
from training.torch_functional import (
    calculate_sum_pi_squared_from_logits,
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
)


@dataclass(frozen=True)
class MicroBatchSize:
    """Either so many sequences, or (sequences None) as many as hold `tokens` real tokens."""

    sequences: int | None
    tokens: int


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch: b rows, trimmed to p prompt and r response columns."""

    rows: Tensor  # [b] int64, their places in the batch
    columns: dict[str, Tensor]  # input_ids, attention_mask, position_ids [b, p+r]; all others [b, r]
    response_width: int  # r

    def place(self, values: Tensor, into: Tensor) -> None:
        """Writes [b, r] `values` to these rows of [B, R] `into`; 0 where the response has ended."""
        width = self.response_width
        into[self.rows, :width] = torch.where(self.columns["attention_mask"][:, -width:].bool(), values, 0.0).cpu()


WHOLE_SEQUENCE = ("input_ids", "attention_mask", "position_ids")


def cut(batch: DataProto, size: MicroBatchSize, columns: list[str], device: torch.device) -> Iterator[MicroBatch]:
    """The micro-batches of `batch`, in a fixed order, each row once; `columns` [B, R] travel along."""
    prompt_width = batch.batch["input_ids"].shape[1] - batch.batch["responses"].shape[1]
    mask = batch.batch["attention_mask"]
    lengths = mask.sum(1).tolist()
    tokens = None if size.sequences else size.tokens
    for indices in micro_batch_indices(lengths, max_token_len=tokens, micro_batch_size=size.sequences):
        rows = torch.tensor(indices)
        prompt = int(mask[rows, :prompt_width].sum(1).max())
        width = max(1, int(mask[rows, prompt_width:].sum(1).max()))
        span = slice(prompt_width - prompt, prompt_width + width)
        taken = {name: batch.batch[name][rows, span].to(device) for name in WHOLE_SEQUENCE}
        taken |= {name: batch.batch[name][rows, :width].to(device) for name in ["responses", *columns]}
        yield MicroBatch(rows, taken, width)


class TokenScores(NamedTuple):
    """Of each response token, [b, r] float32 each; None where it was not asked for."""

    log_probs: Tensor
    entropy: Tensor | None  # of the distribution that the token came from
    sum_pi_squared: Tensor | None  # the sum of its squared probabilities


def token_scores(
    module: PreTrainedModel,
    micro: MicroBatch,
    temperature: float,
    with_entropy: bool,
    with_sum_pi_squared: bool = False,
) -> TokenScores:
    """Scores the responses of a micro-batch under `module`.

    The token at column P+t is predicted at column P+t−1; logits are divided by the sampling temperature.
    """
    inputs, place = forward_inputs(micro)
    logits = module(**inputs, use_cache=False, logits_to_keep=micro.response_width).logits[place]
    logits, labels = logits.float() / temperature, micro.columns["responses"]
    squared = calculate_sum_pi_squared_from_logits(logits) if with_sum_pi_squared else None
    if with_entropy:
        return TokenScores(*logprobs_and_entropy_from_logits(logits, labels), squared)
    return TokenScores(logprobs_from_logits(logits, labels), None, squared)


def token_values(module: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """The critic's value before each response token: [b, r] float32."""
    inputs, place = forward_inputs(micro)
    values = module(**inputs, use_cache=False).logits[place]
    return values[:, -micro.response_width :, 0].float()


def forward_inputs(micro: MicroBatch) -> tuple[dict[str, Tensor], Tensor | slice]:
    """What the model is given, and which of its rows answers each row of the micro-batch.

    A sequence's last token predicts nothing and is left out. So responses of one token differ from each other in
    nothing that is put in, and the samples of a prompt share one row.
    """
    inputs = torch.stack([micro.columns[name][:, :-1] for name in WHOLE_SEQUENCE])  # [3, b, p+r−1]
    place = slice(None)
    if micro.response_width == 1:
        inputs, place = inputs.unique(dim=1, return_inverse=True)
    return dict(zip(WHOLE_SEQUENCE, inputs, strict=True)), place
