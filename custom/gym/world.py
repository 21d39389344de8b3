"""One gymnasium environment: how it is made, stepped and shown as text, and what becomes of its failures."""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import find_highest_version, parse_env_id

from configs.errors import warns_of_close
from configs.import_utils import load_module
from custom.gym.planning import Table, best_actions, decisive_paths, transition_table
from custom.gym.texts import PlainText, mark_ansi
from data.types import check_reward, check_text


def split_id(env_id: str) -> tuple[str, str, dict[str, Any]]:
    """Returns the module that registers an id ("": none is needed), gymnasium's id, and the arguments in it."""
    scheme, _, url = env_id.partition(":")
    if scheme == "openenv":
        return "examples/openenv_env.py", "OpenEnv-v0", {"url": url}
    module, _, name = env_id.rpartition(":")
    return module, name, {}


def make_gym(env_id: str, settings: Mapping[str, Any]) -> gym.Env:
    """Makes the environment of an id, without gymnasium's step limit (ours is max_turns) and its checks."""
    module, name, in_id = split_id(env_id)
    if module and name not in gym.registry:
        load_module(module)
    check_id(env_id)
    return gym.make(name, **settings, **in_id, max_episode_steps=-1, disable_env_checker=True)


def check_id(env_id: str) -> None:
    """Raises ValueError for an id that gymnasium does not have, nor in a version where it names none."""
    module, name, _ = split_id(env_id)
    try:
        namespace, bare, version = parse_env_id(name)
        if version is not None or find_highest_version(namespace, bare) is None:
            gym.spec(name)
    except gym.error.DeprecatedEnv as error:  # names its successor
        raise ValueError(f"{env_id!r}: {error}") from error
    except gym.error.UnregisteredEnv as error:
        remedy = f"{module} has no gym.register({name!r}, …)" if module else "Name what registers it"
        raise ValueError(f"{env_id!r}: {error} {remedy}, as in env.id=my_module:MyGame-v0.") from error


def checked_step(result: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Returns what `step` returned; raises ValueError or TypeError if that has another form than gymnasium's."""
    if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], Mapping):
        raise ValueError(f"step returned {reprlib.repr(result)}: not observation, reward, terminated, truncated, info")
    observation, reward, terminated, truncated, info = result
    single = {"reward": reward, "terminated": terminated, "truncated": truncated, "success": info.get("success")}
    for name, value in single.items():
        if (value is None and name != "success") or isinstance(value, str | Mapping) or np.ndim(value):
            raise ValueError(f"{name} is {reprlib.repr(value)}: it must be one number, or True or False")
    check_reward(reward := float(reward))
    return observation, reward, bool(terminated), bool(truncated), info


class World:
    """A gymnasium environment that takes plain actions and shows its observation as text.

    Whatever it or `write(unwrapped environment, observation)` raises becomes a RuntimeError that names the way there.
    Without `write`, its text is what it renders.

    Attributes:
        seed, actions: of the last reset, and since; played again, they restore where it is.
    """

    def __init__(self, env: gym.Env, env_id: str, acts: PlainText, write: Callable[[Any, Any], str] | None) -> None:
        self.env, self.env_id, self.acts, self.write = env, env_id, acts, write
        self.seed, self.actions, self._paths = 0, [], {}

    def play(self, seed: int, actions: Sequence[Any]) -> None:
        """Resets and plays `actions`, up to the one that would end the episode."""
        self.seed, self.actions, self._text = seed, [], None
        with self.blame():
            result = self.env.reset(seed=seed)
            if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
                raise ValueError(f"reset returned {reprlib.repr(result)}: not observation, info")
            self._observation, _ = result
            for action in actions:
                self.actions.append(action)
                self._observation, _, terminated, truncated, _ = self.env.step(self.acts.native(action))
                if terminated or truncated:
                    break
            else:
                return
        self.play(seed, self.actions[:-1])

    def restore(self, seed: int, actions: Sequence[Any]) -> None:
        """Resets and plays `actions`. Raises ValueError if they end the episode."""
        self.play(seed, actions)
        if len(self.actions) < len(actions):
            raise ValueError(f"{self.env_id}: after reset(seed={seed}) the actions {list(actions)} end the episode")

    def step(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Plays a legal action: reward, terminated, truncated, info. Raises ValueError if its actions have changed."""
        now, before = self.env.action_space, self.acts.space
        if now is not before and now != before:
            raise ValueError(
                f"{self.env_id}: action_space is {now} after reset(seed={self.seed}) and actions {self.actions}, and "
                f"was {before} before: keep one of all actions, and let step answer those that are not legal."
            )
        self.actions.append(action)
        with self.blame():
            self._observation, *result = checked_step(self.env.step(self.acts.native(action)))
        self._text = None
        return tuple(result)

    @property
    def text(self) -> str:
        """Writes the observation out, once."""
        if self._text is None:
            with self.blame():
                env = self.env
                text = self.write(env.unwrapped, self._observation) if self.write else env.render()
                check_text(text, "environment's observation_to_text")
            self._text = mark_ansi(text)
        return self._text

    def random_walk(self, seed: int, length: int) -> tuple[Any, ...]:
        """Draws `length` plain actions, fixed by `seed`."""
        self.env.action_space.seed(seed)
        return tuple(self.acts.plain(self.env.action_space.sample()) for _ in range(length))

    @cached_property
    def table(self) -> Table | None:
        """Reads the transition table, if the environment keeps one."""
        return transition_table(self.env)

    @cached_property
    def best(self) -> np.ndarray:
        """[S, A] bool: the optimal actions of each state, by the table."""
        return best_actions(self.table)

    def decisive_paths(self) -> list[tuple[int, ...]] | None:
        """Lists the shortest ways from here, by the table, to states in which some action is better than another."""
        start = self.env.unwrapped.s
        if start not in self._paths:
            self._paths = {start: decisive_paths(self.table, self.best, start)}
        return self._paths[start]

    def close(self) -> None:
        """Closes the environment; an error is a warning."""
        with warns_of_close(f"the environment {self.env_id}"):
            self.env.close()

    @contextmanager
    def blame(self) -> Iterator[None]:
        """Names the seed and the actions in whatever the environment raises, as RuntimeError."""
        try:
            yield
        except (Exception, SystemExit) as error:
            way = f"after reset(seed={self.seed}) and actions {self.actions}"
            is_stop = isinstance(error, StopIteration)  # a context manager would raise it in place of ours
            cause = RuntimeError(error).with_traceback(error.__traceback__) if is_stop else error
            raise RuntimeError(f"{self.env_id} raised {type(error).__name__}: {error}, {way}") from cause
