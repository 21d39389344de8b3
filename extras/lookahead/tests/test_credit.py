"""Credit for moves: search against value iteration, playouts against exact means, and what each refuses."""

import copy
import json
import math
import os
import pickle
import random
import secrets
import subprocess
import sys
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from custom.env_wrapper import EnvState, make_env
from custom.gym.planning import best_actions
from extras.lookahead.credit import FINALISTS, GRID, NO_MOVE, NoCredit, better_half, explore, grid, has_numbers, means
from tests.runs import ROOT, compose
from training.environment import build_environment

KEY_AND_DOOR = "examples/games/key_and_door.py:KeyAndDoor-v0"
MODULE_RNG = random.Random(1)
TABLES = {}


class Played(gym.Env):
    """A table P that is played from the state of the reset's number; it draws where there is something to draw."""

    observation_space = gym.spaces.Discrete(10**9)

    def __init__(self, name):
        self.name = name
        self.action_space = gym.spaces.Discrete(len(TABLES[name][0]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = seed % len(TABLES[self.name])
        return self.place, {}

    def step(self, action):
        outcomes = TABLES[self.name][self.place][int(action)]
        chance = [outcome[0] for outcome in outcomes]
        index = self.np_random.choice(len(outcomes), p=chance) if len(outcomes) > 1 else 0
        _, self.place, reward, done = outcomes[index]
        return self.place, reward, done, False, {}


class Line(gym.Env):
    """Six cells; a step of 1 goes right, and `draw` pays in the fourth. What it holds is made by `holds`."""

    observation_space = gym.spaces.Discrete(100)
    rng = np.random.default_rng(1)

    def __init__(self, draw=None, holds=lambda: None, action_space=None, length=6):
        self.draw, self.holds, self.length = draw or (lambda env: 0.0), holds, length
        self.action_space = action_space or gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.action_space.seed(1)
        self.place, self.held = 0, {"deep": [self.holds()]}
        return self.place, {}

    def step(self, action):
        self.place += 1 if action else -1 if self.place else 0
        reward = self.draw(self) if self.place == 3 else float(self.place == self.length)
        return self.place, reward, self.place == self.length, False, {}


gym.register("Played-v0", Played)
gym.register("Line-v0", Line)


SURE = {"is_slippery": False}
LAKES = [{**SURE, "desc": generate_random_map(size, seed=seed)} for size in (4, 8) for seed in range(3)]
GAMES = [("FrozenLake-v1", SURE), ("FrozenLake8x8-v1", SURE), ("CliffWalking-v1", {}), ("Taxi-v4", {})]


@pytest.mark.parametrize(("env_id", "settings"), [*GAMES, *(("FrozenLake-v1", lake) for lake in LAKES)])
def test_search_finds_the_best_actions_of_value_iteration_in_every_state(env_id, settings, monkeypatch):
    monkeypatch.setitem(TABLES, "game", table := gym.make(env_id, **settings).unwrapped.P)
    environment = make_env("Played-v0", name="game", reward="search", repeatable=False)
    best, seen = best_actions(table, environment.discount), set()
    for start in table:
        if start in seen or all(outcome[3] for row in table[start].values() for outcome in row):
            continue  # an end, where no episode goes on
        reached = explore(environment, start)
        for position, way in enumerate(reached.ways):
            place = start
            for action in way:
                [(_, place, _, _)] = table[place][action]
            seen.add(place)
            values, wanted = reached.values[position], tuple(np.flatnonzero(best[place]).tolist())
            assert tuple(np.flatnonzero(values >= values.max() - 1e-9 * 20).tolist()) == wanted
            assert environment.credit.best(EnvState(start, way, "")) == (wanted if len(wanted) < len(values) else ())


class Boards(gym.Env):
    """Three cells, of which one pays; what is held as it is differs from reset to reset, where `constant`."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Discrete(3)

    def __init__(self, constant=False):
        self.constant = constant

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.board, self.place = np.eye(3)[self.np_random.integers(3)], int(self.np_random.integers(3))
        self.board.flags.writeable = not self.constant
        return self.place, {}

    def step(self, action):
        self.place = (self.place + action + 1) % 3
        return self.place, float(self.board[self.place]), bool(self.board[self.place]), False, {}


gym.register("Boards-v0", Boards)


@pytest.mark.parametrize(
    ("env_id", "settings", "count"),
    [("examples/games/blocks.py:Blocks-v0", {}, 24), ("Boards-v0", {}, 6), ("Boards-v0", {"constant": True}, 6)],
)
def test_a_map_that_another_reset_has_come_by_is_the_one_that_search_finds(env_id, settings, count):
    """There are 24 towers of four blocks; three boards, whose paying cells no other start reaches."""
    environment = make_env(env_id, reward="search", **settings)
    for seed in range(60):
        shared, alone = environment.credit.map_of(seed), explore(environment, seed)
        assert shared.ways == alone.ways and shared.numbers == alone.numbers
        assert np.array_equal(shared.following, alone.following) and np.array_equal(shared.values, alone.values)
    assert len(environment.credit.maps) <= count


SPACES = [  # with how many of their actions are compared
    (gym.spaces.MultiBinary(3), 8),
    (gym.spaces.MultiBinary((2, 2)), 16),
    (gym.spaces.MultiBinary(10), 0),
    (gym.spaces.Tuple([gym.spaces.Discrete(2, start=5), gym.spaces.MultiDiscrete([2, 3])]), 12),
    (gym.spaces.Dict(go=gym.spaces.Discrete(3), how=gym.spaces.Dict(far=gym.spaces.MultiBinary(2))), 12),
    (gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)]), 50),
    (gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.MultiBinary(10)]), 0),
]


@pytest.mark.parametrize(("space", "count"), SPACES, ids=str)
def test_all_actions_of_a_small_space_are_compared_and_some_of_numbers(space, count):
    actions = grid(space)
    assert len({repr(action) for action in actions}) == len(actions) == count
    assert all(map(space.contains, actions))
    assert has_numbers(space) == (count == 50)


CHANCE = {  # name: (draws, makes what the environment holds)
    "its own": (lambda env: env.np_random.random(), int),
    "held": (lambda env: env.held["deep"][0].random(), np.random.default_rng),
    "a held one's copy": (lambda env: moved_on(env.held["deep"]), np.random.default_rng),
    "a method": (lambda env: env.held["deep"][0](), lambda: np.random.default_rng().random),
    "a default's": (lambda env, rng=np.random.default_rng(2): rng.random(), int),  # noqa: B008
    "of the system": (lambda env: 0.0, random.SystemRandom),
    "of the class": (lambda env: env.rng.random(), int),
    "of the module": (lambda env: MODULE_RNG.random(), int),
    "of random": (lambda env: random.random(), int),
    "of numpy": (lambda env: np.random.rand(), int),
    "of torch": (lambda env: torch.rand(1).item(), int),
    "of the space": (lambda env: float(env.action_space.sample()), int),
    "new": (lambda env: np.random.default_rng().random(), int),
    "secrets": (lambda env: secrets.randbelow(10**9), int),
    "urandom": (lambda env: int.from_bytes(os.urandom(4)), int),
    "the clock": (lambda env: time.perf_counter(), int),
}


def moved_on(held):
    """Draws as functional libraries do: from a copy, which takes the place of what it is a copy of."""
    held[0] = copy.deepcopy(held[0])
    return held[0].random()


@pytest.mark.parametrize("source", CHANCE)
def test_chance_in_a_single_cell_is_never_taken_for_none(source):
    draw, holds = CHANCE[source]
    environment = make_env("Line-v0", draw=draw, holds=holds, reward="search", repeatable=False)
    with pytest.raises(NoCredit, match=r"(draw random numbers|then another).*: set env.kwargs.reward=playouts"):
        explore(environment, 0)


@pytest.mark.parametrize("source", [*CHANCE][:12])
def test_chance_of_a_known_generator_is_seen_even_where_its_outcome_is_the_same(source):
    draw, holds = CHANCE[source]
    rare = make_env("Line-v0", draw=lambda env: draw(env) > 2, holds=holds, reward="search", repeatable=False)
    with pytest.raises(NoCredit, match=r"moves draw random numbers after reset|then another"):
        explore(rare, 0)


class Views(Line):
    def step(self, action):
        self.view += action
        return self.place, self.board[0], False, False, {}

    def reset(self, **arguments):
        self.board = np.zeros(1)
        self.view = self.board[:]
        return super().reset(**arguments)


class Picky:
    def __reduce__(self):
        return Picky, (1, 2, 3)


gym.register("Views-v0", Views)
INSTEAD = "env.kwargs.reward=playouts"
REFUSED = {
    "budget": (KEY_AND_DOOR, {"search_budget": 3}, f"3 moves.* raise env.kwargs.search_budget=3.*{INSTEAD}"),
    "text": ("Line-v0", {"action_space": gym.spaces.Text(3)}, f"are no list of at most 512: set {INSTEAD}"),
    "chance": ("FrozenLake-v1", {"is_slippery": True}, f"one outcome, then another.*: set {INSTEAD}"),
    "discount": (KEY_AND_DOOR, {"discount": 1.0}, "env.kwargs.discount=1.0 .*: set one below 1"),
    "lock": ("Line-v0", {"holds": threading.Lock}, "pickle '_thread.lock'.* make that where it is used, .*reward=env"),
    "file": ("Line-v0", {"holds": lambda: open(__file__)}, "pickle '_io.TextIOWrapper'.*env.kwargs.reward=env"),  # noqa: SIM115
    "iterator": ("Line-v0", {"holds": lambda: (n for n in "a")}, "pickle 'generator' .*env.kwargs.reward=env"),
    "unread": ("Line-v0", {"holds": Picky}, "what it holds cannot be copied .*: make that where it is used"),
    "views": ("Views-v0", {}, "differs when a position is put back: .*views of arrays, else set env.kwargs.reward=env"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_valued_is_refused_at_the_start_with_setting_reason_and_remedy(name):
    env_id, settings, text = REFUSED[name]
    with pytest.raises(NoCredit, match=f"{env_id}, with env.kwargs.reward=search: .*{text}"):
        make_env(env_id, reward="search", **settings)


def test_a_run_is_refused_before_it_begins():
    config = compose(f"env.id={KEY_AND_DOOR}", "env.kwargs={reward:search,search_budget:3}", name="ppo_trainer")
    with pytest.raises(ConfigError, match="more than 3 moves"):
        build_environment(config)


def chain(states, seed, same=False):
    """A table of three outcomes a move; with `same`, both actions do the same."""
    rng = np.random.default_rng(seed)

    def outcomes():
        chances, places = rng.dirichlet([1] * 3), rng.permutation(states)[:3].tolist()
        return [(p, to, rng.normal(), to == 0) for p, to in zip(chances, places, strict=True)]

    rows = [(outcomes(), outcomes()) for _ in range(states)]
    return {state: {0: first, 1: first if same else second} for state, (first, second) in enumerate(rows)}


def moments(table, horizon, discount):
    """Mean and mean square of the return of each move and random ones after it: [S, A] each."""
    mean = square = np.zeros((len(table), 2))
    for _ in range(horizon):
        after, after_square = mean.mean(1), square.mean(1)
        terms = [[[(p, r, 0 if end else discount, to) for p, to, r, end in table[s][a]] for a in (0, 1)] for s in table]
        p, r, d, to = np.moveaxis(np.array(terms), -1, 0)
        to = to.astype(int)
        mean = (p * (r + d * after[to])).sum(-1)
        square = (p * (r**2 + 2 * r * d * after[to] + d**2 * after_square[to])).sum(-1)
    return mean, square


@pytest.mark.parametrize("seed", range(4))
def test_playouts_estimate_the_mean_of_random_play(seed, monkeypatch):
    monkeypatch.setitem(TABLES, "chain", table := chain(4, seed))
    environment = make_env("Played-v0", name="chain", reward="playouts", playouts=400, horizon=5, discount=0.9)
    mean, square = moments(table, 5, 0.9)
    errors = np.sqrt((square - mean**2) / 400)
    for start in range(4):
        values = environment.credit.values(EnvState(4 * seed + start, (), ""))
        assert np.all(np.abs(np.array([values[0], values[1]]) - mean[start]) < 4 * errors[start])


def test_moves_of_equal_consequences_have_equal_values(monkeypatch):
    monkeypatch.setitem(TABLES, "same", chain(4, 0, same=True))
    environment = make_env("Played-v0", name="same", reward="playouts")
    before = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[2]
    for seed in range(8):
        first, second = environment.credit.values(state := EnvState(seed, (), "")).values()
        assert first == second != 0 == environment.compute_reward(state, 0) and not environment.credit.best(state)
    assert before == (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[2])


def nearness(action):
    return -abs(float(action[0]) - 0.4) - 3 * abs(float(action[1]) + 0.63)  # no two points of the grid have the same


class Aim(gym.Env):
    """Pays how near two numbers come to (0.4, -0.63), and luck that all moves share; counts its steps."""

    action_space = gym.spaces.Box(-1, 1, (2,))
    observation_space = gym.spaces.Discrete(1)
    steps = 0

    def step(self, action):
        type(self).steps += 1
        return 0, self.np_random.normal() + nearness(action), True, False, {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}


gym.register("Aim-v0", Aim)


def test_most_playouts_are_of_moves_that_may_be_best():
    """Two of each of 25, two more of 13, four of seven, and the last eight of four."""
    environment = make_env("Aim-v0", reward="playouts", repeatable=False)
    state, before = environment.start_state(0), Aim.steps
    values = environment.credit.values(state)
    assert Aim.steps - before == 25 * 2 + 13 * 2 + 7 * 4 + 4 * 8
    assert environment.optimal_actions(state) == ((0.5, -0.5),)
    luck = values[0.5, -0.5] - nearness((0.5, -0.5))
    assert values == pytest.approx({move: nearness(move) + luck for move in values}, abs=1e-6)


def test_moves_that_were_left_out_are_behind_the_best_by_what_they_were_then():
    """The best of the two that were played out has a mean of 5; in the two rows of the third it had 4, the third 2."""
    returns = np.array([[3, 4, 1], [5, 3, 3], [6, 4, math.nan], [6, 4, math.nan]])
    assert means(returns).tolist() == [5, 3.75, 3]
    assert means(returns[:2, 2:]).tolist() == [2]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30))
def test_the_better_half_has_all_of_the_best_and_of_the_equal(totals):
    kept = better_half(np.array(totals, float), np.arange(len(totals)))
    assert len(kept) >= min(max(len(totals) / 2, FINALISTS), len(totals))
    left_out = [*{*range(len(totals))} - {*kept.tolist()}]
    assert all(totals[one] < totals[each] for one in left_out for each in kept)
    least = min(totals[each] for each in kept)
    assert sum(total > least for total in totals) < max(len(totals) / 2, FINALISTS)


NOISY = """
import random
import gymnasium as gym
class Noisy(gym.Env):
    action_space = gym.spaces.Text(12, charset="ab")
    observation_space = gym.spaces.Discrete(10)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        random.seed(seed)
        self.place = 0
        return 0, {}
    def step(self, action):
        self.place += action.count("a")
        return self.place % 10, self.np_random.normal() + random.random() * len(action), self.place > 40, False, {}
gym.register("Noisy-v0", Noisy)
"""
ELSEWHERE = """
import json, sys
from custom.env_wrapper import make_env
environment = make_env(sys.argv[1], reward="playouts", max_walk=3)
print(json.dumps([[*environment.credit.values(environment.get_state(i)).items()] for i in range(3)]))
"""


def test_values_are_the_same_whoever_asks_and_in_which_order(write):
    env_id = f"{write('noisy.py', NOISY)}:Noisy-v0"
    first, second = (make_env(env_id, reward="playouts", max_walk=3) for _ in range(2))
    states = [first.get_state(i) for i in range(3)]
    assert min(second.compute_reward(state, "abab") for state in reversed(states)) > NO_MOVE
    values = [first.credit.values(state) for state in states]
    assert [second.credit.values(state) for state in states] == values and 20 < len(values[0]) <= GRID
    assert first.compute_reward(states[1], "abab") == second.compute_reward(states[1], "abab")
    assert len(second.credit.values(states[0])) == len(values[0])  # what is best does not depend on what was asked
    done = subprocess.check_output([sys.executable, "-c", ELSEWHERE, env_id], cwd=ROOT)
    assert [dict(map(tuple, items)) for items in json.loads(done)] == values


@pytest.mark.parametrize("reward", ["search", "playouts"])
def test_rewards_are_relative_in_their_state_and_the_same_in_copies(reward):
    environment = make_env(KEY_AND_DOOR, reward=reward)
    copies = [environment.clone(), pickle.loads(pickle.dumps(environment))]
    for state in [environment.get_state(i) for i in range(5)]:
        rewards = {action: environment.compute_reward(state, action) for action in environment.actions}
        assert environment.compute_reward(state, None) == environment.compute_reward(state, 9) == NO_MOVE
        assert (min(rewards.values()), max(rewards.values())) in ((0, 1), (0, 0))
        best = tuple(action for action in rewards if rewards[action] == 1)
        assert environment.optimal_actions(state) == best and (reward == "playouts" or best)
        for each in copies:
            assert {action: each.compute_reward(state, action) for action in each.actions} == rewards
