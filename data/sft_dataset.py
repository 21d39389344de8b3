"""Prompt/response rows for supervised training."""

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from configs.schema import SFTDataConfig
from data.chat import encode_prompt, parse_prompt
from data.rl_dataset import truncate
from data.rows import Origin, read_rows
from data.unknown_characters import prompt_text, report_unknown_characters


class SFTDataset(Dataset):
    """Rows with `raw_prompt_ids` and `response_ids`; a response ends with `end_id`, so that the model learns to stop.

    Raises:
        ValueError: names file and row: a missing or bad column, or a row above data.max_length with
            data.truncation=error.
    """

    def __init__(
        self, data_files: str | Path | list[str], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, end_id: int
    ) -> None:
        self.config = config
        rows = read_rows(data_files)
        self.rows = [self._encode(row, origin, tokenizer, end_id) for origin, row in rows]
        texts = (prompt_text(parse_prompt(row[config.prompt_key])) + row[config.response_key] for _, row in rows)
        ids = (row["raw_prompt_ids"] + row["response_ids"] for row in self.rows)
        report_unknown_characters(zip(texts, ids, strict=True), tokenizer, str(data_files))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.rows[position]

    def _encode(
        self, row: dict[str, Any], origin: Origin, tokenizer: PreTrainedTokenizerBase, end_id: int
    ) -> dict[str, Any]:
        config = self.config
        response = row.get(config.response_key)
        if not isinstance(response, str):
            raise ValueError(
                f"{origin}: the response (column data.response_key={config.response_key}) is {response!r}; it must be "
                f"a string. This row has the columns {', '.join(row)}."
            )
        try:
            prompt = parse_prompt(row.get(config.prompt_key))
            prompt_ids = encode_prompt(prompt, tokenizer, **config.apply_chat_template_kwargs)
        except (ValueError, TemplateError) as error:  # templates refuse messages by TemplateError
            raise ValueError(f"{origin}: {error} (column data.prompt_key={config.prompt_key})") from error
        response_ids = [*tokenizer.encode(response, add_special_tokens=False), end_id]
        return self._fit(prompt_ids, response_ids, origin)

    def _fit(self, prompt_ids: list[int], response_ids: list[int], origin: Origin) -> dict[str, Any]:
        """Cuts a row to data.max_length: `left` from the prompt's start, `right` from the response's end."""
        excess = len(prompt_ids) + len(response_ids) - self.config.max_length
        if excess > 0 and self.config.truncation == "error":
            raise ValueError(
                f"{origin}: prompt and response have {len(prompt_ids) + len(response_ids)} tokens, above "
                f"data.max_length={self.config.max_length}: raise it, or cut rows by data.truncation=left or right."
            )
        if excess > 0:
            cut_prompt = self.config.truncation == "left"
            ids = prompt_ids if cut_prompt else response_ids
            if excess >= len(ids):
                side = "prompt" if cut_prompt else "response"
                raise ValueError(
                    f"{origin}: data.truncation={self.config.truncation} would leave nothing of the {side}, which has "
                    f"{len(ids)} of the {excess} tokens that data.max_length={self.config.max_length} asks to cut."
                )
            kept = truncate(ids, len(ids) - excess, self.config.truncation)
            prompt_ids, response_ids = (kept, response_ids) if cut_prompt else (prompt_ids, kept)
        return {"raw_prompt_ids": prompt_ids, "response_ids": response_ids}
