"""Prompt/response rows and whole conversations for supervised training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from configs.checks import counted
from configs.schema import SFTDataConfig
from data.chat import Prompt, parse_prompt
from data.file_formats import BadRow, Origin
from data.learnt_tokens import ConversationFormat
from data.load_report import BadRows, print_report, spread
from data.rl_dataset import truncate
from data.rows import read_rows
from data.types import Row, Sample
from data.unknown_characters import prompt_text, report_unknown_characters


class SFTDataset(Dataset):
    """Rows with a `sample`, whose policy tokens are what is learnt: the response, or of a conversation (column
    data.messages_key) what data/learnt_tokens.py says. A response has `end_id` behind it, so that the model learns to
    stop.

    Raises:
        ValueError: more than a share data.max_bad_fraction of the rows are unusable; names file and row: a missing or
            bad column, or a row above data.max_length with data.truncation=error.
    """

    def __init__(
        self, data_files: str | Path | list[str], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, end_id: int
    ) -> None:
        self.config = config
        self.tokenizer, self.end_id = tokenizer, end_id
        self.conversations = ConversationFormat(tokenizer, config, end_id)
        self.samples: list[Sample] = []
        self.num_cut = 0
        rows = self._load(data_files)
        ids = (sample.prompt_ids + sample.token_ids for sample in self.samples)
        report_unknown_characters(zip(map(self._text, rows), ids, strict=True), tokenizer, str(data_files))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"sample": self.samples[position]}

    def _load(self, data_files: str | Path | list[str]) -> list[Row]:
        """Fills `samples`, and says what became of the rows; those that are kept."""
        unread: list[BadRow] = []
        rows, kept = read_rows(data_files, unread), []
        bad = BadRows(len(rows) + len(unread), self.config.max_bad_fraction)
        for error in unread:
            bad.add(error)
        for origin, row in rows:
            try:
                self.samples.append(self._encode(row, origin))
            except ValueError as error:
                bad.add(BadRow(origin, str(error), cause=error))
            else:
                kept.append(row)
        bad.check()
        lengths = [len(sample.prompt_ids) + len(sample.token_ids) for sample in self.samples]
        learnt = sum(sum(sample.policy_mask) for sample in self.samples)
        cut = (
            f"; {counted(self.num_cut, 'row')} cut to data.max_length={self.config.max_length}" if self.num_cut else ""
        )
        about = f"{spread('rows', lengths)}; {learnt} of {sum(lengths)} tokens are learnt{cut}"
        print_report(data_files, len(kept), [about], {"unusable": bad.said()})
        return kept

    def prompt_ids(self) -> list[list[int]]:
        """Token ids of what is read before anything is learnt, a row each."""
        return [sample.prompt_ids for sample in self.samples]

    def _encode(self, row: dict[str, Any], origin: Origin) -> Sample:
        """A row's tokens, of which those that are learnt are the policy's."""
        key = self._key(row)
        try:
            said = parse_prompt(row.get(key))
        except ValueError as error:
            raise ValueError(f"{origin}: {error} (column {key})") from error
        try:
            if key != self.config.messages_key:
                sample = self._answered(said, row)
            elif isinstance(said, str):
                raise ValueError(f"column {key} is a text; it must be a list of chat messages.")
            else:
                sample = self.conversations.sample(said, row.get(self.config.tools_key))
        except (ValueError, TemplateError) as error:  # templates refuse messages by TemplateError
            raise ValueError(f"{origin}: {error}") from error
        return self._fit(sample, origin)

    def _answered(self, prompt: Prompt, row: dict[str, Any]) -> Sample:
        """A prompt to read and a response to learn."""
        response = row.get(self.config.response_key)
        if not isinstance(response, str):
            raise ValueError(
                f"the response (column data.response_key={self.config.response_key}) is {response!r}; it must be "
                f"a string. This row has the columns {', '.join(row)}."
            )
        sample = Sample(self.conversations.chat(row.get(self.config.tools_key)).prompt_ids(prompt))
        sample.extend([*self.tokenizer.encode(response, add_special_tokens=False), self.end_id], None, policy=True)
        return sample

    def _key(self, row: dict[str, Any]) -> str:
        """The column with what the row begins with."""
        config = self.config
        return config.prompt_key if row.get(config.messages_key) is None else config.messages_key

    def _text(self, row: dict[str, Any]) -> str:
        """All that a row says."""
        key = self._key(row)
        answer = "" if key == self.config.messages_key else row[self.config.response_key]
        return prompt_text(parse_prompt(row[key])) + answer

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
        self.num_cut += 1
        if cut_prompt:
            return replace(sample, prompt_ids=truncate(prompt_ids, len(prompt_ids) - excess, "left"))
        return sample.until(len(response_ids) - excess)
