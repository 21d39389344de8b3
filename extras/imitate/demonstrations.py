"""Demonstrations of an environment: what the policy is shown and a player answers, state by state or by episode."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count, islice
from statistics import fmean
from typing import Any

import numpy as np
from gymnasium import spaces

from configs.errors import ConfigError
from configs.import_utils import load_named
from configs.schema import Config
from configs.settings import with_settings
from data.seeding import derive_seed, numpy_generator
from data.types import Row
from training.environment import build_environment, data_settings, env_dataset

Player = Callable[[Any, Any], Any]  # of an environment and a state: an action
PLAYERS = ("random", "best")
OF_A_RESET = 4  # rows: few of many are more unlike than many of few
MOST_IDLE = 1000  # resets, one after the other, without a row
BLIND = 4  # resets, of which one is played on at random
EXPLORES = 0.2  # of the moves that are played: random ones, so that mistakes are seen, too


def load_player(name: str, environment: Any, rng: np.random.Generator) -> Player:
    """Returns the player `random`, any legal action; `best`, an action of those that the environment's reward calls
    best, else a random one; or a function of the user's, file.py:name."""
    if name not in PLAYERS:
        if not callable(player := load_named(name, "--player")):
            raise ConfigError(f"--player {name} is {player!r}; it must be player(environment, state) -> action.")
        return player
    if name == "best" and environment.reward == "env" and environment.world_of(0).table is None:
        raise ConfigError(
            f"--player best: {environment.env_id} has no table of its moves: set env.kwargs.reward=search or playouts."
        )

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

    What a reset gives depends on its index and `seed` alone, so that several processes make the same rows as one.
    Raises ValueError, in all methods, where the player raises or returns no legal action; names the state.
    """

    def __init__(self, environment: Any, dataset: Any, name: str, seed: int) -> None:
        self.environment, self.dataset, self.name, self.seed = environment, dataset, name, seed
        self.rng, self.episode = numpy_generator(seed), environment.clone()
        self.player = load_player(name, environment, self.rng)
        self.explorer = load_player("random", environment, self.rng)

    def turns(self, resets: Iterator[list[Row]] | None = None) -> Iterator[Row]:
        """Yields rows without end, each a state and the answer; `resets` has those of each reset, if others make them.

        Raises ValueError if the best player knows no better move than any other in any state.
        """
        idle = 0
        for rows in resets or map(self.rows_of, count()):
            yield from rows
            idle = 0 if rows else idle + 1
            if idle == MOST_IDLE:
                raise ValueError(f"--player best: in no state of {idle} resets is a move better than another.")

    def rows_of(self, index: int) -> list[Row]:
        """Returns the rows of a reset, a few: every other a training state, else its start, and where play leads to
        from there. States in which the best player knows no better move than any other are left out.

        One in BLIND of the resets that playouts judge is played on at random: the best player's own moves would tell a
        secret that it knows. A search's rows begin anywhere, so enough of them are behind no move of its own.
        """
        seed, from_start = self.environment.train_seed(index), index % 2 == 0 or not self.environment.repeatable
        start = self.environment.start_state(seed) if from_start else self.environment.get_state(index, seed)
        self.begin(index, start.seed, start.actions)
        is_blind = self.name == "best" and self.environment.reward == "playouts" and index // 2 % BLIND == 0
        turns = enumerate(self.play(1.0 if is_blind else EXPLORES))
        rows = (self.row(*turn, is_blind or not number) for number, turn in turns if self.tells_apart(turn[0]))
        return [*islice(rows, OF_A_RESET)]

    def row(self, state: Any, answer: str, is_blind: bool) -> Row:
        """Returns a row, for `settle` with the values of moves where they are known, and whether moves led to the state
        that are blind to what is hidden."""
        row = {"prompt": self.dataset.messages(state), "response": answer}
        credit = self.environment.credit if self.name == "best" else None
        return row if credit is None else row | {"values": credit.values(state), "is_blind": is_blind}

    def settle(self, rows: list[Row]) -> list[Row]:
        """Returns rows without values, those of one text with the answer that is best by the mean of their values, or
        of those alone that blind moves led to.

        So nothing that the text does not show, as a secret or chance to come, has a part in what is best.
        """
        of_text = defaultdict(list)
        for row in rows:
            if "values" in row:
                of_text[str(row["prompt"])].append(row)
        start = self.environment.start_state(self.environment.train_seed(0))
        for alike in of_text.values():
            entries = [(row.pop("values"), row.pop("is_blind")) for row in alike]
            values = [each for each, is_blind in entries if is_blind] or [each for each, _ in entries]
            compared = [move for move in values[0] if all(move in each for each in values)]
            means = {move: fmean(each[move] for each in values) for move in compared}
            answers = [self.write(move, start) for move in self.environment.credit.best_of(means)] if means else []
            for row in alike:
                if answers and row["response"] not in answers:
                    row["response"] = answers[0]
        return rows

    def begin(self, index: int, seed: int, actions: Any = ()) -> None:
        """Starts the episode of an index, with random numbers of its own."""
        self.rng.bit_generator.state = numpy_generator(self.seed, "demonstrations", index).bit_generator.state
        self.episode.reset(seed, actions)

    def tells_apart(self, state: Any) -> bool:
        return self.name != "best" or bool(self.environment.optimal_actions(state))

    def transcripts(self) -> Iterator[Row]:
        """Yields rows without end, each an episode of the player as a conversation."""
        for index in count():
            self.begin(index, self.environment.train_seed(index))
            messages = []
            for state, answer in self.play(explores=0.0):
                messages += self.dataset.turn_messages(state) if messages else self.dataset.messages(state)
                messages.append({"role": "assistant", "content": answer})
            yield {"messages": messages}

    def play(self, explores: float = EXPLORES) -> Iterator[tuple[Any, str]]:
        """Plays the episode on, and yields its states and the player's answers; some moves are random instead."""
        end_reason = None
        while end_reason is None:
            state = self.episode.state
            answer = self.answer(state)
            yield state, answer
            if self.rng.random() < explores:
                answer = self.write(self.explorer(self.environment, state), state)
            *_, info = self.episode.act(self.environment.extract_action(answer))
            end_reason = info["end_reason"]

    def answer(self, state: Any) -> str:
        """Asks the player, and writes the action as a policy is to answer."""
        try:
            return self.write(self.player(self.environment, state), state)
        except Exception as error:  # whatever the user's player raises
            position = f"after reset(seed={state.seed}) and actions {list(state.actions)}"
            raise ValueError(f"--player {self.name}, {position}: {type(error).__name__}: {error}") from error

    def write(self, action: Any, state: Any) -> str:
        """Returns the canonical answer for an action, with short numbers; raises ValueError if it is not legal."""
        world = self.environment.world_of(state.seed)
        plain, space = world.acts.plain(action), world.env.action_space
        if not space.contains(world.acts.native(plain)):
            raise ValueError(f"{action!r} is no action of {space}")
        return self.environment.action_to_text(world.acts.plain(round_action(plain, space)))


def demonstrations_of(config: Config, player: str, number: int = 1) -> Demonstrations:
    """Builds the environment of `config` and returns a player's demonstrations; each round `number` has others."""
    seed = derive_seed(config.trainer.seed, f"round {number}")
    settings = {"env.mode": "step", "trainer.seed": derive_seed(seed, "demonstrated_states") % 2**31}
    environment = build_environment(with_settings(config, settings))
    dataset = env_dataset(data_settings(config), environment, None, size=1)
    return Demonstrations(environment, dataset, player, seed)


def round_action(action: Any, space: spaces.Space) -> Any:
    """Returns a plain action with the numbers of a Box rounded to two digits of its range."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.values() if isinstance(space, spaces.Dict) else space
        return tuple(round_action(value, part) for value, part in zip(action, parts, strict=True))
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
