"""Observations and actions in text: words that name an action, and spaces whose values are a number or a text.

Other spaces (arrays, dicts, tuples …) are written out by extras/gym.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np

from configs.import_utils import find


def last_mention(names: Sequence[str], text: str) -> int | None:
    """Returns the index of the name that `text` mentions last, in any case; "L|left" is one name and its synonym.

    Only whole words count: neither "LUMP" nor "upside-down" nor the d of "I'd" is a move.
    """
    index_of, pattern = _words(tuple(names))
    mentions = pattern.findall(text.lower())
    return index_of[mentions[-1]] if mentions else None


@lru_cache(maxsize=64)
def _words(names: tuple[str, ...]) -> tuple[dict[str, int], re.Pattern[str]]:
    words = {word: index for index, name in enumerate(names) for word in name.lower().split("|")}
    alternatives = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return words, re.compile(rf"(?<!\w)(?<!\w[-'’])(?<!\d\.)(?:{alternatives})(?!\w|[-'’]\w|\.\d)")


def mark_ansi(text: str) -> str:
    """Turns ANSI-highlighted characters into [X], since they may be the only mark of the player; leaves no escapes."""
    marked = re.sub(r"(?:\x1b\[(?!0?m)[\d;]*m)+([^\x1b]+)(?:\x1b\[0?m)+", r"[\1]", text)
    return re.sub(r"\x1b(?:\[[0-?]*[ -/]*[@-~])?", "", marked)


class PlainText:
    """The values of a space that are a number or a text: written as they are, read as they stand.

    An action is kept as plain data, to be compared and pickled: a number, a text, or a tuple of such. With
    `fixed_width`, the numbers of an observation stand in the same places, whatever their values.
    """

    def __init__(self, space: gym.Space, fixed_width: bool = False) -> None:
        self.space, self.fixed_width = space, fixed_width

    def check(self, names: Sequence[str] | None) -> None:
        """Raises ValueError where observations cannot be written out, or not with `names` for their numbers."""
        if names is not None:
            raise ValueError(f"{len(names)} observation_names for {self.space}: they name the numbers of a flat array")

    def write(self, observation: Any, names: Sequence[str] | None = None, ranges: Iterable = ()) -> str:
        """Writes an observation out, with `names` and bars (of `ranges`) beside its numbers if they are given."""
        return str(observation)

    def how_to_answer(self) -> str:
        """Returns the instruction that goes with `read`; raises ValueError if no answer is read as an action."""
        return f"Answer with a text of at most {self.space.max_length} characters."

    def read(self, answer: str) -> Any | None:
        """Reads the plain action that an answer asks for; None: it asks for none."""
        return answer.strip()

    def answer(self, action: Any) -> str:
        """Returns the answer that is read as the plain `action`."""
        return str(action)

    def plain(self, action: Any) -> Any:
        """Converts an action to plain data; raises ValueError or TypeError if it has not the space's form."""
        return action.item() if isinstance(action, np.generic) else action

    def native(self, action: Any) -> Any:
        """Converts a plain action to what the environment accepts."""
        return action


class NamedActions(PlainText):
    """The numbered actions of a Discrete space, each read by its names: the canonical answer, then synonyms after |."""

    def __init__(self, space: gym.spaces.Discrete, names: Sequence[str] | None) -> None:
        super().__init__(space)
        self.actions = tuple(range(int(space.start), int(space.start + space.n)))
        self.names = tuple(names or map(str, self.actions))
        if len(self.names) != len(self.actions):
            raise ValueError(f"{len(self.names)} action_names for {len(self.actions)} actions")
        self.answers = {action: name.split("|")[0] for action, name in zip(self.actions, self.names, strict=True)}

    def how_to_answer(self) -> str:
        return f"Answer with one of: {', '.join(self.answers.values())}."

    def read(self, answer: str) -> int | None:
        index = last_mention(self.names, answer)
        return None if index is None else self.actions[index]

    def answer(self, action: int) -> str | None:
        return self.answers.get(action)

    def plain(self, action: Any) -> int:
        number = float(action)  # "0" and 0.0 are 0
        if not number.is_integer():
            raise ValueError(f"{action!r} is no whole number")
        return int(number)


def text_of(space: gym.Space, env_id: str, fixed_width: bool = False) -> PlainText:
    """Returns what writes and reads the values of `space`; raises ConfigError if its extra is not here."""
    if isinstance(space, gym.spaces.Discrete | gym.spaces.Text) or type(space) is gym.Space:
        return PlainText(space)
    return find("environment", "spaces", f"env.id={env_id}: the text of {type(space).__name__}")(space, fixed_width)
