"""Prompt/response rows and whole conversations for supervised training."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from configs.schema import SFTDataConfig
from data.chat import ChatFormat, Message, Prompt, parse_prompt
from data.padding import Sample
from data.rl_dataset import truncate
from data.rows import Origin, read_rows
from data.unknown_characters import prompt_text, report_unknown_characters


class SFTDataset(Dataset):
    """Rows with a `sample`, whose policy tokens are what is learnt: the response, or every answer of a conversation
    (column `messages`), each with `end_id` behind it, so that the model learns to stop.

    Raises:
        ValueError: names file and row: a missing or bad column, or a row above data.max_length with
            data.truncation=error.
    """

    def __init__(
        self, data_files: str | Path | list[str], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, end_id: int
    ) -> None:
        self.config = config
        self.tokenizer, self.end_id = tokenizer, end_id
        self.chat = ChatFormat(tokenizer, config.apply_chat_template_kwargs)
        rows = [(origin, self._turns(row, origin)) for origin, row in read_rows(data_files)]
        self.samples = [self._encode(turns, origin) for origin, turns in rows]
        texts = ("".join(map(prompt_text, turns)) for _, turns in rows)
        ids = (sample.prompt_ids + sample.token_ids for sample in self.samples)
        report_unknown_characters(zip(texts, ids, strict=True), tokenizer, str(data_files))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"sample": self.samples[position]}

    def _turns(self, row: dict[str, Any], origin: Origin) -> list[Prompt]:
        """What is shown and what is answered, in turn."""
        config, messages = self.config, row.get("messages")
        key = "messages" if messages is not None else config.prompt_key
        try:
            said = parse_prompt(row.get(key))
            turns = [said, row.get(config.response_key)] if messages is None else turns_of(said)
        except ValueError as error:
            raise ValueError(f"{origin}: {error} (column {key})") from error
        if not isinstance(turns[-1], str):
            raise ValueError(
                f"{origin}: the response (column data.response_key={config.response_key}) is {turns[-1]!r}; it must be "
                f"a string. This row has the columns {', '.join(row)}."
            )
        return turns

    def _encode(self, turns: list[Prompt], origin: Origin) -> Sample:
        """A row's tokens, of which those of answers are the policy's."""
        try:
            sample = Sample(self.chat.prompt_ids(turns[0]))
            for place, said in enumerate(turns[1:]):
                if place % 2 == 0:
                    ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.end_id]
                else:
                    ids = self.chat.increment(said, stopped=True)
                sample.extend(ids, None, policy=place % 2 == 0, turn=place // 2)
        except (ValueError, TemplateError) as error:  # templates refuse messages by TemplateError
            raise ValueError(f"{origin}: {error}") from error
        return self._fit(sample, origin)

    def _fit(self, sample: Sample, origin: Origin) -> Sample:
        """Cuts a row to data.max_length: `left` from the prompt's start, `right` from the response's end."""
        prompt_ids, response_ids = sample.prompt_ids, sample.token_ids
        excess = len(prompt_ids) + len(response_ids) - self.config.max_length
        if excess <= 0:
            return sample
        if self.config.truncation == "error":
            raise ValueError(
                f"{origin}: prompt and response have {len(prompt_ids) + len(response_ids)} tokens, above "
                f"data.max_length={self.config.max_length}: raise it, or cut rows by data.truncation=left or right."
            )
        cut_prompt = self.config.truncation == "left"
        ids = prompt_ids if cut_prompt else response_ids
        if excess >= len(ids):
            side = "prompt" if cut_prompt else "response"
            raise ValueError(
                f"{origin}: data.truncation={self.config.truncation} would leave nothing of the {side}, which has "
                f"{len(ids)} of the {excess} tokens that data.max_length={self.config.max_length} asks to cut."
            )
        if cut_prompt:
            return replace(sample, prompt_ids=truncate(prompt_ids, len(prompt_ids) - excess, "left"))
        return sample.until(len(response_ids) - excess)


def turns_of(messages: list[Message]) -> list[Prompt]:
    """The prompt, then answers (texts) and what follows them (messages) in turn, up to the last answer.

    Raises:
        ValueError: it starts with an answer, has two in a row, or one that is no text.
    """
    turns: list[Prompt] = []
    for is_answer, group in groupby(messages, lambda message: message["role"] == "assistant"):
        said = list(group)
        if not is_answer:
            turns.append(said)
        elif not turns or len(said) > 1 or not isinstance(said[0].get("content"), str):
            raise ValueError("messages must start with a prompt, and hold one answer at a time, a text.")
        else:
            turns.append(said[0]["content"])
    if len(turns) < 2:
        raise ValueError("messages must hold an answer, of the role assistant.")
    return turns if len(turns) % 2 == 0 else turns[:-1]
