"""Defines the token ids of a prompt that shows more than text."""

from collections.abc import Sequence
from typing import Any


class PromptIds(list):
    """Token ids of a prompt that shows `media` beside its text (extras/images): hashable, and compared by both."""

    def __init__(self, ids: Sequence[int], media: Any) -> None:
        super().__init__(ids)
        self.media = media

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, other) and self.media == media_of(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((*self, self.media))


def media_of(prompt_ids: Any) -> Any:
    """Returns what a prompt shows beside its text; None: its model reads text alone."""
    return prompt_ids.media if isinstance(prompt_ids, PromptIds) else None


def as_ids(prompt_ids: Sequence[int]) -> list[int]:
    """Returns a list of token ids; one that shows media stays what it is."""
    return list(prompt_ids) if media_of(prompt_ids) is None else prompt_ids


def with_media(prompt_ids: list[int], media: Any) -> list[int]:
    """Returns the ids of a prompt that shows `media`; as they are, if there are none."""
    return prompt_ids if media is None else PromptIds(prompt_ids, media)
