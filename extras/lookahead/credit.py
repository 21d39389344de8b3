"""Credit for single moves where a reward tells nothing apart: by search where there is no chance, else by playouts.

A move is worth the discounted return that follows it: of the best play (`Search`), or of random play, on the mean
(`Playouts`). As a reward that is relative in its state: the worst move earns 0, the best 1, and no move at all less.
"""

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice, product, tee
from typing import Any

import gymnasium as gym
import numpy as np

from extras.lookahead.positions import CANNOT, Position, Positions, are_equal, with_seed

NO_MOVE = -0.5  # beside 0 for the worst and 1 for the best
MOST_MAPS, MOST_STATES = 64, 4096  # that are kept
MOST_MOVES = 512  # of a space whose every action is compared
GRID, OF_A_NUMBER = 27, 9  # actions of a Box that are compared, and values of each number: the same in all states
SPREAD = 1e-9  # values closer than this part of the largest are equal
TRIALS, MOVES = 3, 12  # walks on which positions are tried out, and their moves
FINALISTS = 4  # moves that are played out as often as any
PLAYOUTS_INSTEAD = "set env.kwargs.reward=playouts"
PAY_INSTEAD = "else set env.kwargs.reward=env"


class NoCredit(ValueError):
    """An environment for which this kind of credit does not work; `reason` says why, without a remedy."""

    reason = ""


def no_credit(environment: Any, reason: str, remedy: str) -> NoCredit:
    error = NoCredit(f"{environment.env_id}, with env.kwargs.reward={environment.reward}: {reason}: {remedy}")
    error.reason = reason
    return error


@dataclass(frozen=True)
class Map:
    """A map of all positions [S] that a reset reaches, in the order of their shortest ways, the first the reset's.

    Attributes:
        following: [S, A] int, the position behind a move; -1: the episode is over.
        values: [S, A] float, the discounted return of a move and the best play after it.
        ways: to each position, the moves of a shortest way.
        positions: what they hold; `numbers`: theirs, by identity.
    """

    following: np.ndarray
    values: np.ndarray
    ways: list[tuple[Any, ...]]
    positions: Positions
    numbers: dict[bytes, int]

    @cached_property
    def useful(self) -> list[int]:
        """The positions in which some move is better than another."""
        low, high = self.values.min(1), self.values.max(1)
        return np.flatnonzero(high - low > SPREAD * max(np.abs(self.values).max(), 1)).tolist()

    def seen_from(self, start: bytes, moves: Sequence[Any]) -> "Map":
        """Returns the part that is reached from another position, as `explore` finds it there."""
        ways = {self.numbers[start]: ()}
        for position in (order := [*ways]):
            for move, reached in zip(moves, self.following[position].tolist(), strict=True):
                if reached >= 0 and reached not in ways:
                    ways[reached] = (*ways[position], move)
                    order.append(reached)
        index = np.full(len(self.ways) + 1, -1)  # the last: of an end
        index[order] = range(len(order))
        numbers = {identity: int(index[number]) for identity, number in self.numbers.items() if number in ways}
        return Map(index[self.following[order]], self.values[order], [*ways.values()], self.positions, numbers)


def moves_of(environment: Any) -> tuple[Any, ...]:
    """Lists the moves that are compared in every state, of a Box some; () where there are too many."""
    if environment.actions:
        return tuple(environment.actions)
    world = environment.world_of(environment.train_seed(0))
    return tuple(dict.fromkeys(map(world.acts.plain, grid(world.env.action_space))))


def explore(environment: Any, seed: int) -> Map:
    """Tries all moves in all positions that a reset reaches, breadth first, each twice.

    Raises NoCredit where a move draws random numbers or goes differently the second time, or positions are too many.
    """
    world, most, reset = environment.world_of(seed), environment.search_budget, f"after reset(seed={seed})"
    moves = moves_of(environment)
    world.play(seed, ())
    positions = Positions(world.env)
    _, states = start = positions.keep()
    numbers = {positions.identity(): 0}
    frontier, ways, rows = deque([start]), [()], []
    while frontier:
        position, row = frontier.popleft(), []
        for way in [(*ways[len(rows)], action) for action in moves]:
            first, second = (attempt(world, positions, position, way) for _ in range(2))
            if first != second:
                reason = f"a move has one outcome, then another, {reset} and actions {list(way)}"
                raise no_credit(environment, reason, PLAYOUTS_INSTEAD)
            reward, over, reached = first
            if not over and reached not in numbers:
                if (len(numbers) + 1) * len(moves) > most:
                    remedy = f"raise env.kwargs.search_budget={most}, or {PLAYOUTS_INSTEAD}"
                    raise no_credit(environment, f"there are more than {most} moves in positions {reset}", remedy)
                numbers[reached] = len(numbers)
                frontier.append(positions.keep(states))
                ways.append(way)
            row.append((-1 if over else numbers[reached], reward))
        rows.append(row)
        if (len(rows) == 1 or not frontier) and not are_equal(positions.states(), states):
            raise no_credit(environment, f"moves draw random numbers {reset}", PLAYOUTS_INSTEAD)
    positions.put_back(start)
    table = np.array(rows)  # [S, A, 2]
    following = table[..., 0].astype(int)
    return Map(following, best_returns(following, table[..., 1], environment.discount), ways, positions, numbers)


def attempt(world: Any, positions: Positions, position: Position, way: Sequence[Any]) -> tuple[float, bool, bytes]:
    """Plays the last move of `way` in a position: its reward, whether the episode is over, what tells where it led."""
    positions.put_back(position, ())
    world.actions = list(way)
    with world.blame():
        _, reward, terminated, truncated, _ = world.env.step(world.acts.native(way[-1]))
    return float(reward), bool(terminated or truncated), positions.identity()


def best_returns(following: np.ndarray, rewards: np.ndarray, discount: float) -> np.ndarray:
    """Iterates the values of moves, [S, A]: r + discount · max of the next position's, 0 at an end (-1)."""
    values, before = rewards, None
    while before is None or np.abs(values - before).max() > 1e-12 * max(np.abs(values).max(), 1):
        best = np.append(values.max(1), 0.0)  # [-1] is an end
        values, before = rewards + discount * best[following], values
    return values


def goes_on_as_before(world: Any, seed: int) -> bool:
    """Plays a random walk, puts a position of it back, and returns whether all follows once more."""
    walk = world.random_walk(seed, MOVES)
    world.play(seed, walk[: seed * MOVES // (2 * TRIALS)])
    positions, before, stories = Positions(world.env), tuple(world.actions), ([], [])
    position = positions.keep()
    for moments in stories:
        world.actions, over = [*before], False
        for move in walk:
            if not over:
                reward, terminated, truncated, _ = world.step(move)
                moments.append((world.text, reward, terminated, truncated))
                over = terminated or truncated
        positions.put_back(position)
    return stories[0] == stories[1]


class Credit:
    """Values of moves in the states of a text environment (custom/gym/text_env.py)."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.compute = lru_cache(MOST_STATES)(self.compute)

    @cached_property
    def moves(self) -> tuple[Any, ...]:
        return moves_of(self.environment)

    def check(self) -> None:
        """Raises NoCredit for an environment whose positions cannot be put back."""
        for seed in range(TRIALS):
            try:
                same = goes_on_as_before(self.environment.world_of(seed), seed)
            except CANNOT as error:
                reason, remedy = f"what it holds cannot be copied ({error})", "make that where it is used"
                raise no_credit(self.environment, reason, f"{remedy}, {PAY_INSTEAD}") from error
            if not same:
                reason = f"after reset(seed={seed}) what follows differs when a position is put back"
                remedy = f"keep what changes in attributes of the environment, not in views of arrays, {PAY_INSTEAD}"
                raise no_credit(self.environment, reason, remedy)

    def ways(self, seed: int) -> list[tuple[Any, ...]] | None:
        """Lists the ways from a reset to states that are worth training on; None: walks lead to any."""
        return None

    def compute(self, seed: int, actions: tuple[Any, ...]) -> dict[Any, float]:
        raise NotImplementedError

    def values(self, state: Any) -> dict[Any, float]:
        """Returns what moves are worth in a state, by move; of those that are not numbered, some."""
        return self.compute(state.seed, state.actions)

    def value(self, state: Any, action: Any) -> float:
        return self.values(state)[action]

    def best(self, state: Any) -> tuple[Any, ...]:
        """Returns the best moves of a state; () where none is better than another."""
        return self.best_of(self.values(state))

    @staticmethod
    def best_of(values: dict[Any, float]) -> tuple[Any, ...]:
        """Returns the moves of the largest values; () where all are equal."""
        low, high, slack = extremes(values)
        return () if high - low <= slack else tuple(action for action, value in values.items() if value >= high - slack)

    def reward(self, state: Any, action: Any | None) -> float:
        """Returns how good a move is among those of its state: 0 the worst, 1 the best; NO_MOVE for None."""
        if action is None:
            return NO_MOVE
        low, high, slack = extremes(self.values(state))
        if high - low <= slack:
            return 0.0
        return float(np.clip((self.value(state, action) - low) / (high - low), NO_MOVE / 2, 1.5))


def extremes(values: dict[Any, float]) -> tuple[float, float, float]:
    """Returns the least value, the largest, and how far apart equal ones may be."""
    low, high = min(values.values()), max(values.values())
    return low, high, SPREAD * max(abs(low), abs(high), 1)


def grid(space: gym.Space) -> list[Any]:
    """Lists all actions of a space, of a Box those on a grid; [] where they are too many."""
    match space:
        case gym.spaces.Discrete():
            return [*range(int(space.start), int(space.start + space.n))] if space.n <= MOST_MOVES else []
        case gym.spaces.MultiDiscrete() if space.nvec.prod() <= MOST_MOVES:
            numbers = np.indices(space.nvec.ravel()).reshape(space.nvec.size, -1).T
            return [*(numbers.reshape(-1, *space.shape) + space.start).astype(space.dtype)]
        case gym.spaces.MultiBinary() if 2 ** (size := int(np.prod(space.shape))) <= MOST_MOVES:
            return [*np.indices((2,) * size).reshape(size, -1).T.reshape(-1, *space.shape).astype(space.dtype)]
        case gym.spaces.Tuple() if math.prod(map(len, parts := [*map(grid, space)])) <= MOST_MOVES:
            return [*product(*parts)]
        case gym.spaces.Dict():
            return [dict(zip(space, each, strict=True)) for each in grid(gym.spaces.Tuple(space.values()))]
        case gym.spaces.Text() if len(space.character_set) ** space.max_length <= MOST_MOVES:
            lengths = range(space.min_length, space.max_length + 1)
            return ["".join(text) for n in lengths for text in product(sorted(space.character_set), repeat=n)]
        case gym.spaces.Box() if space.is_bounded() and (most := int(GRID ** (1 / space.low.size) + 1e-9)) >= 3:
            points = min(most - 1 + most % 2, OF_A_NUMBER)  # odd: the middle is one
            steps = np.linspace(space.low.ravel(), space.high.ravel(), points)
            numbers = np.stack([axis.ravel() for axis in np.meshgrid(*steps.T, indexing="ij")], -1)
            return [*numbers.reshape(-1, *space.shape).astype(space.dtype)]
    return []


def has_numbers(space: gym.Space) -> bool:
    """Says whether actions hold real numbers, of which a list has some only."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return any(map(has_numbers, space.values() if isinstance(space, gym.spaces.Dict) else space))
    return isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)


class Search(Credit):
    """Knows the best play of an environment without chance, of few actions and few positions."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.maps: deque[Map] = deque(maxlen=MOST_MAPS)
        self.map_of = lru_cache(MOST_MAPS)(self.map_of)

    def check(self) -> None:
        """Raises NoCredit for an environment of another kind, as far as its first training state shows."""
        environment, discount = self.environment, self.environment.discount
        space = environment.world_of(environment.train_seed(0)).env.action_space
        if not self.moves or has_numbers(space):
            raise no_credit(environment, f"its actions, {space}, are no list of at most {MOST_MOVES}", PLAYOUTS_INSTEAD)
        if not 0 <= discount < 1:
            remedy = "set one below 1, so that sooner is better"
            raise no_credit(environment, f"env.kwargs.discount={discount} never ends on a circle", remedy)
        super().check()
        self.map_of(environment.train_seed(0))

    def map_of(self, seed: int) -> Map:
        """Returns the map of what a reset reaches, where another reset has come by its start as a part of that map."""
        world = self.environment.world_of(seed)
        world.play(seed, ())
        positions = Positions(world.env)
        start = positions.identity()
        for known in self.maps:
            if start in known.numbers and positions.hold_the_same_as(known.positions):
                return known.seen_from(start, self.moves)
        self.maps.append(explore(self.environment, seed))
        return self.maps[-1]

    def ways(self, seed: int) -> list[tuple[Any, ...]]:
        reached = self.map_of(seed)
        return [reached.ways[position] for position in reached.useful]

    def compute(self, seed: int, actions: tuple[Any, ...]) -> dict[Any, float]:
        reached, position = self.map_of(seed), 0
        for action in actions:
            position = reached.following[position, self.moves.index(action)]
            if position < 0:
                raise ValueError(f"after reset(seed={seed}) the actions {list(actions)} end the episode")
        return dict(zip(self.moves, reached.values[position].tolist(), strict=True))


class Playouts(Credit):
    """Estimates what a move is worth by the mean return of random play after it.

    Playout k draws the same random numbers after every move of a state, its own and the environment's: what differs is
    the move.
    """

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.estimate = lru_cache(MOST_STATES)(self.estimate)

    def compute(self, seed: int, actions: tuple[Any, ...]) -> dict[Any, float]:
        moves = self.candidates(seed, actions)
        return dict(zip(moves, self.estimate(seed, actions, moves), strict=True))

    def value(self, state: Any, action: Any) -> float:
        values = self.values(state)  # of another move it is kept apart: what is best must not depend on who asks
        return values[action] if action in values else self.estimate(state.seed, state.actions, (action,))[0]

    def candidates(self, seed: int, actions: tuple[Any, ...]) -> tuple[Any, ...]:
        """Lists the moves that are compared in a state: all, or some that are drawn for it."""
        return self.moves or tuple(dict.fromkeys(islice(self.random_moves(seed, len(actions)), GRID)))

    def random_moves(self, seed: int, number: int) -> Iterator[Any]:
        """Yields random moves without end, that follow from both numbers."""
        rng, actions = np.random.default_rng((seed, number)), self.environment.actions
        while actions:
            yield actions[rng.integers(len(actions))]
        world = self.environment.world_of(seed)
        space = copy.deepcopy(world.env.action_space)  # the environment may draw from its own
        space.seed(int(rng.integers(2**31)))
        while True:
            yield world.acts.plain(space.sample())

    def estimate(self, seed: int, actions: tuple[Any, ...], moves: tuple[Any, ...]) -> list[float]:
        """Returns the mean discounted return of each move and random ones after it, over the playouts."""
        returns = np.full((self.environment.playouts, len(moves)), np.nan)
        self.play_all(seed, actions, moves, returns)
        return means(returns).tolist()

    def play_all(self, seed: int, actions: Sequence[Any], moves: Sequence[Any], returns: np.ndarray) -> None:
        """Puts returns of playouts, [K, A], where there is none (NaN) yet; of moves that are given up none is put."""
        environment, world = self.environment, self.environment.world_of(seed)
        left = max(environment.max_turns - len(actions), 1)
        horizon = min(environment.horizon or left, left)
        world.restore(seed, actions)
        positions = Positions(world.env)
        _, states = position = positions.keep()
        playing = np.arange(len(moves))
        for playout in range(environment.playouts):
            playing = self.go_on_with(playing, returns[:playout])
            chances = with_seed(states, (seed, len(actions), playout))
            for number, drawn in zip(playing, tee(self.random_moves(seed, playout), len(playing)), strict=True):
                if math.isnan(returns[playout, number]):
                    positions.put_back(position, chances)
                    world.actions = [*actions]
                    following = self.following(world, drawn)
                    returns[playout, number] = self.play_out(world, islice(chain([moves[number]], following), horizon))
        positions.put_back(position)  # also what the run itself draws from

    def go_on_with(self, playing: np.ndarray, returns: np.ndarray) -> np.ndarray:
        """Returns the moves to play on with: after an eighth, a quarter and half of the playouts the better half of
        them, as long as FINALISTS are left, so that time goes to moves that may be the best."""
        playouts = self.environment.playouts
        if len(returns) < 2 or len(returns) not in (playouts // part for part in (8, 4, 2)):
            return playing
        return better_half(returns.sum(0), playing)

    def following(self, world: Any, drawn: Iterator[Any]) -> Iterator[Any]:
        """Yields the moves after the one that is judged: those that are `drawn` at random."""
        return drawn

    def play_out(self, world: Any, moves: Iterator[Any]) -> float:
        """Plays moves until the episode is over; returns the discounted sum of rewards."""
        total, weight = 0.0, 1.0
        with world.blame():
            for move in moves:
                reward, terminated, truncated = self.step(world, move)
                total += weight * float(reward)
                if terminated or truncated:
                    break
                weight *= self.environment.discount
        return total

    def step(self, world: Any, move: Any) -> tuple[float, bool, bool]:
        """Plays a move: reward, terminated, truncated. Nobody reads where it leads."""
        world.actions.append(move)
        return world.env.step(world.acts.native(move))[1:4]


def better_half(totals: np.ndarray, playing: np.ndarray) -> np.ndarray:
    """Returns the better half of the moves that are playing, FINALISTS or more, and what is as good as the last."""
    kept = np.sort(totals[playing])[-max(-(-len(playing) // 2), FINALISTS) :]
    return playing[totals[playing] >= kept[0]]


def means(returns: np.ndarray) -> np.ndarray:
    """Returns the mean of each column [K, A], whose first rows are known, and the others NaN.

    A column with fewer is as far behind the best as in the rows that are known: these have the same random numbers.
    """
    counts, sums = len(returns) - np.isnan(returns).sum(0), np.nancumsum(returns, 0)
    averages = sums[counts - 1, range(len(counts))] / counts
    best = np.argmax(np.where(counts == len(returns), averages, -np.inf))
    return averages + (averages[best] - sums[counts - 1, best] / counts)
