"""Demonstrations of an environment: states as the policy is shown them, and what a player answers."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from configs.import_utils import load_named
from data.seeding import numpy_generator
from data.types import Row

Player = Callable[[Any, Any], Any]  # of an environment and a state: an action
PLAYERS = ("random", "best")
STATES_OF_A_RESET = 5
EXPLORES = 0.2  # of the moves on that way: random ones, so that mistakes are seen, too


def load_player(name: str, seed: int) -> Player:
    """Returns the player `random`, any legal action; `best`, an action of those that the environment's reward calls
    best, else a random one; or a function of the user's, file.py:name."""
    if name not in PLAYERS:
        return load_named(name, "--player")
    rng = numpy_generator(seed, "player")

    def random(environment: Any, state: Any) -> Any:
        world = environment.world_of(state.seed)
        [action] = world.random_walk(int(rng.integers(2**31)), 1)
        return action

    def best(environment: Any, state: Any) -> Any:
        actions = environment.optimal_actions(state)
        return actions[rng.integers(len(actions))] if actions else random(environment, state)

    return random if name == "random" else best


def demonstrations(
    environment: Any, show: Callable[[Any], list[dict[str, str]]], player: Player, count: int, seed: int
) -> Iterator[Row]:
    """Yields `count` rows, each a state as `show` shows it, and the player's answer in its canonical form.

    Half of the states are training states, the others those that the player's own play leads to. A reset has several.
    """
    rng = numpy_generator(seed, "demonstrations")
    made, index = 0, 0
    while made < count:
        seed = environment.train_seed(index)
        for number in range(STATES_OF_A_RESET):  # what a reset costs, a search say, is paid once
            is_start = not environment.repeatable  # it cannot be set to other states
            index_of_state = index * STATES_OF_A_RESET + number
            state = environment.start_state(seed) if is_start else environment.get_state(index_of_state, seed)
            for each in (state, *played(environment, player, state, rng)):
                if made < count:
                    yield {"prompt": show(each), "response": answer(environment, player(environment, each))}
                    made += 1
        index += 1


def played(environment: Any, player: Player, state: Any, rng: np.random.Generator) -> Iterator[Any]:
    """Yields a state of an episode that the player plays from the start, with some random moves, as far as drawn."""
    episode = environment.clone()
    episode.reset(state.seed)
    explore = load_player("random", int(rng.integers(2**31)))
    for _ in range(rng.integers(environment.max_turns)):
        mover = explore if rng.random() < EXPLORES else player
        _, _, _, _, info = episode.act(mover(environment, episode.state))
        if info["end_reason"] is not None:
            return
    yield episode.state


def answer(environment: Any, action: Any) -> str:
    """Writes an action as a demonstration: numbers of a range are rounded to a twentieth of it, to be short."""
    world = environment.world_of(0)
    return environment.action_to_text(world.acts.plain(world.acts.native(rounded(action, world.env.action_space))))


def rounded(action: Any, space: Any) -> Any:
    low, high = vars(space).get("low"), vars(space).get("high")
    if not isinstance(action, tuple | float) or low is None or not np.issubdtype(space.dtype, np.floating):
        return action
    spread = np.where(np.isfinite(high - low), high - low, 2.0).max()
    digits = max(0, 1 - math.floor(math.log10(spread)))
    if isinstance(action, float):
        return round(action, digits)
    return tuple(round(float(value), digits) for value in action)
