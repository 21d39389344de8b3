"""Credit for single moves where a reward tells nothing apart: by search where there is no chance, else by playouts.

A move is worth the discounted return that follows it: of the best play (`Search`), or of random play, on the mean
(`Playouts`). As a reward that is relative in its state: the worst move earns 0, the best 1, and no move at all less.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np

from extras.lookahead.positions import chance, identity, keep, put_back

NO_MOVE = -0.5  # beside 0 for the worst and 1 for the best
MOST_MAPS, MOST_STATES = 64, 4096  # that are kept
DRAWN = 8  # actions of a state that are compared where they are not numbered
MOST_TEXTS = 512  # of a space of texts whose every text is compared
SPREAD = 1e-9  # values closer than this part of the largest are equal


class NoCredit(ValueError):
    """An environment for which this kind of credit does not work."""


@dataclass(frozen=True)
class Map:
    """What a reset reaches by all moves: positions [S] in the order of their shortest ways, the first the reset's.

    Attributes:
        following: [S, A] int, the position behind a move; -1: the episode is over.
        values: [S, A] float, the discounted return of a move and the best play after it.
        ways: to each position, the moves of a shortest way.
    """

    following: np.ndarray
    values: np.ndarray
    ways: list[tuple[int, ...]]

    @cached_property
    def useful(self) -> list[int]:
        """The positions in which some move is better than another."""
        low, high = self.values.min(1), self.values.max(1)
        return np.flatnonzero(high - low > SPREAD * max(np.abs(self.values).max(), 1)).tolist()


def explore(world: Any, actions: Sequence[Any], discount: float, most: int) -> Map:
    """Tries all moves in all positions that a world's reset reaches, breadth first.

    Raises:
        NoCredit: a move draws a random number, or there are more than `most` positions.
    """
    env, start = world.env, keep(world.env)
    numbers, frontier, ways, rows = {identity(env): 0}, deque([start]), [()], []
    while frontier:
        position, row = frontier.popleft(), []
        way = ways[len(rows)]
        for action in actions:
            generators = put_back(env, position)
            before = chance(generators)
            _, reward, terminated, truncated, _ = env.step(world.acts.native(action))
            if chance(generators) != before:
                raise NoCredit(f"a move draws random numbers, after {list(way)}")
            if terminated or truncated:
                row.append((-1, float(reward)))
                continue
            if (reached := identity(env)) not in numbers:
                if len(numbers) == most:
                    raise NoCredit(f"a reset reaches more than {most} positions")
                numbers[reached] = len(numbers)
                frontier.append(keep(env))
                ways.append((*way, action))
            row.append((numbers[reached], float(reward)))
        rows.append(row)
    put_back(env, start)
    table = np.array(rows)  # [S, A, 2]
    return Map(table[..., 0].astype(int), best_returns(table[..., 0].astype(int), table[..., 1], discount), ways)


def best_returns(following: np.ndarray, rewards: np.ndarray, discount: float) -> np.ndarray:
    """Iterates the values of moves, [S, A]: r + discount · max of the next position's, 0 at an end (-1)."""
    values, before = rewards, None
    while before is None or np.abs(values - before).max() > 1e-12 * max(np.abs(values).max(), 1):
        best = np.append(values.max(1), 0.0)  # [-1] is an end
        values, before = rewards + discount * best[following], values
    return values


class Credit:
    """Values of moves in the states of a text environment (custom/gym/text_env.py)."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.states: dict[Any, dict[Any, float]] = {}

    def ways(self, seed: int) -> list[tuple[Any, ...]] | None:
        """Lists the ways from a reset to states that are worth training on; None: walks lead to any."""
        return None

    def values(self, state: Any) -> dict[Any, float]:
        """Returns what moves are worth in a state, by move; of those that are not numbered, some."""
        key = state.seed, state.actions
        if key not in self.states:
            if len(self.states) == MOST_STATES:
                self.states.pop(next(iter(self.states)))
            self.states[key] = self.compute(state)
        return self.states[key]

    def compute(self, state: Any) -> dict[Any, float]:
        raise NotImplementedError

    def value(self, state: Any, action: Any) -> float:
        return self.values(state)[action]

    def best(self, state: Any) -> tuple[Any, ...]:
        """Returns the best moves of a state; () where none is better than another."""
        values = self.values(state)
        low, high = min(values.values()), max(values.values())
        slack = SPREAD * max(abs(low), abs(high), 1)
        return () if high - low <= slack else tuple(action for action, value in values.items() if value >= high - slack)

    def reward(self, state: Any, action: Any | None) -> float:
        """Returns how good a move is among those of its state: 0 the worst, 1 the best; NO_MOVE for None."""
        if action is None:
            return NO_MOVE
        values = self.values(state)
        low, high = min(values.values()), max(values.values())
        if high - low <= SPREAD * max(abs(low), abs(high), 1):
            return 0.0
        return float(np.clip((self.value(state, action) - low) / (high - low), NO_MOVE / 2, 1.5))


class Search(Credit):
    """Knows the best play of an environment without chance, of numbered actions and few positions.

    Raises:
        NoCredit: it is not such an environment.
    """

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.maps: dict[int, Map] = {}
        if not environment.actions:
            raise NoCredit("its actions are not numbered")

    def map_of(self, seed: int) -> Map:
        if seed not in self.maps:
            if len(self.maps) == MOST_MAPS:
                self.maps.pop(next(iter(self.maps)))
            environment, world = self.environment, self.environment.world_of(seed)
            world.play(seed, ())
            self.maps[seed] = explore(world, environment.actions, environment.discount, environment.search_budget)
        return self.maps[seed]

    def ways(self, seed: int) -> list[tuple[Any, ...]]:
        reached = self.map_of(seed)
        return [reached.ways[position] for position in reached.useful]

    def compute(self, state: Any) -> dict[Any, float]:
        reached, actions, position = self.map_of(state.seed), self.environment.actions, 0
        for action in state.actions:
            position = reached.following[position, actions.index(action)]
        return dict(zip(actions, reached.values[position].tolist(), strict=True))


class Playouts(Credit):
    """Estimates what a move is worth by the mean return of random play after it.

    Playout k draws the same random numbers after every move of a state, its own and the environment's: what differs is
    the move. Raises ValueError for an environment whose positions cannot be restored.
    """

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        world = environment.world_of(0)
        world.play(0, ())
        keep(world.env)  # or raises

    def compute(self, state: Any) -> dict[Any, float]:
        return {action: self.estimate(state, action) for action in self.candidates(state)}

    def value(self, state: Any, action: Any) -> float:
        values = self.values(state)
        if action not in values:
            values[action] = self.estimate(state, action)
        return values[action]

    def candidates(self, state: Any) -> list[Any]:
        """Lists the moves that are compared in a state: all, or some that are drawn for it."""
        environment = self.environment
        if environment.actions:
            return [*environment.actions]
        world = environment.world_of(state.seed)
        space = world.env.action_space
        if isinstance(space, gym.spaces.Text) and len(space.character_set) ** space.max_length <= MOST_TEXTS:
            lengths = range(space.min_length, space.max_length + 1)
            letters = sorted(space.character_set)
            return ["".join(text) for length in lengths for text in product(letters, repeat=length)]
        rng = np.random.default_rng((state.seed, len(state.actions)))
        return list(dict.fromkeys(self.draw(world, rng) for _ in range(DRAWN)))

    def draw(self, world: Any, rng: np.random.Generator) -> Any:
        actions = self.environment.actions
        if actions:
            return actions[rng.integers(len(actions))]
        world.env.action_space.seed(int(rng.integers(2**31)))
        return world.acts.plain(world.env.action_space.sample())

    def estimate(self, state: Any, action: Any) -> float:
        """Returns the mean discounted return of a move and random moves after it, over the playouts."""
        environment, world = self.environment, self.environment.world_of(state.seed)
        world.restore(state.seed, state.actions)
        position, total = keep(world.env), 0.0
        left = max(environment.max_turns - len(state.actions), 1)
        horizon = min(environment.horizon or left, left)
        for playout in range(environment.playouts):
            put_back(world.env, position, (state.seed, len(state.actions), playout))
            rng, weight, move = np.random.default_rng((state.seed, playout)), 1.0, action
            for _ in range(horizon):
                _, reward, terminated, truncated, _ = world.env.step(world.acts.native(move))
                total += weight * float(reward)
                if terminated or truncated:
                    break
                weight *= environment.discount
                move = self.draw(world, rng)
        return total / environment.playouts
