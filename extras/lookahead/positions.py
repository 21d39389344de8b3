"""Positions of an environment: kept, put back to the bit, told from others, and moved on with other chance.

A position is all that the environment and its wrappers hold, without what never changes. Random generators are kept
apart from it, wherever they hang, so that whoever goes on from a position can give others.
"""

import copy
import io
import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

CONSTANT = frozenset((
    "env", "spec", "_cached_spec", "metadata", "_metadata", "observation_space", "action_space", "_observation_space",
    "_action_space", "render_mode", "_reward_range", "_np_random_seed",
))  # fmt: skip
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


class Unrestorable(ValueError):
    """An environment holds what cannot be copied, such as an open file or a window."""


@dataclass(frozen=True)
class Position:
    """What an environment held: `data` with a number in the place of each of its `generators`."""

    data: bytes
    generators: tuple[Any, ...]


class Keeper(pickle.Pickler):
    """Pickles what an environment holds, but for its generators; with `sorts`, equal positions have equal bytes."""

    def __init__(self, sorts: bool = False) -> None:
        self.buffer, self.generators, self.sorts = io.BytesIO(), [], sorts
        super().__init__(self.buffer, protocol=5)
        self.fast = sorts  # then it does not matter which parts are one object

    def persistent_id(self, part: Any) -> Any | None:
        if isinstance(part, GENERATORS):
            known = [id(each) for each in self.generators]
            if id(part) not in known:
                self.generators.append(part)
            return known.index(id(part)) if id(part) in known else len(known)
        if self.sorts and isinstance(part, set | frozenset):
            return type(part).__name__, sorted(map(repr, part))
        return None


class Restorer(pickle.Unpickler):
    """Unpickles what a `Keeper` has kept, with these generators."""

    def __init__(self, data: bytes, generators: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.generators = generators

    def persistent_load(self, number: int) -> Any:
        return self.generators[number]


def layers(env: gym.Env) -> list[dict[str, Any]]:
    """Lists the attributes of an environment and its wrappers, the outermost first."""
    attributes = [vars(env)]
    while isinstance(env, gym.Wrapper):
        env = env.env
        attributes.append(vars(env))
    return attributes


def changing(env: gym.Env) -> list[dict[str, Any]]:
    return [{name: value for name, value in layer.items() if name not in CONSTANT} for layer in layers(env)]


def keep(env: gym.Env) -> Position:
    """Returns the position in which `env` is. Raises Unrestorable if it cannot be copied."""
    env.unwrapped.np_random  # noqa: B018  (which gymnasium makes when it is first asked for)
    keeper = Keeper()
    try:
        keeper.dump(changing(env))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Unrestorable(f"its positions cannot be copied: {error}") from error
    return Position(keeper.buffer.getvalue(), tuple(map(copy.deepcopy, keeper.generators)))


def put_back(env: gym.Env, position: Position, seed: Sequence[int] | None = None) -> list[Any]:
    """Sets `env` to a position, and returns its generators; with a `seed`, what it draws from then on follows from it,
    also where it draws from the generators of `random` and numpy."""
    if seed is None:
        generators = [copy.deepcopy(each) for each in position.generators]
    else:
        generators = [reseeded(each, (*seed, number)) for number, each in enumerate(position.generators)]
        common = np.random.SeedSequence(seed).generate_state(1)[0].item()
        random.seed(common)
        np.random.seed(common)
    parts = Restorer(position.data, generators).load()
    for layer, part in zip(layers(env), parts, strict=True):
        for name in layer.keys() - part.keys() - CONSTANT:
            del layer[name]
        layer.update(part)
    return generators


def chance(generators: Sequence[Any]) -> list[Any]:
    """Returns what changes when a random number is drawn from one of these, or from those of `random` and numpy."""
    states = [random.getstate(), np.random.get_state()[2]]
    for each in generators:
        if isinstance(each, np.random.Generator):
            states.append(each.bit_generator.state["state"])
        else:
            states.append(each.getstate() if isinstance(each, random.Random) else each.get_state()[2])
    return states


def reseeded(generator: Any, seed: Sequence[int]) -> Any:
    """Makes a generator of the same kind that is seeded by whole numbers."""
    if isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        return type(generator)(kind(np.random.SeedSequence(seed)))
    number = np.random.SeedSequence(seed).generate_state(1)[0].item()
    return type(generator)(number)


def identity(env: gym.Env) -> bytes:
    """Returns bytes that are equal in equal positions, whatever chance is to come."""
    for sorts in (True, False):  # the former cannot follow parts that hold each other
        keeper = Keeper(sorts)
        try:
            keeper.dump(changing(env))
            return keeper.buffer.getvalue()
        except (ValueError, RecursionError):
            continue
    raise Unrestorable("its positions cannot be told from each other")
