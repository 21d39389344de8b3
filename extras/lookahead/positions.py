"""Positions of an environment: kept, put back to the bit, told from others, and moved on with other chance.

A position is all that the environment, its wrappers and what they hold have in them. What no step changes is held as it
is: functions, classes, spaces, loggers, read-only arrays, and the layers, which other parts may refer to. So are random
generators, wherever they hang; their states are kept beside. Left out are what classes, modules and closures hold
beside generators, and the order of a set: `Credit.check` tries out whether that matters.
"""

import io
import logging
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copyreg import __newobj__
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle

PLAIN = frozenset((int, float, str, bool, type(None), tuple, list, dict, bytes))
GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
HELD = (FunctionType, type, ModuleType, logging.Logger, gym.Space, EnvSpec, *GENERATORS)
GLOBAL = (random.random.__self__, np.random.rand.__self__)  # what the functions of these modules draw from
SEED = "_np_random_seed"  # of a reset, which gymnasium keeps
CANNOT = (pickle.PickleError, TypeError, AttributeError, ValueError, NotImplementedError, RecursionError)
States = list[tuple[Any, Any]]  # (generator, its state)
Position = tuple[bytes, States]  # what an environment held, with a number in the place of what is held as it is


class Positions:
    """The positions of one environment; parts that are held as they are have one number in all of them."""

    def __init__(self, env: gym.Env) -> None:
        env.unwrapped.np_random  # noqa: B018  (which gymnasium makes when it is first asked for)
        self.layers, self.parts, self.numbers = [env], [], {}
        while isinstance(env, gym.Wrapper):
            env = env.env
            self.layers.append(env)
        for part in (*self.layers, *GLOBAL, *shared_parts(env)):
            self.number(part)

    def number(self, part: Any) -> int:
        """Returns the number of a part that is held as it is, and takes up what is in it."""
        if id(part) not in self.numbers:
            self.numbers[id(part)] = len(self.parts)
            self.parts.append(part)
            for each in inside(part):
                if is_held(type(each)):
                    self.number(each)
        return self.numbers[id(part)]

    def states(self) -> States:
        """Returns the states of all generators that have been seen; torch's own, if it is loaded, is the last."""
        seen = [part for part in self.parts if is_generator(type(part))]
        seen = [part.bit_generator if isinstance(part, np.random.Generator) else part for part in seen]
        if torch := sys.modules.get("torch"):
            seen.append(torch.default_generator)
        return [(each, state_of(each)) for each in {id(each): each for each in seen}.values()]

    def keep(self, states: States | None = None) -> Position:
        """Returns the position in which the environment is; `states` are those of its generators, where known.

        Raises one of CANNOT if it holds what cannot be copied, such as an open file or a window.
        """
        data = Keeper(self).bytes_of([vars(layer) for layer in self.layers])
        return data, self.states() if states is None else states

    def put_back(self, position: Position, states: States | None = None) -> None:
        """Sets the environment to a position, and generators to its states or to others; () leaves them alone."""
        data, kept = position
        for generator, state in kept if states is None else states:
            set_state(generator, state)
        restorer = Restorer(io.BytesIO(data))
        restorer.parts = self.parts
        for layer, content in zip(self.layers, restorer.load(), strict=True):
            attributes = vars(layer)
            attributes.clear()
            attributes.update(content)

    def hold_the_same_as(self, later: "Positions") -> bool:
        """Says whether parts that are held as they are, so far, have the same numbers among those of `later`."""

        def sign(part: Any) -> Any:
            if isinstance(part, np.ndarray):
                return str(part.dtype), part.tolist()
            return type(part) if is_generator(type(part)) else id(part)

        return [*map(sign, self.parts)] == [*map(sign, later.parts[: len(self.parts)])]

    def identity(self) -> bytes:
        """Returns bytes that are equal in equal positions, whatever chance is to come, and from whichever reset."""
        contents = [{name: part for name, part in vars(layer).items() if name != SEED} for layer in self.layers]
        try:
            return Keeper(self, compares=True).bytes_of(contents)
        except (ValueError, RecursionError):  # parts hold each other
            return Keeper(self).bytes_of(contents)


class Keeper(pickle.Pickler):
    """Pickles what an environment holds; to compare, it sorts sets and ignores which parts are one object."""

    def __init__(self, positions: Positions, compares: bool = False) -> None:
        self.buffer, self.positions, self.compares = io.BytesIO(), positions, compares
        super().__init__(self.buffer, protocol=5)
        self.fast = compares

    def bytes_of(self, part: Any) -> bytes:
        self.dump(part)
        return self.buffer.getvalue()

    def persistent_id(self, part: Any) -> Any | None:
        kind = type(part)
        if kind in PLAIN:
            return None
        if self.compares and kind in (set, frozenset):
            return kind.__name__, sorted(Keeper(self.positions, True).bytes_of(each) for each in part)
        if self.compares and kind.__name__ == "Tensor":  # torch's own bytes name the file that they would go to
            return str(part.dtype), part.tolist()
        constant = is_held(kind) or (kind is np.ndarray and not part.flags.writeable)
        return self.positions.number(part) if constant or id(part) in self.positions.numbers else None

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, gym.Env | EzPickle):  # which would be pickled as what it was made of
            how = __newobj__, (type(part),), vars(part)
            return (
                how if self.compares else (*how, None, None, lambda empty, attributes: vars(empty).update(attributes))
            )
        return NotImplemented


class Restorer(pickle.Unpickler):
    """Unpickles what a `Keeper` has kept."""

    parts: Sequence[Any] = ()

    def persistent_load(self, number: int) -> Any:
        return self.parts[number]


@lru_cache(maxsize=4096)
def is_generator(kind: type) -> bool:
    return issubclass(kind, GENERATORS) or (kind.__module__, kind.__name__) == ("torch._C", "Generator")


@lru_cache(maxsize=4096)
def is_held(kind: type) -> bool:
    return issubclass(kind, HELD) or is_generator(kind)


def inside(part: Any) -> Iterator[Any]:
    """Yields what a function or a space has in it."""
    if isinstance(part, FunctionType):
        yield from (*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values())
        for cell in part.__closure__ or ():
            with suppress(ValueError):  # it is empty yet
                yield cell.cell_contents
    elif isinstance(part, gym.Space):
        for value in vars(part).values():
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)


def shared_parts(env: gym.Env) -> list[Any]:
    """Lists generators and spaces of an environment's classes and their modules."""
    classes = [vars(kind) for kind in type(env).__mro__]
    functions = [value for names in classes for value in names.values() if isinstance(value, FunctionType)]
    modules = {id(function.__globals__): function.__globals__ for function in functions}
    values = [value for names in (*classes, *modules.values()) for value in names.values()]
    return [value for value in values if is_generator(type(value)) or isinstance(value, gym.Space)]


def state_of(generator: Any) -> Any:
    """Returns the state of a generator; None: it has none, as it draws from the operating system."""
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state().numpy()


def set_state(generator: Any, state: Any) -> None:
    """Sets a generator to a state, or to what follows from a whole number."""
    if isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, random.Random | np.random.RandomState):
        if isinstance(state, int | None):
            generator.seed(state)  # far faster than setting a state
        else:
            generator.setstate(state) if isinstance(generator, random.Random) else generator.set_state(state)
    elif isinstance(state, int):
        generator.manual_seed(state)
    else:
        generator.set_state(sys.modules["torch"].from_numpy(state))


def with_seed(states: States, seed: tuple[int, ...]) -> States:
    """Returns other states of the same generators, which follow from `seed`."""
    seeds = np.random.SeedSequence(seed).generate_state(len(states)).tolist()
    return [
        (generator, type(generator)(number).state if isinstance(generator, np.random.BitGenerator) else number)
        for (generator, _), number in zip(states, seeds, strict=True)
    ]


def are_equal(states: States, later: States) -> bool:
    """Returns whether these are the same generators, none has been drawn from, and none draws from elsewhere."""
    pairs = list(zip(states, later, strict=False))
    same = len(states) == len(later) and all(first is second for (first, _), (second, _) in pairs)
    return same and all(a is not None and pickle.dumps(a) == pickle.dumps(b) for (_, a), (_, b) in pairs)
