"""The packed forward: the rows of a micro-batch without padding, and each distinct prompt once, whatever its samples.

All prompts and then all responses stand in one long row of T tokens. Everything in a transformer but attention looks at
one token at a time and needs to know nothing of it. Attention is given the layout: a prompt's tokens attend to their
prompt, a response's to its prompt and to itself. On a CPU these are two calls of SDPA on [sequences, width] batches; on
a GPU one call of FlexAttention on the row as it is, by a mask that skips blocks of tokens that do not see each other.
Autograd adds up what the samples of a prompt ask of its keys and values. The function is registered with transformers'
attention interface, so no model is patched; called without a layout (generation, padded batches) it is plain SDPA.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "prefix_packed"


class Ragged:
    """n sequences of several lengths, one after another: to [n, width] with padding on the right, and back."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths = torch.tensor(lengths, device=device)
        self.shape = (len(lengths), max(lengths, default=0))
        self.total = sum(lengths)
        self.is_full = self.total == self.shape[0] * self.shape[1]
        self._places = (torch.arange(self.shape[1], device=device) < self.lengths[:, None]).flatten().nonzero()[:, 0]

    def each(self, values: Tensor) -> Tensor:
        """[n] → [total], each sequence's for all its tokens."""
        return values.repeat_interleave(self.lengths, output_size=self.total)

    def pad(self, values: Tensor) -> Tensor:
        """[heads, total, d] → [n, heads, width, d], 0 where there is no token."""
        if not self.is_full:
            padded = values.new_zeros(len(values), self.shape[0] * self.shape[1], values.shape[-1])
            values = padded.index_copy(1, self._places, values)
        return values.unflatten(1, self.shape).transpose(0, 1)

    def unpad(self, padded: Tensor) -> Tensor:
        """[n, heads, width, d] → [heads, total, d]."""
        values = padded.transpose(0, 1).flatten(1, 2)
        return values if self.is_full else values.index_select(1, self._places)


@dataclass(frozen=True)
class Packed:
    """A micro-batch of b rows packed into T tokens: first the d distinct prompts, then the responses.

    A response's last token predicts nothing and is left out.
    """

    input_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    prompts: Ragged  # d of them
    responses: Ragged  # b of them
    prompt_of_row: Tensor  # [b], which prompt a row answers
    predictors: Tensor  # [N], for every response token in order: the place in T of the token that predicts it

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, response_width: int) -> "Packed":
        """Packs [b, p + r] columns: prompts padded on the left to p, responses on the right to `response_width` r."""
        device, split = input_ids.device, input_ids.shape[1] - response_width
        mask = attention_mask.bool()
        prompt_lengths, response_lengths = (part.sum(1).tolist() for part in (mask[:, :split], mask[:, split:]))
        rows = input_ids[:, :split].tolist()
        prompts = [tuple(ids[split - length :]) for ids, length in zip(rows, prompt_lengths, strict=True)]
        distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        prompt_of_row = [distinct[prompt] for prompt in prompts]
        first_rows = [prompt_of_row.index(place) for place in range(len(distinct))]

        forwarded = [max(length - 1, 0) for length in response_lengths]
        is_forwarded = torch.arange(response_width, device=device) < torch.tensor(forwarded, device=device)[:, None]

        def pack(column: Tensor) -> Tensor:
            of_prompts = column[first_rows, :split][mask[first_rows, :split]]
            return torch.cat([of_prompts, column[:, split:][is_forwarded]])

        packed_prompts = Ragged([len(prompt) for prompt in distinct], device)
        prompt_ends = list(accumulate(len(prompt) for prompt in distinct))
        response_starts = list(accumulate(forwarded, initial=packed_prompts.total))
        predictors: list[int] = []
        for row, length in enumerate(response_lengths):
            own = range(response_starts[row], response_starts[row + 1])
            predictors += [prompt_ends[prompt_of_row[row]] - 1, *own][:length]
        return cls(
            pack(input_ids),
            pack(position_ids),
            packed_prompts,
            Ragged(forwarded, device),
            torch.tensor(prompt_of_row, device=device),
            torch.tensor(predictors, dtype=torch.long, device=device),
        )

    @cached_property
    def rows_a_prompt(self) -> int | None:
        """n, if the rows are n for each prompt in turn."""
        n = len(self.prompt_of_row) // self.prompts.shape[0]
        in_turn = torch.arange(self.prompts.shape[0], device=self.prompt_of_row.device).repeat_interleave(n)
        return n if torch.equal(self.prompt_of_row, in_turn) else None

    def for_rows(self, of_prompts: Tensor) -> Tensor:
        """[d, …] → [b, …], each row's prompt's."""
        if self.rows_a_prompt is None:
            return of_prompts.index_select(0, self.prompt_of_row)
        # The same, and its backward is a sum, not an addition row by row.
        return of_prompts.unsqueeze(1).expand(-1, self.rows_a_prompt, *of_prompts.shape[1:]).flatten(0, 1)

    @cached_property
    def positions(self) -> tuple[Tensor, Tensor]:
        """Positions of a response's queries [b, S] and of the keys that they may attend to [b, P + S]."""
        (_, prompt_width), (_, width) = self.prompts.shape, self.responses.shape
        device = self.input_ids.device
        starts = self.prompts.lengths[self.prompt_of_row, None]
        queries = starts + torch.arange(width, device=device)
        prompt_keys = torch.arange(prompt_width, device=device).expand(len(starts), -1)
        beyond = prompt_keys >= starts  # padding: a position that nobody has reached
        prompt_keys = prompt_keys.masked_fill(beyond, prompt_width + width)
        return queries, torch.cat([prompt_keys, queries], dim=1)

    @cached_property
    def response_masks(self) -> dict[int | None, Tensor]:
        """By the width of a sliding window: what a response's tokens may attend to, [b or 1, 1, S, P + S] bool."""
        return {}

    @cached_property
    def block_masks(self) -> dict[int | None, BlockMask]:
        """By the width of a sliding window: what each of the T tokens may attend to."""
        return {}

    def block_mask(self, window: int | None) -> BlockMask:
        if window not in self.block_masks:
            (prompts, _), device, position = self.prompts.shape, self.input_ids.device, self.position_ids
            rows = torch.arange(prompts, prompts + len(self.prompt_of_row), device=device)
            sequence = torch.cat([self.prompts.each(torch.arange(prompts, device=device)), self.responses.each(rows)])
            prompt = torch.cat([sequence[: self.prompts.total], self.responses.each(self.prompt_of_row)])
            oldest = position - (window or len(position)) + 1

            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                own = (sequence[key] == sequence[query]) | (sequence[key] == prompt[query])
                return own & (position[key] <= position[query]) & (position[key] >= oldest[query])

            self.block_masks[window] = create_block_mask(sees, None, None, len(position), len(position), device)
        return self.block_masks[window]

    def response_mask(self, window: int | None) -> Tensor:
        if window not in self.response_masks:
            queries, keys = self.positions
            if self.prompts.is_full:
                queries, keys = queries[:1], keys[:1]
            self.response_masks[window] = within(queries, keys, window).unsqueeze(1)
        return self.response_masks[window]


def within(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Causal, and no further back than the window: positions [b, Q] and [b, K] → [b, Q, K] bool."""
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    return (distance >= 0) & (distance < window) if window else distance >= 0


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: query [1, heads, T, d], key and value [1, key heads, T, d].

    Returns ([1, T, heads, d], None).
    """
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if takes_flex(query):
        # Autocast leaves FlexAttention alone, and the rotation of a bfloat16 query by float32 angles is float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        mask = packed.block_mask(sliding_window)
        return flex_attention_forward(module, query, key, value, mask, scaling=scaling)[0], None
    prompts, responses = packed.prompts, packed.responses
    parts = [tensor.squeeze(0).split([prompts.total, responses.total], dim=1) for tensor in (query, key, value)]
    q, k, v = (prompts.pad(prompt) for prompt, _ in parts)
    gqa = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    window = sliding_window if sliding_window and sliding_window < sum((prompts.shape[1], responses.shape[1])) else None
    if window:
        positions = torch.arange(prompts.shape[1], device=query.device).unsqueeze(0)
        of_prompts = F.scaled_dot_product_attention(q, k, v, within(positions, positions, window), **gqa)
    else:
        of_prompts = F.scaled_dot_product_attention(q, k, v, is_causal=True, **gqa)
    output = prompts.unpad(of_prompts)
    if responses.total:
        k, v = (
            torch.cat([packed.for_rows(prompt), responses.pad(own)], dim=2)
            for prompt, (_, own) in zip((k, v), parts[1:], strict=True)
        )
        q = responses.pad(parts[0][1])
        of_responses = F.scaled_dot_product_attention(q, k, v, packed.response_mask(window), **gqa)
        output = torch.cat([output, responses.unpad(of_responses)], dim=1)
    return output.transpose(0, 1).unsqueeze(0), None


def takes_flex(query: Tensor) -> bool:
    """Where FlexAttention is compiled and has a backward."""
    return query.is_cuda


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def is_packed(module: PreTrainedModel) -> bool:
    """Whether batches go through `module` packed."""
    return module.config._attn_implementation == NAME


def packed_hidden_states(module: PreTrainedModel, packed: Packed) -> Tensor:
    """The last hidden states of all tokens, [T, d]; `module` must have been loaded with attention `NAME`."""
    output = module.base_model(
        input_ids=packed.input_ids.unsqueeze(0),
        position_ids=packed.position_ids.unsqueeze(0),
        attention_mask=packed.input_ids.new_zeros(1, 1, 1, 1),  # four dimensions: transformers makes no mask of its own
        use_cache=False,
        packed=packed,
    )
    return output.last_hidden_state.squeeze(0)
