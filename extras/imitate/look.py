"""Looks at an environment before it is learnt: python -m extras.imitate.look env.id=my_game.py:Game-v0 [key=value …]

Says what answers and observations look like, what random play earns, and whether the best moves of a state can be
known: by its own table, by a search, or by playouts of some length, whichever player earns most.
"""

from configs.errors import ConfigError, refusals  # isort: skip

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from configs.loader import compose
from configs.schema import Config
from configs.settings import with_settings
from extras.imitate.demonstrations import load_player
from training.environment import build_environment, episode_seeds

TRIED = 20  # episodes of a player that is considered
HORIZONS = (3, 10)  # of playouts, before those to the end
MASTERED = 0.95  # of the way from the random player to the teacher
SURE = 2.0  # standard errors by which a player has to be better than the random one


@dataclass(frozen=True)
class Look:
    """Results of a look at an environment.

    Attributes:
        random: the mean return of the random player, in the held-out episodes.
        teacher: that of the player who makes the moves that are known to be best, in others.
        settings: key=value, by which an environment knows them; []: they are not known, and the teacher is random.
        repeatable: whether it can be set to any of its states.
        error: the standard error of the teacher's return.
        seconds: that it takes to know the best move of a state.
    """

    random: float
    teacher: float
    settings: Sequence[str]
    repeatable: bool
    error: float
    seconds: float

    def share(self, value: float) -> float:
        """Returns how far a return is on the way from the random player's to the teacher's."""
        return (value - self.random) / (self.teacher - self.random) if self.teacher > self.random else 0.0

    def is_mastered_by(self, value: float) -> bool:
        """Says whether a return is about the teacher's, who is better than the random player."""
        return self.teacher > self.random and self.share(value) >= min(MASTERED, self.share(self.teacher - self.error))


def look(config: Config, episodes: int) -> dict[str, Any]:
    """Looks at the environment of `config`, and says what it sees; returns the fields of a `Look`."""
    environment = environment_of(config)
    if "world_of" not in dir(environment):
        raise ConfigError(f"env.path={config.env.path}: {type(environment)} is no TextEnv of custom/env_wrapper.py.")
    world = environment.world_of(0)
    print(f"actions: {world.env.action_space}; {environment.max_turns} turns at most; an observation:")
    print(environment.start_state(0).text)
    seeds = episode_seeds(with_settings(config.env, {"val_episodes": episodes}))
    random = Earnings.of(environment, "random", seeds)
    print(f"random player: return {random} in {episodes} held-out episodes")
    best, settings = random, []
    for arguments in ways_to_judge(environment) if environment.repeatable else ():
        earnings = judge(config, arguments, seeds[-1] + 1)
        if earnings is not None and earnings.is_above(random, SURE) and earnings.is_above(best, 1.0):
            best, settings = earnings, [f"env.kwargs.{name}={value}" for name, value in arguments.items()]
        if settings and arguments["reward"] != "playouts":
            break  # nothing knows better
    print(f"moves are judged by: {' '.join(settings) or 'nothing: any legal move is as good as another'}")
    return asdict(Look(random.mean, best.mean, settings, environment.repeatable, best.error, best.seconds))


def ways_to_judge(environment: Any) -> Iterator[dict[str, Any]]:
    """Yields arguments of the environment by which moves may be judged, those that know most first."""
    if environment.reward == "progress":
        yield {"reward": "progress"}
    yield {"reward": "search"}
    yield from ({"reward": "playouts", "horizon": horizon} for horizon in HORIZONS if horizon < environment.max_turns)
    yield {"reward": "playouts"}


def judge(config: Config, arguments: dict[str, Any], seed: int) -> "Earnings | None":
    """Returns what the player earns who makes the best moves by these arguments; None: they do not fit."""
    name = " ".join(f"{key}={value}" for key, value in arguments.items())
    try:
        environment = environment_of(with_settings(config, {"env.kwargs": {**config.env.kwargs, **arguments}}))
        earnings = Earnings.of(environment, "best", range(seed, seed + TRIED))
    except ValueError as error:
        print(f"{name}: {error.__cause__ or error}")
        return None
    print(f"{name}: return {earnings}, {1000 * earnings.seconds:.1f} ms a move")
    return earnings


def environment_of(config: Config) -> Any:
    return build_environment(with_settings(config, {"env.mode": "step"}))


@dataclass(frozen=True)
class Earnings:
    """Returns of whole episodes of a player.

    Attributes:
        mean, error: of the returns, and the standard error of that.
        seconds: that a move took.
    """

    mean: float
    error: float
    seconds: float

    @classmethod
    def of(cls, environment: Any, player: str, seeds: Sequence[int]) -> "Earnings":
        """Plays an episode from each reset."""
        episode, choose, returns, moves = environment.clone(), load_player(player, environment, 0), [], 0
        started = time.perf_counter()
        for seed in seeds:
            episode.reset(seed)
            info = {"end_reason": None}
            while info["end_reason"] is None:
                *_, info = episode.act(choose(environment, episode.state))
            returns.append(info["return"])
            moves += info["turns"]
        seconds = (time.perf_counter() - started) / moves
        return cls(float(np.mean(returns)), float(np.std(returns) / len(returns) ** 0.5), seconds)

    def is_above(self, other: "Earnings", errors: float) -> bool:
        """Says whether the mean is larger by so many standard errors of the difference."""
        return self.mean - other.mean > errors * np.hypot(self.error, other.error)

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.error:.2g}"


def main() -> None:
    if not sys.argv[1:] or "--help" in sys.argv:
        raise SystemExit(__doc__)
    with refusals():
        look(compose("ppo_trainer", sys.argv[1:], takes_objects=True), 100)


if __name__ == "__main__":
    main()
