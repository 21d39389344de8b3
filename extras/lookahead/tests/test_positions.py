"""Positions of random environments: what follows is the same to the bit, whatever they are made of."""

import collections
import functools
import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extras.lookahead.positions import Positions, are_equal, with_seed

MODULE_RNG = np.random.default_rng(5)


class Cell:
    """Two names for one list, a generator, and the way back to who holds it."""

    def __init__(self, env):
        self.env, self.row = env, [0]
        self.same, self.rng = self.row, np.random.default_rng(7)

    def move(self, action):
        self.row.append(action)
        self.env.cell_moves = len(self.same)
        return self.env.cell_moves, self.rng.random()


class Inner(gym.Env, gym.utils.EzPickle):
    """An environment within another, which pickles itself as what it was made of."""

    action_space = gym.spaces.Discrete(3)

    def __init__(self, start):
        gym.utils.EzPickle.__init__(self, start)
        self.place = start

    def move(self, action):
        self.place += action
        return self.place, self.np_random.random() if self._np_random else self.reset(seed=1)


class Slots:
    __slots__ = ("place",)


def closure(rng):
    return lambda action: rng.integers(9) + action


def change(change_part):
    """A move of `part` that changes it, and shows it afterwards."""
    return lambda env, part, action: (change_part(part, action), repr(part))


class Count:
    value = 0

    def add(self, number):
        self.value += number
        return self.value


PARTS = {  # name: (makes the part of an environment, moves it)
    "array": (lambda env: np.zeros(3), change(lambda part, action: part.__setitem__(action, part[action] + 1))),
    "list": (lambda env: [[0], [1]], change(lambda part, action: part[action % 2].append(action))),
    "dict": (lambda env: {"b": 1, "a": [2]}, change(lambda part, action: part.update({action: len(part)}))),
    "set": (lambda env: {1, 5}, lambda env, part, action: (part.symmetric_difference_update({action}), sorted(part))),
    "deque": (lambda env: collections.deque([0], 3), change(lambda part, action: part.append(action))),
    "default": (lambda env: collections.defaultdict(lambda: 4), lambda env, part, action: part[action % 2] + len(part)),
    "count": (lambda env: Count(), lambda env, part, action: part.add(action)),
    "local class": (lambda env: type("Local", (Count,), {})(), lambda env, part, action: part.add(action)),
    "partial": (lambda env: functools.partial(env.bump, 2), lambda env, part, action: part()),
    "method": (lambda env: {0: env.bump}, lambda env, part, action: part[0](action)),
    "lambda": (lambda env: lambda action: env.bump(action), lambda env, part, action: part(action)),
    "cell": (Cell, lambda env, part, action: part.move(action)),
    "inner": (lambda env: Inner(3), lambda env, part, action: part.move(action)),
    "slots": (lambda env: Slots(), lambda env, part, action: setattr(part, "place", action)),
    "generator": (lambda env: [np.random.default_rng(1)], lambda env, part, action: part[0].random()),
    "bits": (lambda env: np.random.Philox(1), lambda env, part, action: np.random.Generator(part).random()),
    "state": (lambda env: {"rng": np.random.RandomState(2)}, lambda env, part, action: part["rng"].normal()),
    "random": (lambda env: (random.Random(3),), lambda env, part, action: part[0].gauss(0, 1)),
    "torch": (lambda env: torch.Generator(), lambda env, part, action: torch.rand(1, generator=part).item()),
    "tensor": (lambda env: torch.zeros(2), lambda env, part, action: part.add_(action).tolist()),
    "closure": (lambda env: closure(np.random.default_rng(2)), lambda env, part, action: part(action)),
    "own": (lambda env: None, lambda env, part, action: env.np_random.random()),
    "module": (lambda env: None, lambda env, part, action: MODULE_RNG.random()),
    "global": (lambda env: None, lambda env, part, action: (random.random(), np.random.rand(), torch.rand(1).item())),
    "space": (lambda env: None, lambda env, part, action: (env.action_space.sample(), env.spare.sample()["a"])),
    "late": (
        lambda env: None,
        lambda env, part, action: vars(env).update(late=action) if action == 2 else vars(env).pop("late", None),
    ),
}


class Zoo(gym.Env):
    action_space = gym.spaces.Discrete(3, seed=4)
    spare = gym.spaces.Dict(a=gym.spaces.Discrete(99, seed=4))

    def __init__(self, names):
        self.names = names

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bumps, self.env = 0, None
        self.parts = {name: PARTS[name][0](self) for name in self.names}
        return None, {}

    def bump(self, number):
        self.bumps += number
        return self.bumps

    def step(self, action):
        shown = [PARTS[name][1](self, part, action) for name, part in self.parts.items()]
        return repr(shown), self.bumps, False, False, {}


class Sums(gym.Wrapper):
    total = 0.0

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        self.total += reward + action
        return observation, self.total, *rest


def zoo(names, before=()):
    env = Sums(gym.wrappers.OrderEnforcing(Zoo(names)))
    env.reset(seed=3)
    play(env, before)
    return env, Positions(env)


def play(env, actions):
    return [env.step(action)[:2] for action in actions]


moves = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=150)
@given(st.lists(st.sampled_from([*PARTS]), min_size=1, max_size=6, unique=True), moves, moves)
def test_what_follows_a_position_that_is_put_back_is_the_same_to_the_bit(names, before, after):
    env, positions = zoo(names, before)
    position, identity = positions.keep(), positions.identity()
    first = play(env, [*after, 1, 2])
    for _ in range(2):
        positions.put_back(position)
        assert positions.identity() == identity and are_equal(positions.states(), position[1])
        assert play(env, [*after, 1, 2]) == first


@pytest.mark.parametrize(
    "name", ["generator", "bits", "state", "random", "torch", "closure", "own", "module", "global"]
)
def test_other_chance_follows_from_its_seed(name):
    env, positions = zoo([name], [1])
    position, drawn = positions.keep(), []
    for seed in ((1, 2), (1, 2), (1, 3)):
        positions.put_back(position, with_seed(position[1], seed))
        assert not are_equal(positions.states(), position[1])
        drawn.append(play(env, [1, 1]))
    assert drawn[0] == drawn[1] != drawn[2]


def test_equal_positions_are_known_by_what_they_hold_not_by_how_it_came_there():
    def identity(*actions):
        positions.put_back(start)
        play(env, actions)
        return positions.identity()

    env, positions = zoo(["set", "count"])
    env.unwrapped.nested = frozenset({frozenset({"a", "b"}), frozenset()})
    start = positions.keep()
    assert identity(1, 2) == identity(2, 1) != identity(1, 1)
    rules = [lambda: 1, lambda: 2]
    env.unwrapped.rule = rules[0]
    first = positions.identity()
    env.unwrapped.rule = rules[1]
    assert positions.identity() != first
    other = Positions(env)  # in which the other rule has the same number
    assert other.identity() == first and not other.hold_the_same_as(positions)
    env.unwrapped.rule, env.unwrapped.circle = rules[0], [[]]
    env.unwrapped.circle[0].append(env.unwrapped.circle)
    assert positions.identity() == positions.identity() != first


def test_read_only_arrays_stay_where_they_are_and_others_do_not():
    env, positions = zoo(["count"])
    table = env.unwrapped.table = np.zeros(1 << 17)
    assert len(positions.keep()[0]) > 1 << 20
    table.flags.writeable = False
    positions.put_back(position := positions.keep())
    assert len(position[0]) < 1000 and env.unwrapped.table is table
