"""Characters that a tokenizer has no token for: what the policy is never shown."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.checks import counted
from configs.loader import notice

SHOWN = 8  # characters that a notice spells out


def report_unknown_characters(
    texts: Iterable[tuple[str, Sequence[int]]], tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    """Counts and names them in a notice, if there are any.

    Args:
        texts: each row's text and its token ids.
        source: where the rows come from, for the notice.
    """
    found, rows = unknown_characters(texts, tokenizer)
    if not found:
        return
    spelt = ", ".join(repr(character) for character, _ in found.most_common(SHOWN)) + ", …" * (len(found) > SHOWN)
    notice(
        f"{counted(found.total(), 'character')} of {counted(rows, 'row')} of {source} have no token in "
        f"{tokenizer.name_or_path}: {spelt}. The model reads them all as one, or not at all: replace them, or take a "
        "tokenizer that has them."
    )


def unknown_characters(
    texts: Iterable[tuple[str, Sequence[int]]], tokenizer: PreTrainedTokenizerBase
) -> tuple[Counter[str], int]:
    """How often each character without a token occurs, and in how many rows any does.

    Without a token is a character that alone becomes the unknown token, or nothing at all. Where there is an unknown
    token, rows without it are passed over. Spaces that vanish do not count: many tokenizers fold them.
    """
    found, rows = Counter(), 0
    known: dict[str, bool] = {}
    for text, ids in texts:
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id not in ids:
            continue
        characters = set(text)
        known |= {character: has_token(character, tokenizer) for character in characters - known.keys()}
        missing = {character: text.count(character) for character in characters if not known[character]}
        found.update(missing)
        rows += bool(missing)
    return found, rows


def has_token(character: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = tokenizer.encode(character, add_special_tokens=False)
    return tokenizer.unk_token_id not in ids if ids else character.isspace()


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """What is written in a prompt, without a template around it."""
    if isinstance(prompt, str):
        return prompt
    return "".join(message["content"] for message in prompt if isinstance(message.get("content"), str))
