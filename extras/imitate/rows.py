"""Demonstrations of an environment: what the policy is shown and a player answers, state by state or by episode."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from configs.errors import ConfigError
from configs.import_utils import load_named
from data.seeding import numpy_generator
from data.types import Row

Player = Callable[[Any, Any], Any]  # of an environment and a state: an action
PLAYERS = ("random", "best")
STATES_OF_A_RESET = 5
EXPLORES = 0.2  # of the moves on the way to a state: random ones, so that mistakes are seen, too


def load_player(name: str, environment: Any, seed: int) -> Player:
    """Returns the player `random`, any legal action; `best`, an action of those that the environment's reward calls
    best, else a random one; or a function of the user's, file.py:name."""
    if name not in PLAYERS:
        if not callable(player := load_named(name, "--player")):
            raise ConfigError(
                f"--player {name} is {player!r}; it must be a function player(environment, state) -> action."
            )
        return player
    if name == "best" and environment.reward == "env" and environment.world_of(0).table is None:
        raise ConfigError(
            f"--player best: {environment.env_id} has no table of its moves: set env.kwargs.reward=search or playouts."
        )
    rng = numpy_generator(seed, "player")

    def random(environment: Any, state: Any) -> Any:
        world = environment.world_of(state.seed)
        [action] = world.random_walk(int(rng.integers(2**31)), 1)
        return action

    def best(environment: Any, state: Any) -> Any:
        actions = environment.optimal_actions(state)
        return actions[rng.integers(len(actions))] if actions else random(environment, state)

    return random if name == "random" else best


class Demonstrations:
    """A player's answers in an environment, whose states a dataset of it shows; `name` is the player's.

    Raises ValueError, in all methods, where the player raises or returns no legal action; names the state.
    """

    def __init__(self, environment: Any, dataset: Any, name: str, seed: int) -> None:
        self.environment, self.dataset, self.name = environment, dataset, name
        self.player = load_player(name, environment, seed)
        self.explorer = load_player("random", environment, seed + 1)
        self.rng, self.episode = numpy_generator(seed, "demonstrations"), environment.clone()

    def turns(self) -> Iterator[Row]:
        """Yields rows without end, each a state and the answer.

        Half of the states are training states, the others those that the player's own play leads to. A reset has
        several: what it costs, a search say, is paid once.
        """
        index = 0
        while True:
            seed = self.environment.train_seed(index)
            for number in range(STATES_OF_A_RESET):
                start = self.environment.get_state(index * STATES_OF_A_RESET + number, reset_seed=seed)
                for state in (start, *self.played(seed)):
                    yield {"prompt": self.dataset.messages(state), "response": self.answer(state)}
            index += 1

    def played(self, seed: int) -> Iterator[Any]:
        """Yields a state of an episode that the player plays, with some random moves, as far as drawn."""
        self.episode.reset(seed)
        for _ in range(self.rng.integers(self.environment.max_turns)):
            if self.play(explores=self.rng.random() < EXPLORES)[1]:
                return
        yield self.episode.state

    def transcripts(self) -> Iterator[Row]:
        """Yields rows without end, each an episode of the player as a conversation."""
        index = 0
        while True:
            self.episode.reset(self.environment.train_seed(index))
            messages, over = self.dataset.messages(self.episode.state), False
            while not over:
                answer, over = self.play()
                messages.append({"role": "assistant", "content": answer})
                messages += [] if over else self.dataset.turn_messages(self.episode.state)
            yield {"messages": messages}
            index += 1

    def play(self, explores: bool = False) -> tuple[str, bool]:
        """Plays a move of the player, or a random one; returns the answer, and whether the episode is over."""
        state = self.episode.state
        answer = self.write(self.explorer(self.environment, state), state) if explores else self.answer(state)
        _, _, _, _, info = self.episode.act(self.environment.extract_action(answer))
        return answer, info["end_reason"] is not None

    def answer(self, state: Any) -> str:
        """Asks the player, and writes the action as a policy is to answer."""
        try:
            return self.write(self.player(self.environment, state), state)
        except Exception as error:  # whatever the user's player raises
            place = f"after reset(seed={state.seed}) and actions {list(state.actions)}"
            raise ValueError(f"--player {self.name}, {place}: {type(error).__name__}: {error}") from error

    def write(self, action: Any, state: Any) -> str:
        """Returns the canonical answer for an action, with short numbers; raises ValueError if it is not legal."""
        world = self.environment.world_of(state.seed)
        plain, space = world.acts.plain(action), world.env.action_space
        if not space.contains(world.acts.native(plain)):
            raise ValueError(f"{action!r} is no action of {space}")
        return self.environment.action_to_text(world.acts.plain(rounded(plain, space)))


def rounded(action: Any, space: spaces.Space) -> Any:
    """Returns a plain action with the numbers of a Box rounded to two digits of its range."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.values() if isinstance(space, spaces.Dict) else space
        return tuple(rounded(value, part) for value, part in zip(action, parts, strict=True))
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return action
    bounds = zip(space.low.ravel().tolist(), space.high.ravel().tolist(), strict=True)
    spreads = [high - low if 0 < high - low < math.inf else 2.0 for low, high in bounds]
    short = [
        round(value, 1 - math.floor(math.log10(spread)))
        for value, spread in zip(np.ravel(action).tolist(), spreads, strict=True)
    ]
    within = np.clip(np.reshape(short, space.shape), space.low, space.high) + 0.0  # no minus before 0
    return tuple(within.ravel().tolist())
