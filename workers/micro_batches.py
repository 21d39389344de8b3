"""Cutting a batch into what fits a forward pass, and the forward itself, packed or padded.

Packed (workers/prefix_attention.py), a micro-batch has no padding and each of its prompts once; padded, it is trimmed
to its own longest prompt and response. Results come back as [B, R] in the batch's order, so nobody outside sees how it
was cut; losses are normalised by counts of the whole mini-batch, so no gradient does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.padding import repeats_prompt
from data.protocol import DataProto
from data.seqlen_balancing import micro_batch_indices
from training.torch_functional import (
    calculate_sum_pi_squared_from_logits,
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
)
from workers.prefix_attention import Packed, is_packed, packed_hidden_states
from workers.token_head import score_tokens


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

    @cached_property
    def is_real(self) -> Tensor:
        """[b, r] bool: the tokens of the responses."""
        return self.columns["attention_mask"][:, -self.response_width :].bool()

    @cached_property
    def packed(self) -> Packed:
        return Packed.of(*(self.columns[name] for name in WHOLE_SEQUENCE), self.response_width)

    def spread(self, values: Tensor) -> Tensor:
        """[number of response tokens] in order → [b, r], 0 after a response's end."""
        return values.new_zeros(self.is_real.shape).masked_scatter(self.is_real, values)

    def place(self, values: Tensor, into: Tensor) -> None:
        """Writes [b, r] `values` to these rows of [B, R] `into`; 0 where the response has ended."""
        into[self.rows, : self.response_width] = torch.where(self.is_real, values, 0.0).cpu()


WHOLE_SEQUENCE = ("input_ids", "attention_mask", "position_ids")


def cut(batch: DataProto, size: MicroBatchSize, columns: list[str], module: PreTrainedModel) -> Iterator[MicroBatch]:
    """The micro-batches of `batch`, in a fixed order, each row once; `columns` [B, R] travel along.

    By tokens, rows that share a prompt stay together as far as the budget goes, and where `module` computes their
    prompt once it counts once.
    """
    prompt_width = batch.batch["input_ids"].shape[1] - batch.batch["responses"].shape[1]
    mask = batch.batch["attention_mask"]
    for rows in micro_batch_rows(batch, prompt_width, size, is_packed(module)):
        prompt = int(mask[rows, :prompt_width].sum(1).max())
        width = max(1, int(mask[rows, prompt_width:].sum(1).max()))
        span = slice(prompt_width - prompt, prompt_width + width)
        taken = {name: batch.batch[name][rows, span].to(module.device) for name in WHOLE_SEQUENCE}
        taken |= {name: batch.batch[name][rows, :width].to(module.device) for name in ["responses", *columns]}
        yield MicroBatch(rows, taken, width)


def micro_batch_rows(batch: DataProto, prompt_width: int, size: MicroBatchSize, shares_prompts: bool) -> list[Tensor]:
    """The rows of each micro-batch."""
    mask = batch.batch["attention_mask"]
    prompt_lengths, response_lengths = mask[:, :prompt_width].sum(1), mask[:, prompt_width:].sum(1)
    if size.sequences:
        return [torch.tensor(rows) for rows in micro_batch_indices([1] * len(mask), micro_batch_size=size.sequences)]
    is_next = repeats_prompt(batch).tolist()
    units, tokens = [], []  # rows that share a prompt, and what a forward pass of them holds
    for row, (prompt, response) in enumerate(zip(prompt_lengths.tolist(), response_lengths.tolist(), strict=True)):
        if shares_prompts and is_next[row] and tokens[-1] + response <= size.tokens:
            units[-1].append(row)
            tokens[-1] += response
        else:
            units.append([row])
            tokens.append(prompt + response)
    parts = micro_batch_indices(tokens, max_token_len=size.tokens)
    return [torch.tensor([row for unit in part for row in units[unit]]) for part in parts]


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
    labels = micro.columns["responses"]
    if is_packed(module):
        hidden = packed_hidden_states(module, micro.packed)[micro.packed.predictors]
        head = module.get_output_embeddings()
        if not isinstance(head, nn.Linear):  # an adapter's, say, which does more than its weight tells
            raise TypeError(f"its head is a {type(head).__name__}, not a linear layer")
        scores = score_tokens(
            hidden,
            head.weight,
            labels[micro.is_real],
            bias=head.bias,
            temperature=temperature,
            softcap=module.config.to_dict().get("final_logit_softcapping"),
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
        )
        return TokenScores(*(None if values is None else micro.spread(values) for values in scores))
    logits = module(**forward_inputs(micro), logits_to_keep=micro.response_width).logits.float() / temperature
    squared = calculate_sum_pi_squared_from_logits(logits) if with_sum_pi_squared else None
    if with_entropy:
        return TokenScores(*logprobs_and_entropy_from_logits(logits, labels), squared)
    return TokenScores(logprobs_from_logits(logits, labels), None, squared)


def token_values(module: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """The critic's value before each response token: [b, r] float32."""
    if is_packed(module):
        hidden = packed_hidden_states(module, micro.packed)[micro.packed.predictors]
        return micro.spread(module.score(hidden)[:, 0].float())
    values = module(**forward_inputs(micro)).logits
    return values[:, -micro.response_width :, 0].float()


def forward_inputs(micro: MicroBatch) -> dict[str, Tensor]:
    """What the model is given, padded. A sequence's last token predicts nothing and is left out."""
    return {name: micro.columns[name][:, :-1] for name in WHOLE_SEQUENCE} | {"use_cache": False}
