"""Defines the token ids of a prompt that may show more than text."""

from collections.abc import Sequence
from typing import Any


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
