"""The contract of every rollout engine: token ids in, token ids out.

An engine implements `generate`; `generate_sequences`, which lays its completions out as the padded columns of a
rollout, is written once on top of it. Sampled ids are never decoded and encoded again. A subclass of yours may replace
either; `actor_rollout_ref.rollout.name=my_engine.py` names its file.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from configs.schema import RolloutConfig
from data.protocol import DataProto
from data.seeding import derive_seed
from training.roles import SamplingParams


@dataclass(frozen=True)
class Completion:
    """One response: `log_probs` are of the sampled tokens, after temperature, top-k and top-p."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" (the last id is a stop id) or "length"
    weight_version: int


class Rollout(ABC):
    """Base of all engines.

    Args:
        config: rollout settings.
        tokenizer: for the pad id and the stop set.
        generation_config: the model's, read for its stop ids only.
    """

    def __init__(
        self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
    ) -> None:
        self.config = config
        self.pad_token_id = tokenizer.pad_token_id
        self.stop_ids = stop_token_ids(tokenizer, generation_config)
        self.weight_version = 0

    @abstractmethod
    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        """One completion per prompt, in order. Equal prompts may be computed once; a row's draws depend on its seed."""

    def load_weights(self, weights, version: int) -> None:
        """The actor's weights changed: whatever was cached under the old ones must go."""
        self.weight_version = version

    def generate_sequences(
        self, batch: DataProto, sampling: SamplingParams, seed: int, first_row: int = 0
    ) -> DataProto:
        """`batch` (column raw_prompt_ids; meta_info sampling, seed) with the columns of a rollout.

        Prompts are left-padded to P = prompt_length, responses right-padded to R = response_length. `first_row` in
        meta_info says which row of its whole the first one is, if other workers have rows of it as well.
        """
        prompts = [list(ids) for ids in batch.non_tensor_batch["raw_prompt_ids"]]
        seeds = [derive_seed(seed, "row", first_row + place) for place in range(len(prompts))]
        completions = self.generate(prompts, sampling, seeds)
        columns = pad_rollout(
            prompts, completions, self.config.prompt_length, self.config.response_length, self.pad_token_id
        )
        reasons = {"stop": "terminated", "length": "max_tokens"}
        objects = {
            **batch.non_tensor_batch,
            "end_reason": np.array([reasons[done.finish_reason] for done in completions], dtype=object),
        }
        return DataProto.from_dict(columns, objects, dict(batch.meta_info))


def pad_rollout(
    prompts: list[list[int]], completions: list[Completion], prompt_width: int, response_width: int, pad_id: int
) -> dict[str, torch.Tensor]:
    """The padded columns of B prompts and completions: ids and masks int64, log-probs float32."""
    rows = len(prompts)
    input_ids = torch.full((rows, prompt_width + response_width), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    log_probs = torch.zeros(rows, response_width)
    for row, (prompt, done) in enumerate(zip(prompts, completions, strict=True)):
        start, length = prompt_width - len(prompt), len(done.token_ids)
        assert start >= 0 and length <= response_width, (
            f"{len(prompt)} tokens of prompt, {length} of response: wider than {prompt_width}, {response_width}"
        )
        input_ids[row, start : prompt_width + length] = torch.tensor(prompt + done.token_ids)
        attention_mask[row, start : prompt_width + length] = 1
        log_probs[row, :length] = torch.tensor(done.log_probs)
    return {
        "prompts": input_ids[:, :prompt_width],
        "responses": input_ids[:, prompt_width:],
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": attention_mask[:, prompt_width:],
        "rollout_log_probs": log_probs,
    }


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> set[int]:
    """generation_config's eos ids ∪ the tokenizer's eos ∪ the special token that ends a turn in its chat template."""
    declared = generation_config.eos_token_id if generation_config else None
    declared = declared if isinstance(declared, list) else [declared]
    found = {*declared, tokenizer.eos_token_id, template_terminator(tokenizer)}
    return {token_id for token_id in found if token_id is not None}


def template_terminator(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token right after an assistant's message in the chat template, if there is one."""
    if not tokenizer.chat_template:
        return None
    marker = "answer-0417"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}]
    tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(marker)[2]
    ids = tokenizer.encode(tail, add_special_tokens=False)
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None
