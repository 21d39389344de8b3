"""Demonstrations of an environment: states as the policy is shown them, and what a player answers."""

import math
import string
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from configs.import_utils import load_named
from data.seeding import numpy_generator
from data.types import Row

Player = Callable[[Any, Any], Any]  # of an environment and a state: an action
PLAYERS = ("random", "best")
OF_A_RESET = 4  # rows: few of many are more unlike than many of few
CHARACTERS = string.ascii_letters + string.digits + string.punctuation
EXPLORES = 0.2  # of the moves that are played: random ones, so that mistakes are seen, too


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

    Each reset gives a few: every other a training state, else a start, and the states that play leads to from there.
    """
    rng = numpy_generator(seed, "demonstrations")
    made, index = 0, 0
    while made < count:
        reset_seed = environment.train_seed(index)
        from_training_state = environment.repeatable and index % 2
        start = environment.get_state(index, reset_seed) if from_training_state else environment.start_state(reset_seed)
        for state, action in islice(played(environment, player, start, rng), min(OF_A_RESET, count - made)):
            yield {"prompt": show(state), "response": answer(environment, action)}
            made += 1
        index += 1


def played(environment: Any, player: Player, start: Any, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
    """Yields the states of an episode with the player's moves, of which some are not played but random ones."""
    episode, end_reason = environment.clone(), None
    episode.reset(start.seed, start.actions)
    explore = load_player("random", int(rng.integers(2**31)))
    while end_reason is None:
        state = episode.state
        action = player(environment, state)
        yield state, action
        is_random = rng.random() < EXPLORES
        end_reason = episode.act(explore(environment, state) if is_random else action)[-1]["end_reason"]


def answer(environment: Any, action: Any) -> str:
    """Writes an action as a demonstration: numbers of a range are rounded to a twentieth of it, to be short; for one
    that has no name, the first character that a reader of the user's takes for it."""
    world = environment.world_of(0)
    plain = world.acts.plain(world.acts.native(rounded(action, world.env.action_space)))
    texts = (world.acts.answer(plain), *CHARACTERS) if environment.text_to_action else ()
    return next((text for text in texts if environment.extract_action(text) == plain), None) or (
        environment.action_to_text(plain)
    )


def rounded(action: Any, space: Any) -> Any:
    low, high = vars(space).get("low"), vars(space).get("high")
    if not isinstance(action, tuple | float) or low is None or not np.issubdtype(space.dtype, np.floating):
        return action
    spread = np.where(np.isfinite(high - low), high - low, 2.0).max()
    digits = max(0, 1 - math.floor(math.log10(spread)))
    if isinstance(action, float):
        return round(action, digits)
    return tuple(round(float(value), digits) for value in action)
