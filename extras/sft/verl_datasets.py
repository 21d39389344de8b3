"""Data sets for supervised training in verl's form, for subclasses that users wrote for verl (data.custom_cls).

They are found as `verl.utils.dataset.SFTDataset` and `MultiTurnSFTDataset` (extras/verl/names.yaml).
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from configs.import_utils import find
from data.chat import Prompt, as_messages, parse_prompt
from data.rows import Entry, read_rows
from data.types import Message, Sample
from extras.sft.dataset import ConversationFormat, SFTDataset, answer_end, fit_sample


class VerlSFTDataset(SFTDataset):
    """Prompts with responses as verl's SFTDataset gives them: a row has input_ids, attention_mask, position_ids and
    loss_mask, each [data.max_length], padded on the right; loss_mask is 1 where the next token is learnt.

    A prompt that is a text is a user's message. Files, tokenizer and config as `SFTDataset`.
    """

    learns_next = True

    def __init__(
        self, parquet_files: Any, tokenizer: PreTrainedTokenizerBase, config: Any, max_samples: int = -1
    ) -> None:
        super().__init__(parquet_files, tokenizer, config, answer_end(tokenizer))
        if max_samples > 0:
            del self.samples[max_samples:]

    def _encode_answer(self, prompt: Prompt, row: dict[str, Any]) -> Sample:
        return super()._encode_answer(as_messages(prompt), row)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        row = padded_row(self.samples[position], self.config.max_length, self.tokenizer.pad_token_id)
        return row | {"loss_mask": F.pad(row["loss_mask"][1:], (0, 1))}


class MultiTurnSFTDataset(Dataset):
    """Conversations as verl's dataset of this name gives them, for subclasses: rows as of `VerlSFTDataset`, but that
    loss_mask is 1 where the token itself is learnt.

    Hooks in verl's order: `_download()`; `_read_files_and_process()`, which sets `dataframe`, `messages` and `tools`;
    `_build_messages(row)` whenever a row is given out. A message with trainable=False is only read.
    """

    def __init__(
        self,
        parquet_files: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.tokenizer, self.config, self.processor, self.max_samples = tokenizer, config, processor, max_samples
        self.parquet_files = [parquet_files] if isinstance(parquet_files, str | Path) else list(parquet_files)
        self.max_length, self.truncation = config.max_length, config.truncation
        self.messages_key, self.tools_key = config.messages_key, config.tools_key
        self.conversations = ConversationFormat(tokenizer, config, answer_end(tokenizer))
        self._download()
        self._read_files_and_process()

    def _download(self) -> None:
        """Fetches the files, and replaces `parquet_files` by their local paths."""

    def _read_files_and_process(self) -> None:
        rows = read_rows(self.parquet_files)[: self.max_samples if self.max_samples > 0 else None]
        self.dataframe = find("dataset", "table")(Entry(*row) for row in rows)
        self.messages, self.tools = self.dataframe[self.messages_key], self.dataframe[self.tools_key]

    def _build_messages(self, example: dict[str, Any]) -> list[Message]:
        return parse_prompt(example[self.messages_key])

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        messages = self._build_messages({**self.dataframe[item], self.messages_key: self.messages[item]})
        for message in messages:
            if not message.pop("trainable", True):
                message["weight"] = 0
        sample = fit_sample(self.conversations.sample(messages, self.tools[item]), self.config, f"row {item}")
        return padded_row(sample, self.max_length, self.tokenizer.pad_token_id)


def padded_row(sample: Sample, length: int, pad_token_id: int | None) -> dict[str, Tensor]:
    """Returns a sample as verl's columns, each [length]."""
    ids = [*sample.prompt_ids, *sample.token_ids]
    mask = [0] * len(sample.prompt_ids) + [int(flag) for flag in sample.policy_mask]
    columns = {"input_ids": ids, "attention_mask": [1] * len(ids), "position_ids": range(len(ids)), "loss_mask": mask}
    padding = {"input_ids": pad_token_id or 0}
    return {
        name: F.pad(torch.tensor([*column]), (0, length - len(ids)), value=padding.get(name, 0))
        for name, column in columns.items()
    }
