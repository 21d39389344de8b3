"""Looks at an environment before it is learnt: python -m extras.imitate.look env.id=my_game.py:Game-v0 [key=value …]

Says what answers and observations look like, what random play earns, and whether the best moves of a state can be
known: by its own table, by a search, or by playouts of some length, whichever player earns most.
"""

from configs.errors import ConfigError, refusals  # isort: skip

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from configs.loader import compose
from configs.schema import Config
from configs.settings import with_settings
from extras.imitate.rows import Player, load_player
from training.environment import build_environment, episode_seeds

TRIED = 20  # episodes of a player that is considered
HORIZONS = (3, 10, None)  # of playouts; None: to the end
SURE = 2.0  # standard errors by which a player has to be better than the random one


@dataclass(frozen=True)
class Look:
    """What a look has shown.

    Attributes:
        random: the mean return of the random player, in the held-out episodes.
        teacher: that of the player who makes the moves that are known to be best, in others.
        labels: how those are known: "progress", "search", "playouts", or "random" if they are not.
        settings: key=value, by which an environment knows them.
        repeatable: whether it can be set to any of its states.
    """

    random: float
    teacher: float
    labels: str
    settings: Sequence[str]
    repeatable: bool = True

    def share(self, value: float) -> float:
        """Returns how far a return is on the way from the random player's to the teacher's."""
        return (value - self.random) / (self.teacher - self.random) if self.teacher > self.random else 0.0


def look(config: Config, episodes: int) -> dict[str, Any]:
    """Looks at the environment of `config`, and says what it sees; returns the fields of a `Look`."""
    environment = environment_of(config)
    if "world_of" not in dir(environment):
        raise ConfigError(f"env.path={config.env.path}: {type(environment)} is no TextEnv of custom/env_wrapper.py.")
    world = environment.world_of(0)
    print(f"actions: {world.env.action_space}; {environment.max_turns} turns at most; an observation:")
    print(environment.start_state(0).text)
    seeds = episode_seeds(with_settings(config.env, {"val_episodes": episodes}))
    random = returns(environment, load_player("random", 0), seeds)
    print(f"random player: return {random.mean():.3g} ± {error_of(random):.2g} in {episodes} held-out episodes")
    best = Look(float(random.mean()), float(random.mean()), "random", (), environment.repeatable)
    for arguments in ways_to_judge(environment) if environment.repeatable else ():
        judged = teacher_returns(config, arguments, seeds[-1] + 1)
        if judged is None:
            continue
        value, labels = float(judged.mean()), arguments["reward"]
        if value - best.random > SURE * np.hypot(error_of(random), error_of(judged)) and value > best.teacher:
            given = [f"env.kwargs.{name}={each}" for name, each in arguments.items() if each is not None]
            best = Look(best.random, value, labels, given)
        if labels != "playouts" and best.labels == labels:
            break  # nothing knows better
    print(f"moves are judged by: {best.labels} {' '.join(best.settings)}".rstrip())
    return asdict(best)


def ways_to_judge(environment: Any) -> Iterator[dict[str, Any]]:
    """Yields arguments of the environment by which moves may be judged, those that know most first."""
    if environment.reward == "progress":
        yield {"reward": "progress"}
    yield {"reward": "search"}
    for horizon in HORIZONS:
        if horizon is None or horizon < environment.max_turns:
            yield {"reward": "playouts", "horizon": horizon}


def teacher_returns(config: Config, arguments: dict[str, Any], seed: int) -> np.ndarray | None:
    """Returns what the player earns who makes the best moves by these arguments; None: they do not fit."""
    name = " ".join(f"{key}={value}" for key, value in arguments.items())
    try:
        environment = environment_of(with_settings(config, {"env.kwargs": {**config.env.kwargs, **arguments}}))
        earned = returns(environment, load_player("best", 0), range(seed, seed + TRIED))
    except ValueError as error:
        print(f"{name}: {error}")
        return None
    print(f"{name}: return {earned.mean():.3g} ± {error_of(earned):.2g}")
    return earned


def environment_of(config: Config) -> Any:
    return build_environment(with_settings(config, {"env.mode": "step"}))


def returns(environment: Any, player: Player, seeds: Sequence[int]) -> np.ndarray:
    """Plays whole episodes; returns their returns."""
    episode, totals = environment.clone(), []
    for seed in seeds:
        episode.reset(seed)
        info = {"end_reason": None}
        while info["end_reason"] is None:
            _, _, _, _, info = episode.act(player(environment, episode.state))
        totals.append(info["return"])
    return np.array(totals)


def error_of(values: np.ndarray) -> float:
    return float(values.std() / len(values) ** 0.5)


def main() -> None:
    if not sys.argv[1:] or "--help" in sys.argv:
        raise SystemExit(__doc__)
    with refusals():
        look(compose("ppo_trainer", sys.argv[1:], takes_objects=True), 100)


if __name__ == "__main__":
    main()
