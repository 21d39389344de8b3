"""Looks at an environment before it is learnt: python -m extras.imitate.look env.id=my_game.py:Game-v0 [key=value …]

    --player file.py:player    a player of yours is the teacher (random: only legal moves are taught)

Says what answers and observations look like, what random play earns, and whether the best moves of a state can be
known: by its own table, by a search, or by playouts of some length, whichever player earns most.
"""

from configs.errors import ConfigError, refusals  # isort: skip

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from configs.loader import compose
from configs.schema import Config
from configs.settings import with_settings
from data.seeding import numpy_generator
from extras.imitate.demonstrations import PLAYERS, load_player
from training.environment import build_environment, episode_seeds

TRIED = 20  # episodes of a player that is considered
MORE_SECONDS = 10  # in which the player that is chosen shows what it earns
HORIZONS = (3, 10)  # of playouts, before those to the end
MASTERED = 0.95  # of the way from the random player to the teacher
SURE = 2.0  # standard errors by which a player has to be better than the random one, and than who thinks less


@dataclass(frozen=True)
class Look:
    """Results of a look at an environment.

    Attributes:
        random: the mean return of the random player, in the held-out episodes.
        teacher: that of the player who makes the moves that are known to be best, in others.
        settings: key=value, by which an environment knows them; []: they are not known, and the teacher is random.
        repeatable: whether it can be set to any of its states.
        error: the standard error of the teacher's return.
        is_sure: whether these moves are the best that there are, and no estimates.
        seconds: that it takes to know the best move of a state.
        player: who is imitated: best, random or the user's.
        turns: most moves of an episode.
    """

    random: float
    teacher: float
    settings: Sequence[str]
    repeatable: bool
    error: float
    seconds: float
    is_sure: bool = False
    player: str = "best"
    turns: int = 0

    def share(self, value: float) -> float:
        """Returns how far a return is on the way from the random player's to the teacher's."""
        return (value - self.random) / (self.teacher - self.random) if self.teacher > self.random else 0.0

    def is_mastered_by(self, value: float) -> bool:
        """Says whether a return is about the teacher's, who is better than the random player."""
        return self.teacher > self.random and self.share(value) >= min(MASTERED, self.share(self.teacher - self.error))


def look(config: Config, episodes: int, player: str = "best") -> dict[str, Any]:
    """Looks at the environment of `config`, and says what it sees; returns the fields of a `Look`.

    A `player` of the user's is the teacher, whoever judges single moves.
    """
    environment = environment_of(config)
    if "world_of" not in dir(environment):
        raise ConfigError(f"env.path={config.env.path}: {type(environment)} is no TextEnv of custom/env_wrapper.py.")
    world = environment.world_of(0)
    print(f"actions: {world.env.action_space}; {environment.max_turns} turns at most; an observation:")
    print(environment.start_state(0).text)
    seeds = episode_seeds(with_settings(config.env, {"val_episodes": episodes}))
    held_out = Earnings.of(environment, "random", seeds)
    print(f"random player: return {held_out} in {episodes} held-out episodes (validations: in some of their own)")
    tried = range(seeds[-1] + 1, seeds[-1] + 1 + TRIED)
    random = best = Earnings.of(environment, "random", tried)
    settings, is_sure = [], False
    for arguments in ways_to_judge(environment, best.longest) if environment.repeatable else ():
        earnings = judge(config, arguments, tried)
        if earnings is not None and earnings.is_above(random, SURE) and earnings.is_above(best, SURE):
            best, chosen = earnings, arguments
            settings = [f"env.kwargs.{name}={value}" for name, value in arguments.items()]
            is_sure = arguments["reward"] != "playouts"
        if is_sure:
            break  # nothing knows better
    teacher = play_more(config, chosen, best, range(tried.start, tried.start + episodes)) if settings else held_out
    print(f"moves are judged by: {' '.join(settings) or 'nothing: any legal move is as good as another'}")
    if player not in PLAYERS:
        teacher, is_sure = Earnings.of(environment, player, tried), False
        print(f"{player}: return {teacher}")
    elif not settings:
        player = "random"
    facts = held_out.mean, teacher.mean, settings, environment.repeatable, teacher.error, teacher.seconds
    return asdict(Look(*facts, is_sure, player, environment.max_turns))


def ways_to_judge(environment: Any, longest: int) -> Iterator[dict[str, Any]]:
    """Yields arguments of the environment by which moves may be judged, those that know most first; where the user has
    set some, these alone. `longest` is the most moves of an episode."""
    if environment.reward != "env":
        yield {"reward": environment.reward}
        if environment.reward != "progress":
            return
    yield {"reward": "search"}
    horizons = [each for each in HORIZONS if each < longest] if environment.horizon is None else []
    yield from ({"reward": "playouts", "horizon": horizon} for horizon in horizons)
    yield {"reward": "playouts"}


def play_more(config: Config, arguments: dict[str, Any], earnings: "Earnings", seeds: range) -> "Earnings":
    """Returns what the chosen player earns in more episodes, as many of `seeds` as some seconds allow."""
    count = min(len(seeds), int(MORE_SECONDS / (earnings.seconds * earnings.longest)))
    return (count > TRIED and judge(config, arguments, seeds[:count])) or earnings


def judge(config: Config, arguments: dict[str, Any], seeds: Sequence[int]) -> "Earnings | None":
    """Returns what the player earns who makes the best moves by these arguments; None: they do not fit."""
    name = " ".join(f"{key}={value}" for key, value in arguments.items())
    try:
        environment = environment_of(with_settings(config, {"env.kwargs": {**config.env.kwargs, **arguments}}))
        earnings = Earnings.of(environment, "best", seeds)
    except ValueError as error:
        cause = error.__cause__ or error
        print(f"{name}: does not fit: {vars(cause).get('reason', cause)}")  # no remedy: others are tried next
        return None
    print(f"{name}: return {earnings}, {1000 * earnings.seconds:.1f} ms a move")
    return earnings


def environment_of(config: Config) -> Any:
    return build_environment(with_settings(config, {"env.mode": "step"}))


@dataclass(frozen=True)
class Earnings:
    """Returns of whole episodes of a player.

    Attributes:
        returns: of the episodes; discounted: the same, by env.kwargs.discount, so that sooner is better.
        seconds: that a move took.
        longest: most moves of an episode.
    """

    returns: np.ndarray
    discounted: np.ndarray
    seconds: float
    longest: int = 0

    @classmethod
    def of(cls, environment: Any, player: str, seeds: Sequence[int]) -> "Earnings":
        """Plays an episode from each reset."""
        episode, choose, rewards = (
            environment.clone(),
            load_player(player, environment, numpy_generator(0, "player")),
            [],
        )
        started = time.perf_counter()
        for seed in seeds:
            episode.reset(seed)
            rewards.append([])
            end_reason = None
            while end_reason is None:
                _, reward, _, _, info = episode.act(choose(environment, episode.state))
                rewards[-1].append(reward)
                end_reason = info["end_reason"]
        seconds = (time.perf_counter() - started) / sum(map(len, rewards))
        discounted = [np.dot(each, environment.discount ** np.arange(len(each))) for each in rewards]
        return cls(np.array([*map(sum, rewards)]), np.array(discounted), seconds, max(map(len, rewards)))

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return float(self.returns.std() / len(self.returns) ** 0.5)

    def is_above(self, other: "Earnings", errors: float) -> bool:
        """Says whether it earns more in the same episodes, discounted, by so many standard errors."""
        gains = self.discounted - other.discounted
        return bool(gains.mean() > errors * gains.std() / len(gains) ** 0.5)

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.error:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--player", default="best", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="settings of main.py, env.id first of all")
    arguments = parser.parse_intermixed_args()
    with refusals():
        look(compose("ppo_trainer", arguments.overrides, takes_objects=True), 100, arguments.player)


if __name__ == "__main__":
    main()
