"""What is found out about a prompt before it is encoded."""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.chat import Prompt

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
HUGE_PROMPT = 1 << 20  # characters; of these, the tokens are not counted one by one


def least_tokens(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """So many tokens a huge prompt has at least, as none is longer than the longest of the vocabulary; else 0."""
    contents = [m.get("content") for m in prompt if isinstance(m, dict)] if isinstance(prompt, list) else []
    characters = sum(len(text) for text in [prompt, *contents] if isinstance(text, str))
    return characters // max(map(len, tokenizer.get_vocab())) if characters > HUGE_PROMPT else 0


def check_says_something(prompt: Prompt) -> None:
    """Raises ValueError for a prompt whose every text is empty, or that holds half a character.

    Half a character is one of a pair of surrogates alone: JSON can spell it, no tokenizer reads it.
    """
    messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
    texts = [message.get("content") for message in messages]
    if all(isinstance(text, str) and not text.strip() for text in texts):
        raise ValueError("the prompt is empty.")
    if lone := LONE_SURROGATE.search("".join(text for text in texts if isinstance(text, str))):
        raise ValueError(f"the prompt holds {lone[0]!r}, which is half a character: write it in full.")
