"""Plays random walks: to try an environment out before it is used, and to say what a random player reaches.

An environment that does not repeat itself, hangs or breaks its contract is refused.
"""

import logging
import reprlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from statistics import fmean, pstdev
from typing import Any, Protocol, runtime_checkable

from configs.import_utils import find
from configs.schema import SuccessConfig
from data.concurrency import run_in_background
from data.protocol import DataProto
from data.seeding import derive_seed, rng_state, set_rng_state
from data.types import Metrics, Observer
from training.environment import episode_seeds
from workers.agents.user_code import Overdue, in_thread

WALKS, MOVES = 5, 20  # each walk is played twice
WALKS_FOR_RANGES, MOVES_FOR_RANGES = 10, 50
MOST_EPISODES, FEWEST_EPISODES, MOST_SECONDS = 64, 4, 10.0  # of a random player
Moment = tuple[str, float, bool]  # text of an observation, reward, whether the episode is over

logger = logging.getLogger(__name__)


def try_out(environment: Any) -> tuple[float, SuccessConfig | None, Sequence[Sequence[float]] | None]:
    """Plays a few random walks twice, in a thread, as episodes are.

    Returns the worst reward of a legal action, at most 0; the rule of success: if there is none, what a walk has found
    in `info`; and the ranges of numbers that have bars: if there are none, what longer walks meet. Raises ValueError if
    a walk goes differently the second time, or a move takes too long.
    """
    trial = Trial(environment)
    try:
        return run_in_background(in_thread(trial.play, deadline=environment.timeout, extends=trial.has_moved))
    except Overdue:
        problem = f"move {trial.moves} took more than env.timeout={environment.timeout:g} seconds"
        remedy = "raise it, or leave the trial out by repeatable=False"
        raise ValueError(f"{environment.env_id}, tried out: {problem}: {remedy}") from None


class Trial:
    """The random walks of an environment; `moves` counts those that have begun."""

    def __init__(self, environment: Any) -> None:
        self.environment, self.success = environment, environment.success
        self.moves, self.moves_seen = 0, -1

    def has_moved(self) -> bool:
        """Says whether a move has begun since it was last asked."""
        before, self.moves_seen = self.moves_seen, self.moves
        return self.moves_seen != before

    def play(self) -> tuple[float, SuccessConfig | None, Sequence[Sequence[float]] | None]:
        worst, worlds = 0.0, {}
        try:
            for seed in range(WALKS):
                layout = self.environment.layout(seed)
                world = worlds[layout] = worlds.get(layout) or self.environment.make_world(layout)
                walk = world.random_walk(seed, MOVES)
                first, second = (list(self.moments(world, seed, walk)) for _ in range(2))
                for played, moments in enumerate(zip(first, second, strict=False)):
                    self.check_equal(*moments, f"after reset(seed={seed}) and actions {list(walk[:played])}")
                worst = min([worst, *(reward for _, reward, _ in first)])
            return worst, self.success, self.ranges(world)
        finally:
            for world in worlds.values():
                world.close()

    def moments(self, world: Any, seed: int, actions: Sequence[Any]) -> Iterator[Moment]:
        """Yields the state after the reset, then after each action until the episode is over."""
        world.play(seed, ())
        yield world.text, 0.0, False
        for action in actions:
            self.moves += 1
            reward, terminated, truncated, info = world.step(action)
            if "success" in info and self.success is None:
                self.success = SuccessConfig(info_success=True)
            yield world.text, reward, terminated or truncated
            if terminated or truncated:
                return

    def ranges(self, world: Any) -> Sequence[Sequence[float]] | None:
        """Returns the lowest and the highest value of each number that has a bar, in random play."""
        environment, env = self.environment, world.env
        if environment.observation_style != "bars" or not environment.writes_out:
            return environment.observation_ranges
        written, numbers = find("environment", "spaces")(env.observation_space), []
        if (given := environment.observation_ranges) is not None:
            if len(given) != (size := len(written.fractions(env.reset(seed=0)[0]))):
                raise ValueError(f"{environment.env_id}: {len(given)} observation_ranges for {size} numbers with bars")
            return given
        for seed in range(WALKS_FOR_RANGES):
            env.action_space.seed(seed)
            observation, over, moves = env.reset(seed=seed)[0], False, 0
            while not over and moves < MOVES_FOR_RANGES:
                numbers.append(written.fractions(observation))
                observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
                over, moves, self.moves = terminated or truncated, moves + 1, self.moves + 1
        return [[min(values), max(values)] for values in zip(*numbers, strict=True)]

    def check_equal(self, moment: Moment, repeated: Moment, way: str) -> None:
        for part, first, second in zip(("observation", "reward", "end"), moment, repeated, strict=True):
            if first != second:
                raise ValueError(
                    f"{self.environment.env_id} does not repeat itself: {way} the {part} was {reprlib.repr(first)}, "
                    f"then {reprlib.repr(second)}: begin reset with super().reset(seed=seed), draw from self.np_random "
                    "(or set env.kwargs.repeatable=false and env.mode=episode)"
                )


@runtime_checkable
class DrawsActions(Protocol):
    """An environment whose episodes a random player can play."""

    repeatable: bool
    max_turns: int
    clone: Callable[[], Any]
    world_of: Callable[[int], Any]  # what draws actions


class RandomPlayer(Observer):
    """Puts the return of a random player, who makes legal moves, beside each validation on an environment's episodes.

    It is the mean over the first of the same episodes, at most MOST_EPISODES, played once in a run. From the middle of
    the run on, a policy that is worse by more than the mean's standard error is warned of, once.
    """

    has_warned = False

    def validated(self, step: int, batches: Sequence[DataProto], metrics: Metrics) -> None:
        if self.run.env_setup is None or not self.returns:
            return
        source, expected = self.run.env_setup.environment.env_id, fmean(self.returns)
        metrics[f"val-aux/{source}/random_player/return/mean@1"] = expected
        names = (f"val-{section}/{source}/return/mean@1" for section in ("core", "aux"))
        reached = next((metrics[name] for name in names if name in metrics), expected)
        is_worse = reached < expected - pstdev(self.returns) / len(self.returns) ** 0.5
        if is_worse and 2 * step >= self.run.total_steps and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "the policy is worse than a random player at step %d: its return in validation is %.4g, that of random "
                "legal moves %.4g. Often it has settled on one move (action/NAME/share): raise "
                "actor_rollout_ref.actor.entropy_coeff, or lower its optim.lr. An earlier checkpoint may be better.",
                step, reached, expected,
            )  # fmt: skip

    @cached_property
    def returns(self) -> list[float]:
        """The returns of the episodes that could be played in time; []: too few."""
        environment, seeds = self.run.env_setup.environment, episode_seeds(self.run.config.env)[:MOST_EPISODES]
        if not seeds or not isinstance(environment, DrawsActions) or not environment.repeatable:
            return []
        chance, returns = rng_state(), list[float]()
        with suppress(Overdue, TimeoutError, RuntimeError):  # of the environment: validation says what it raises
            play = in_thread(self.play, environment, seeds, returns, deadline=2 * MOST_SECONDS)
            run_in_background(play)
        set_rng_state(chance)
        return returns if len(returns) >= min(FEWEST_EPISODES, len(seeds)) else []

    def play(self, environment: DrawsActions, seeds: Sequence[int], returns: list[float]) -> None:
        """Adds the returns of whole episodes, one after the other, until MOST_SECONDS have passed."""
        episode, began = environment.clone(), time.monotonic()
        try:
            for seed in seeds:
                drawn = derive_seed(self.run.config.trainer.seed, "random_player", seed) % 2**31
                episode.reset(seed)
                total = 0.0
                for action in episode.world_of(seeds[0]).random_walk(drawn, environment.max_turns):
                    _, reward, _, _, info = episode.act(action)
                    total += reward
                    if time.monotonic() - began > MOST_SECONDS:
                        return
                    if info["end_reason"] is not None:
                        break
                returns.append(total)
        finally:
            episode.close()
