"""Tries an environment out before it is used: what does not repeat itself, hangs or breaks its contract is refused."""

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from configs.schema import SuccessConfig
from data.concurrency import run_in_background
from workers.agents.user_code import Overdue, in_thread

WALKS, MOVES = 5, 20  # each walk is played twice
Moment = tuple[str, float, bool]  # text of an observation, reward, whether the episode is over


def try_out(environment: Any) -> tuple[float, SuccessConfig | None]:
    """Plays a few random walks twice, in a thread, as episodes are.

    Returns the worst reward of a legal action, at most 0, and the rule of success: if there is none, what a walk has
    found in `info`. Raises ValueError if a walk goes differently the second time, or a move takes too long.
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

    def play(self) -> tuple[float, SuccessConfig | None]:
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
            return worst, self.success
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

    def check_equal(self, moment: Moment, repeated: Moment, way: str) -> None:
        for part, first, second in zip(("observation", "reward", "end"), moment, repeated, strict=True):
            if first != second:
                raise ValueError(
                    f"{self.environment.env_id} does not repeat itself: {way} the {part} was {reprlib.repr(first)}, "
                    f"then {reprlib.repr(second)}: begin reset with super().reset(seed=seed), draw from self.np_random"
                )
