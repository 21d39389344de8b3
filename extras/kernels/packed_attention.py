"""Forwards the rows of a micro-batch packed: without padding, and each distinct prompt once, whatever its samples.

All prompts and then all responses stand in one long row of T tokens; attention alone has to know of it: a prompt's
tokens attend to their prompt, a response's to its prompt and to itself. On a CPU, prompts and responses are each a
padded batch that SDPA is given by blocks of columns (ragged.py). On a GPU it is one call of FlexAttention on the row as
it is, by a mask that skips blocks of tokens that do not see each other. The function is registered with transformers'
attention interface; called without a layout (generation, padded batches) it is plain SDPA.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from data.padding import PromptIds
from extras.kernels.ragged import MaskedBlock, Ragged, attend, masked_blocks
from extras.kernels.token_head import score_tokens
from workers.micro_batches import WHOLE_SEQUENCE, MicroBatch, TokenScores, to_device
from workers.upstream import attention_of, dynamo, is_view

NAME = "prefix_packed"
OTHERS = ("softcap", "s_aux", "position_bias")  # changes to the scores that some models ask for, not supported here
FLEX_BLOCK = 128  # tokens of a block of FlexAttention's mask
NARROWEST_HEAD = 16  # of FlexAttention's kernels
# Torch's own for heads of 128 in float32 take more shared memory than the 99 KiB of small cards; these fit up to 256.
FLOAT32_BLOCKS = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2}
MOST_GRAPHS = 64  # of FlexAttention in a process: a policy makes 2, a critic of other heads as many
HAS_PADDING: ContextVar[bool | None] = ContextVar("has_padding", default=None)  # the batch; None: nobody has said
PAIRS = 2**26  # of tokens that are looked at together where a mask is made: at 4 bytes a pair, 256 MiB


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
    predictors: Tensor  # [N], for every scored token in order: the place in T of the token that predicts it
    media: list[Any] | None = None  # d, what each prompt shows beside its text
    # The results of `masked_blocks` and `block_mask`, which all layers share.
    masked: dict[tuple[int | None, torch.dtype], list[list[MaskedBlock]]] = field(default_factory=dict)
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict)

    @classmethod
    def of(cls, micro: MicroBatch, device: torch.device) -> "Packed":
        """Packs a micro-batch for `device`, by its columns on the host: sizes are known there without a wait."""
        input_ids, attention_mask, position_ids = map(micro.host.columns.get, WHOLE_SEQUENCE)
        response_width, split = micro.response_width, input_ids.shape[1] - micro.response_width
        mask = attention_mask.bool()
        prompt_lengths, response_lengths = mask[:, :split].sum(1).tolist(), mask[:, split:].sum(1).tolist()
        rows = input_ids[:, :split].tolist()
        prompts = [tuple(ids[split - length :]) for ids, length in zip(rows, prompt_lengths, strict=True)]
        if micro.media is not None:
            prompts = [*map(PromptIds, prompts, micro.media)]
        distinct: dict[Any, int] = {}  # the number of each distinct prompt
        prompt_of_row = [distinct.setdefault(prompt, len(distinct)) for prompt in prompts]
        firsts = [prompt_of_row.index(number) for number in range(len(distinct))]

        forwarded = [max(length - 1, 0) for length in response_lengths]
        is_forwarded = torch.arange(response_width) < torch.tensor(forwarded)[:, None]

        def pack(column: Tensor) -> Tensor:
            prompt_tokens = column[firsts, :split][mask[firsts, :split]]
            return to_device(torch.cat([prompt_tokens, column[:, split:][is_forwarded]]), device)

        packed_prompts = Ragged([*map(len, distinct)], device)
        prompt_ends = [*accumulate(map(len, distinct))]
        response_starts = list(accumulate(forwarded, initial=packed_prompts.total))
        predictors: list[int] = []
        for row, length in enumerate(response_lengths):
            response_tokens = range(response_starts[row], response_starts[row + 1])
            predictors += [prompt_ends[prompt_of_row[row]] - 1, *response_tokens][:length]
        is_scored = micro.host.is_scored[micro.host.is_real]
        return cls(
            pack(input_ids),
            pack(position_ids),
            packed_prompts,
            Ragged(forwarded, device),
            to_device(torch.tensor(prompt_of_row), device),
            to_device(torch.tensor(predictors, dtype=torch.long)[is_scored], device),
            None if micro.media is None else [prompt.media for prompt in distinct],
        )

    @cached_property
    def answered(self) -> Tensor:
        """[b], for each row of the padded responses, that of the padded prompts."""
        return self.prompts.ranks[self.prompt_of_row[self.responses.order]]

    def for_rows(self, values: Tensor) -> Tensor:
        """Repeats each prompt's values for the rows that answer it: [d, …] → [b, …], both padded."""
        rows = values.index_select(0, self.answered)
        if rows.requires_grad:
            rows.register_hook(Tensor.contiguous)  # they are added row by row, much faster so
        return rows

    @cached_property
    def places(self) -> Tensor | None:
        """[T], of each token among the elements of the prompts' blocks and the responses'; None: as they stand."""
        places = torch.cat([self.prompts.places, self.prompts.elements + self.responses.places])
        stand = torch.arange(self.prompts.elements + self.responses.elements, device=places.device)
        return None if torch.equal(places, stand) else places

    def masked_blocks(self, window: int | None, dtype: torch.dtype) -> list[list[MaskedBlock]]:
        """Cuts the masks of the padded prompts and responses: 0 for the keys that a token attends to within a sliding
        window, −∞ for the others."""
        if (window, dtype) not in self.masked:
            (_, prompt_width), (_, width) = self.prompts.shape, self.responses.shape
            columns = torch.arange(prompt_width, device=self.input_ids.device).unsqueeze(0)
            starts = self.prompts.lengths[self.prompts.order][self.answered, None]
            if self.prompts.is_full:
                starts = starts[:1]  # one for all
            queries = starts + torch.arange(width, device=starts.device)
            # Padding has a position that nobody reaches.
            keys = torch.cat([torch.where(columns < starts, columns, prompt_width + width), queries], dim=1)
            seen = (self.prompts, within(columns, columns, window)), (self.responses, within(queries, keys, window))
            zero = torch.zeros((), dtype=dtype, device=starts.device)
            self.masked[window, dtype] = [
                masked_blocks(ragged, torch.where(mask.unsqueeze(1), zero, -torch.inf)) for ragged, mask in seen
            ]
        return self.masked[window, dtype]

    def block_mask(self, window: int | None) -> BlockMask:
        """Tells FlexAttention which tokens see each other. Of two blocks at least: dynamo compiles sizes of 1 anew, and
        below 128 tokens the kernel would be another. Those beyond T see only each other."""
        if window not in self.block_masks:
            (prompts, _), device = self.prompts.shape, self.input_ids.device
            rows = torch.arange(prompts, prompts + len(self.prompt_of_row), device=device)
            sequence = torch.cat([self.prompts.each(torch.arange(prompts, device=device)), self.responses.each(rows)])
            prompt = torch.cat([sequence[: self.prompts.total], self.responses.each(self.prompt_of_row)])
            missing = (0, max(2 * FLEX_BLOCK - len(sequence), 0))
            sequence, prompt = F.pad(sequence, missing, value=-1), F.pad(prompt, missing, value=-1)
            position = F.pad(self.position_ids, missing)
            oldest = position - (window or len(position)) + 1

            def sees(batch: Tensor | None, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
                same_row = (sequence[key] == sequence[query]) | (sequence[key] == prompt[query])
                return same_row & (position[key] <= position[query]) & (position[key] >= oldest[query])

            self.block_masks[window] = make_block_mask(sees, len(position), device)
        return self.block_masks[window]


def make_block_mask(sees: Callable[..., Tensor], length: int, device: torch.device) -> BlockMask:
    """Makes what torch's `create_block_mask` does, for `length` queries and keys, without all their pairs at once."""
    blocks = -(-length // FLEX_BLOCK)
    places = torch.arange(blocks * FLEX_BLOCK, device=device)
    is_real, places = places < length, places.clamp(max=length - 1)
    rows = max(PAIRS // (len(places) * FLEX_BLOCK), 1) * FLEX_BLOCK
    counts = []  # of the pairs that see each other, in each pair of blocks
    for queries, are_real in zip(places.split(rows), is_real.split(rows), strict=True):
        seen = sees(None, None, queries.unsqueeze(1), places) & are_real.unsqueeze(1) & is_real
        counts.append(seen.view(-1, FLEX_BLOCK, blocks, FLEX_BLOCK).sum((1, 3), dtype=torch.int32))
    count = torch.cat(counts)
    is_full = count == FLEX_BLOCK**2
    partial, full = chosen_first((count > 0) & ~is_full), chosen_first(is_full)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(length, length))


def chosen_first(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Counts what is chosen in each row of [R, C] bool, and lists its columns before the others: int32 [1, 1, R] and
    [1, 1, R, C]."""
    chosen = chosen.int()[None, None]
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()


def within(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Masks keys that come later or are further back than the window: positions [b, Q] and [b, K] → [b, Q, K] bool."""
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    return (distance >= 0) & (distance < window) if window else distance >= 0


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends by transformers' interface: query [1, heads, T, d], key and value [1, key heads, T, d].

    Returns ([1, T, heads, d], None).
    """
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    window = layer_window(module, kwargs)
    if takes_flex(query, value):
        return flex(query, key, value, packed.block_mask(window), scaling).transpose(1, 2), None
    prompts, responses = packed.prompts, packed.responses
    if window is not None and window >= prompts.shape[1] + responses.shape[1]:
        window = None
    prompt_blocks, response_blocks = packed.masked_blocks(window, query.dtype)
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    parts = [tensor.squeeze(0).split([prompts.total, responses.total], dim=1) for tensor in (query, key, value)]
    q, k, v = (prompts.pad(prompt) for prompt, _ in parts)
    outputs = [attend(q, k, v, prompt_blocks, options)]
    if responses.total:
        k, v = (
            torch.cat([packed.for_rows(prompt), responses.pad(response)], dim=2)
            for prompt, (_, response) in zip((k, v), parts[1:], strict=True)
        )
        outputs.append(attend(responses.pad(parts[0][1]), k, v, response_blocks, options))
    output = torch.cat(outputs, dim=1)
    if packed.places is not None:
        output = output.index_select(1, packed.places)
    return output.transpose(0, 1).unsqueeze(0), None


def layer_window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Returns how far back the attention layer `module` sees, itself included; None: without limit.

    Reads it from `kwargs`, else from the layer's config: some layers leave their window to the mask.

    Raises:
        ValueError: it attends in a way that is not supported here.
    """
    if unsupported := [name for name in OTHERS if kwargs.get(name) is not None]:
        raise ValueError(f"its attention asks for {unsupported[0]}")
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"] or None
    config = vars(module.config)
    kinds = config.get("layer_types")
    kind = kinds[module.layer_idx] if kinds else "chunked" if config.get("attention_chunk_size") else None
    if kind not in (None, "full_attention", "sliding_attention"):
        raise ValueError(f"it has layers of {kind}")
    return None if kind == "full_attention" else config.get("sliding_window") or None


def takes_flex(query: Tensor, value: Tensor) -> bool:
    """Returns whether FlexAttention has a kernel and a backward for these tensors, on their device."""
    return query.is_cuda and min(query.shape[-1], value.shape[-1]) >= NARROWEST_HEAD


@cache
def compiled_flex() -> Callable[..., Tensor]:
    """Compiles FlexAttention, for rows of any length. Beyond the limit it raises: as it is, uncompiled, it would hold
    the scores of all pairs of tokens."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None) -> Tensor:
    """Attends by FlexAttention, from and to [1, heads, T, d]; several query heads may share a key head."""
    # Autocast leaves it alone, and the rotation of a bfloat16 query by float32 angles is float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    options = {"block_mask": mask, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if value.dtype == torch.float32:
        options["kernel_options"] = FLOAT32_BLOCKS
    missing = mask.shape[-1] - query.shape[2]
    tensors = [laid_out(tensor, missing) for tensor in (query, key, value)]
    try:
        # Without specialize_float the scale would be a tensor on the host.
        with dynamo().config.patch(specialize_float=True, recompile_limit=MOST_GRAPHS):
            output = compiled_flex()(*tensors, **options)
    except dynamo().exc.FailOnRecompileLimitHit as error:
        raise RuntimeError(
            f"FlexAttention was compiled {MOST_GRAPHS} times in this process (TORCH_LOGS=recompiles says why). "
            "actor_rollout_ref.model.use_remove_padding=false does without it."
        ) from error
    return output[:, :, :-missing] if missing else output


def laid_out(tensor: Tensor, missing: int) -> Tensor:
    """Pads [1, heads, T, d] by so many tokens, in the one layout that FlexAttention is compiled for: it would be anew
    for a view, or another layout than that of rotated queries."""
    if missing:
        tensor = F.pad(tensor.transpose(1, 2), (0, 0, 0, 0, 0, missing)).transpose(1, 2)
    if is_view(tensor):
        form = torch.contiguous_format if tensor.shape[1] == 1 else torch.preserve_format
        tensor = tensor.clone(memory_format=form)
    dynamo().mark_static(tensor, [1, 3])
    return tensor


@contextmanager
def known_padding(has_padding: bool) -> Iterator[None]:
    """Tells transformers, which makes its masks in the block, whether any row of the batch is padded."""
    before = HAS_PADDING.set(has_padding)
    try:
        yield
    finally:
        HAS_PADDING.reset(before)


def known_sdpa_mask(*sizes: int, attention_mask: Tensor | None, allow_is_causal_skip: bool = True, **more: Any) -> Any:
    """Makes transformers' mask for SDPA; under `known_padding`, without reading `attention_mask`."""
    has_padding = HAS_PADDING.get()
    if has_padding is None and attention_mask is not None and attention_mask.is_cuda:
        has_padding = True  # to ask would be to wait for it
    mask = None if has_padding is False else attention_mask
    return sdpa_mask(*sizes, attention_mask=mask, allow_is_causal_skip=allow_is_causal_skip and not has_padding, **more)


def use_packed_attention(model: PreTrainedModel) -> None:
    AttentionInterface.register(NAME, packed_attention)
    for name in (NAME, "sdpa"):
        AttentionMaskInterface.register(name, known_sdpa_mask)
    model.set_attn_implementation(NAME)


def is_packed(model: PreTrainedModel) -> bool:
    """Returns whether the attention of `model` is the one above."""
    return attention_of(model) == NAME


def packed_scores(
    model: PreTrainedModel, micro: MicroBatch, temperature: float, ask: Collection[str] = ("log_probs",)
) -> TokenScores:
    """Scores a micro-batch's responses, as `workers.scoring_model.padded_scores` has them.

    Raises:
        AttributeError: a value model whose head is not called `score`.
        TypeError: a head that is not a linear layer, an adapter's say, which does more than its weight tells.
    """
    packed = Packed.of(micro, model.device)
    inputs = {"input_ids": packed.input_ids.unsqueeze(0), "position_ids": packed.position_ids.unsqueeze(0)}
    output = model.base_model(
        **(inputs if packed.media is None else model.vision.packed_inputs(packed)),
        attention_mask=packed.input_ids.new_zeros(1, 1, 1, 1),  # four dimensions: transformers makes no mask of its own
        use_cache=False,
        packed=packed,
    )
    hidden = F.embedding(packed.predictors, output.last_hidden_state.squeeze(0))  # [] sums gradients in any order
    if "values" in ask:
        return TokenScores(values=micro.scatter(model.score(hidden)[:, 0].float()))
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise TypeError(f"its head is a {type(head).__name__}, not a linear layer")
    softcap, logits = model.config.to_dict().get("final_logit_softcapping"), None
    if "logits" in ask:
        logits = head(hidden).float()
        logits = micro.scatter((logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature)
    scores = score_tokens(
        hidden,
        head.weight,
        micro.columns["responses"].flatten()[micro.scored_places],
        bias=head.bias,
        temperature=temperature,
        softcap=softcap,
        with_entropy="entropy" in ask,
        with_sum_pi_squared="sum_pi_squared" in ask,
    )
    return TokenScores(*(None if values is None else micro.scatter(values) for values in scores), logits=logits)
