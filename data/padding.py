"""Lays out training rows (data/types.py: Sample) as the padded columns of a batch.

Prompts are padded on the left to one width, responses on the right to another. What is padding is known from lengths
and masks, never from comparing ids with the pad id: it may be the stop id, which is sampled.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from data.protocol import DataProto, object_array
from data.types import Sample
from data.wire import positions


class PromptIds(list):
    """Token ids of a prompt, and the `media` that it shows (extras/images), None where its model reads text alone;
    hashable, and compared by both."""

    def __init__(self, ids: Sequence[int], media: Any = None) -> None:
        super().__init__(ids)
        self.media = media

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, other) and self.media == media_of(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((*self, self.media))


def media_of(prompt_ids: Any) -> Any:
    return prompt_ids.media if isinstance(prompt_ids, PromptIds) else None


def collate(samples: Sequence[Sample], prompt_width: int, response_width: int, pad_token_id: int) -> DataProto:
    """Lays out B samples as the padded columns of a batch; P is `prompt_width`, R `response_width`.

    int64: prompts [B, P], responses, response_mask and weight_versions [B, R], input_ids, attention_mask and
    position_ids [B, P+R];
    float32: rollout_log_probs [B, R]; objects [B]: end_reason, one column for each of the `extras`, and media, if any.
    Asserts that every sample fits, and that all have the same extras.
    """
    for sample in samples:
        assert len(sample.prompt_ids) <= prompt_width and len(sample.token_ids) <= response_width, (
            f"{len(sample.prompt_ids)} tokens of prompt, {len(sample.token_ids)} of response: "
            f"wider than {prompt_width}, {response_width}"
        )
    prompt_lengths = torch.tensor([len(sample.prompt_ids) for sample in samples], dtype=torch.long)[:, None]
    lengths = torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.long)[:, None]
    column = torch.arange(-prompt_width, response_width)  # 0: the first token of the response
    is_real = (column >= -prompt_lengths) & (column < lengths)
    attention_mask, response_places = is_real.long(), is_real[:, prompt_width:]
    sequences = [[*sample.prompt_ids, *sample.token_ids] for sample in samples]
    input_ids = fill_places(is_real, sequences, pad_token_id)
    columns = {
        "prompts": input_ids[:, :prompt_width],
        "responses": input_ids[:, prompt_width:],
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": positions(attention_mask),
        "response_mask": fill_places(response_places, [sample.policy_mask for sample in samples], 0),
        "rollout_log_probs": fill_places(response_places, [sample.log_probs for sample in samples], 0.0),
        "weight_versions": fill_places(response_places, [sample.weight_versions for sample in samples], -1),
    }
    names = samples[0].extras if samples else {}
    assert all(sample.extras.keys() == names.keys() for sample in samples), "samples with different extras"
    objects = {name: object_array([sample.extras[name] for sample in samples]) for name in names}
    if any(media_of(sample.prompt_ids) is not None for sample in samples):
        objects["media"] = object_array([media_of(sample.prompt_ids) for sample in samples])
    objects["end_reason"] = object_array([sample.end_reason for sample in samples])
    return DataProto.from_dict(columns, objects)


def collate_turns(samples: Sequence[Sample], width: int) -> dict[str, Tensor]:
    """Returns the columns of episodes beside those of `collate`, [B, R]: turn_ids int64 and token_level_scores float32,
    which holds the rewards; R is `width`."""
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])
    filled = torch.arange(width) < lengths[:, None]
    return {
        "turn_ids": fill_places(filled, [sample.turns for sample in samples], 0),
        "token_level_scores": fill_places(filled, [sample.rewards for sample in samples], 0.0),
    }


def fill_places(mask: Tensor, parts: Sequence[Sequence[float]], padding: float) -> Tensor:
    """Puts the numbers of `parts`, in order, where `mask` [B, W] is True, and `padding`, of their dtype, elsewhere."""
    column = torch.full(mask.shape, padding)
    return column.masked_scatter_(mask, torch.tensor([*chain.from_iterable(parts)], dtype=column.dtype))


def last_token(mask: Tensor) -> Tensor:
    """Marks each row's last policy token with 1.0: where the episode is done. [B, R] float32."""
    return ((mask.flip(1).cumsum(1).flip(1) == 1) & mask.bool()).float()


def repeats_prompt(batch: DataProto) -> Tensor:
    """Returns [B] bool: the rows whose prompt is that of the row before."""
    ids, mask = (batch.batch[name][:, : prompt_width(batch)] for name in ("input_ids", "attention_mask"))
    prompts = torch.where(mask == 1, ids, -1)
    repeats = torch.zeros(len(batch), dtype=torch.bool)
    repeats[1:] = (prompts[1:] == prompts[:-1]).all(1)
    if (media := batch.non_tensor_batch.get("media")) is not None:
        repeats[1:] &= torch.from_numpy((media[1:] == media[:-1]).astype(bool))
    return repeats


def prompt_width(batch: DataProto) -> int:
    """Returns P, the number of columns before the responses."""
    return batch.batch["input_ids"].shape[1] - batch.batch["responses"].shape[1]
