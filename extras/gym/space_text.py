"""The text of any gymnasium space: observations that can be read, and actions read out of an answer.

The defaults for an environment without `observation_to_text` or `text_to_action`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate

MAX_NUMBERS = 100  # that an array may have to be written out
BAR = 16  # characters
LARGEST = float(np.finfo(np.float32).max)
NUMBER = re.compile(r"(?<![\w.])(?:(?<!\d)[-+])?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


class AnswerSpace(gym.Space[str]):
    """Answers that an environment takes as they are; `instruction` says what to answer, `contains` what is legal."""

    def __init__(self, instruction: str) -> None:
        super().__init__(dtype=str)
        self.instruction = instruction


class SpaceText:
    """The values of any space, written and read part by part: custom/gym/texts.py has the methods' contract."""

    def __init__(self, space: gym.Space, fixed_width: bool = False) -> None:
        self.space, self.fixed_width = space, fixed_width

    def check(self, names: Sequence[str] | None = None) -> None:
        """Raises ValueError where `write` would be no reading: for images, say, or names that do not fit."""
        space = self.space
        for part in parts(space):
            SpaceText(part).check()
        if isinstance(space, ARRAYS) and (size := math.prod(space.shape)) > MAX_NUMBERS:
            raise ValueError(
                f"an observation has {' x '.join(map(str, space.shape))} = {size} numbers, more than the {MAX_NUMBERS} "
                "that are written out: give it an observation_to_text"
            )
        if names is not None and (not isinstance(space, ARRAYS) or (len(names),) != space.shape):
            raise ValueError(f"{len(names)} observation_names for {space}: they name the numbers of a flat array")

    def write(
        self, observation: Any, names: Sequence[str] | None = None, ranges: Iterable[Sequence[float]] = ()
    ) -> str:
        """An observation in text.

        An array has its last axis in lines, numbers rounded to a thousandth of their range or, unbounded, to three
        digits; `names` go before those of a flat one. A dict has a line for each key. What else there is: `str`.
        A number of `fractions` has a bar behind it if it has one of `ranges`.
        """
        space, part_text, ranges = self.space, partial(SpaceText, fixed_width=self.fixed_width), iter(ranges)
        if isinstance(space, ARRAYS):
            values = np.asarray(observation, space.dtype).ravel().tolist()
            write = fixed_number if self.fixed_width else number_text
            numbers = [write(*entry) for entry in zip(values, *bounds(space), strict=True)]
            for index, (value, ends) in enumerate(zip(values, ranges if has_fractions(space) else (), strict=False)):
                numbers[index] += f" {bar(value, *ends)}"
            if names is not None:
                return ", ".join(f"{name} {number}" for name, number in zip(names, numbers, strict=True))
            return array_text(np.array(numbers, dtype=object).reshape(space.shape))
        if isinstance(space, spaces.Dict):
            texts = {key: part_text(part).write(observation[key], ranges=ranges) for key, part in space.items()}
            return "\n".join(starmap(with_label, texts.items()))
        if isinstance(space, spaces.Tuple):
            entries = zip(space, observation, strict=True)
            return join_texts([part_text(part).write(value, ranges=ranges) for part, value in entries])
        if isinstance(space, spaces.OneOf):
            choice, value = observation
            return with_label(choice, part_text(space.spaces[choice]).write(value))
        if isinstance(space, spaces.Sequence):
            items = iterate(space.stacked_feature_space, observation) if space.stack else observation
            return join_texts([part_text(space.feature_space).write(item) for item in items]) or "none"
        if isinstance(space, spaces.Graph):
            return "\n".join(graph_lines(space, observation, part_text))
        return str(observation)

    def fractions(self, observation: Any) -> list[float]:
        """The numbers of an observation that bars can show, in order: those of Boxes that need not be whole."""
        if has_fractions(space := self.space):
            return np.ravel(observation).tolist()
        entries = []
        if isinstance(space, spaces.Dict):
            entries = [(part, observation[key]) for key, part in space.items()]
        elif isinstance(space, spaces.Tuple):
            entries = [*zip(space, observation, strict=True)]
        return [number for part, value in entries for number in SpaceText(part).fractions(value)]

    def how_to_answer(self) -> str:
        space = self.space
        if isinstance(space, AnswerSpace):
            return space.instruction
        numbers = [*slots(space)]
        kind = "whole number" if all(slot.whole for slot in numbers) else "number"
        if len(numbers) == 1:
            return f"Answer with a {kind}{numbers[0].bounds_text}."
        if len(set(numbers)) == 1 and not numbers[0].name:
            return f"Answer with {len(numbers)} {kind}s{numbers[0].bounds_text}."
        described = ", ".join(f"{slot.name}{slot.bounds_text}".strip() or "any" for slot in numbers)
        return f"Answer with {len(numbers)} {kind}s: {described}."

    def read(self, answer: str) -> Any | None:
        """Reads the plain action that an answer asks for: for texts the answer, else its last numbers; or None.

        What lies beyond the bounds of a Box counts as at them; elsewhere no number may be out of range.
        """
        if isinstance(self.space, spaces.Text | AnswerSpace):
            return answer.strip()
        numbers = [*slots(self.space)]
        values = [
            slot.read(number) for slot, number in zip(numbers, NUMBER.findall(answer)[-len(numbers) :], strict=False)
        ]
        return None if len(values) < len(numbers) or None in values else self._fill(iter(values))

    def _fill(self, values: Iterator[float]) -> Any:
        if isinstance(self.space, spaces.Discrete):
            return next(values)
        if isinstance(self.space, ARRAYS):
            return self.plain([next(values) for _ in range(math.prod(self.space.shape))])
        return tuple(SpaceText(part)._fill(values) for part in parts(self.space))

    def answer(self, action: Any) -> str:
        if isinstance(action, tuple):
            of = parts(self.space) or [self.space] * len(action)
            return " ".join(SpaceText(part).answer(value) for part, value in zip(of, action, strict=True))
        if isinstance(action, float):
            return np.format_float_positional(self.space.dtype.type(action), trim="-")
        return str(int(action)) if isinstance(action, bool) else str(action)

    def plain(self, action: Any) -> Any:
        space = self.space
        if isinstance(space, ARRAYS):
            return tuple(np.array(action, space.dtype).reshape(space.shape).ravel().tolist())
        if isinstance(space, spaces.Dict) and isinstance(action, dict):
            return tuple(SpaceText(part).plain(action[key]) for key, part in space.items())
        if isinstance(space, spaces.Dict | spaces.Tuple):
            return tuple(SpaceText(part).plain(value) for part, value in zip(parts(space), action, strict=True))
        return action.item() if isinstance(action, np.generic) else action

    def native(self, action: Any) -> Any:
        space = self.space
        if isinstance(space, ARRAYS):
            return np.array(action, space.dtype).reshape(space.shape)
        if isinstance(space, spaces.Dict):
            return {k: SpaceText(part).native(value) for (k, part), value in zip(space.items(), action, strict=True)}
        if isinstance(space, spaces.Tuple):
            return tuple(SpaceText(part).native(value) for part, value in zip(space, action, strict=True))
        return action


def parts(space: gym.Space) -> Sequence[gym.Space]:
    """The spaces that `space` is made of; none if it is a simple one."""
    if isinstance(space, spaces.Dict):
        return [*space.spaces.values()]
    if isinstance(space, spaces.Tuple | spaces.OneOf):
        return space.spaces
    if isinstance(space, spaces.Sequence):
        return [space.feature_space]
    if isinstance(space, spaces.Graph):
        return [part for part in (space.node_space, space.edge_space) if part is not None]
    return []


def graph_lines(space: spaces.Graph, graph: Any, part_text: Callable[[gym.Space], SpaceText]) -> Iterator[str]:
    for number, node in enumerate(graph.nodes):
        yield with_label(f"node {number}", part_text(space.node_space).write(node))
    for number, (start, end) in enumerate([] if graph.edge_links is None else graph.edge_links):
        name = f"edge {start} to {end}"
        yield name if graph.edges is None else with_label(name, part_text(space.edge_space).write(graph.edges[number]))


def with_label(name: Any, text: str) -> str:
    return f"{name}:\n{text}" if "\n" in text else f"{name}: {text}"


def join_texts(texts: list[str]) -> str:
    return ("\n" if any("\n" in text for text in texts) else ", ").join(texts)


def array_text(numbers: np.ndarray) -> str:
    """The last axis in lines, and a blank line between tables."""
    if numbers.ndim < 2:
        return " ".join(numbers.ravel())
    return ("\n" if numbers.ndim == 2 else "\n\n").join(map(array_text, numbers))


def has_fractions(space: gym.Space) -> bool:
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)


def bar(value: float, low: float, high: float) -> str:
    """A drawing of where a value lies between two others, in BAR characters; beyond them is at them."""
    part = (value - low) / (high - low) if low < high and math.isfinite(value) else 0.0
    filled = round(BAR * min(max(part, 0.0), 1.0))
    return "#" * filled + "." * (BAR - filled)


def bounds(space: gym.Space) -> tuple[list[float], list[float]]:
    """Lowest and highest value of each number of an array, as one flat list each."""
    if isinstance(space, spaces.Box):
        return space.low.ravel().tolist(), space.high.ravel().tolist()
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.ravel().tolist(), (space.start + space.nvec - 1).ravel().tolist()
    size = math.prod(space.shape)
    return [0] * size, [1] * size


def number_text(value: float, low: float, high: float) -> str:
    """A number in as many decimals as tell a thousand values of its range apart; unbounded, in three digits."""
    if isinstance(value, int | bool) or not math.isfinite(value):
        return str(value if isinstance(value, float) else int(value))
    if 0 < high - low < 1e6:
        text = f"{value:.{max(0, 3 - math.floor(math.log10(high - low)))}f}"
    else:
        text = np.format_float_positional(float(f"{value:.3g}"), trim="-")
    return text if float(text) else text.removeprefix("-")


def fixed_number(value: float, low: float, high: float) -> str:
    """A number as wide as any of its range, with leading zeros, and a sign where there are negative ones.

    Its decimals are those of `number_text`. Unbounded, it has eight characters: +0021.50, -3.0e-04, +1.2e+05.
    """
    largest, sign = max(abs(low), abs(high)), "+" if low < 0 else ""
    if not math.isfinite(value) or (isinstance(value, int | bool) and largest >= 1e6):
        return str(value)
    if isinstance(value, int | bool):
        return f"{int(value):{sign}0{len(str(int(largest))) + len(sign)}d}"
    if 0 < high - low < 1e6:
        digits = max(0, 3 - math.floor(math.log10(high - low)))
        return f"{round(value, digits) + 0.0:{sign}0{len(f'{largest:.{digits}f}') + len(sign)}.{digits}f}"
    return f"{value:+08.2f}" if value == 0 or 0.1 <= abs(value) < 9999 else f"{value:+.1e}"


@dataclass(frozen=True)
class Slot:
    """One number of an action."""

    name: str
    low: float
    high: float
    whole: bool
    clipped: bool  # beyond its bounds counts as at them; otherwise it makes the action illegal

    def read(self, number: str) -> float | None:
        """The value that a number of an answer stands for; None if it stands for none."""
        value = float(number)
        if self.clipped:
            value = float(min(max(value, self.low), self.high))
        if not self.low <= value <= self.high or abs(value) > LARGEST or (self.whole and not value.is_integer()):
            return None
        return int(value) if self.whole else value

    @property
    def bounds_text(self) -> str:
        low = f" from {self.low:g}" if math.isfinite(self.low) else ""
        return f"{low} to {self.high:g}" if math.isfinite(self.high) else low


def slots(space: gym.Space, name: str = "") -> Iterator[Slot]:
    """The numbers that an action of `space` is made of, in order; raises ValueError if it is made of anything else."""
    if isinstance(space, spaces.Discrete):
        yield Slot(name, int(space.start), int(space.start + space.n - 1), True, False)
    elif isinstance(space, ARRAYS):
        is_whole, clipped = not np.issubdtype(space.dtype, np.floating), isinstance(space, spaces.Box)
        yield from (Slot(name, low, high, is_whole, clipped) for low, high in zip(*bounds(space), strict=True))
    elif isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from slots(part, f"{name} {key}".strip())
    elif isinstance(space, spaces.Tuple):
        for part in space.spaces:
            yield from slots(part, name)
    else:
        raise ValueError(f"an action of {space} is not made of numbers: pass text_to_action, which makes it of answers")
