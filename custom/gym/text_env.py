"""Text environments: states that can be replayed, optimal actions, rewards and whole episodes.

custom/env_wrapper.py says how each environment looks as text. Left out: images, vectorised environments, and sharing
one object between threads (take a `clone` for each).
"""

import copy
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property, lru_cache
from threading import Thread
from typing import Any

import gymnasium as gym
import numpy as np

from configs.errors import notice_once, warns_of_close
from configs.import_utils import load_module
from configs.schema import SuccessConfig
from custom.gym.planning import best_actions, shortest_paths, transition_table, useful_paths, worst_reward
from custom.gym.texts import last_mention, mark_ansi, text_of
from data.types import check_reward, check_text

TRIAL_WALKS, TRIAL_MOVES = 5, 20  # random walks, each played twice, before an environment is used
MAX_WORLDS = 256  # environments that states are computed in
Layout = tuple[tuple[str, Any], ...]  # constructor arguments that differ from seed to seed, hashable
Moment = tuple[str, float, bool]  # text of an observation, reward, whether the episode is over


@dataclass(frozen=True)
class EnvState:
    """A state as plain data, to travel in a dataset row: playing `actions` after `reset(seed)` restores it exactly."""

    seed: int
    actions: tuple[Any, ...]  # plain, as custom/gym/texts.py has them
    text: str  # the observation, without the instruction
    feedback: str = ""  # in a running episode: the comment on a last answer that was no legal action

    @property
    def reply(self) -> str:
        """The text that the player reads after an answer that led here: the feedback, if any, and the observation."""
        return f"{self.feedback}\n{self.text}" if self.feedback else self.text


def split_id(env_id: str) -> tuple[str, str, dict[str, Any]]:
    """Returns the module that registers an id ("": none is needed), gymnasium's id, and the arguments in it."""
    scheme, _, url = env_id.partition(":")
    if scheme == "openenv":
        return "examples/openenv_env.py", "OpenEnv-v0", {"url": url}
    module, _, name = env_id.rpartition(":")
    return module, name, {}


def success_rule(rule: SuccessConfig | Mapping[str, Any] | None) -> SuccessConfig | None:
    """Returns the rule with at least one condition, or None. Raises ValueError for a condition that does not exist."""
    if isinstance(rule, Mapping):
        names = [setting.name for setting in fields(SuccessConfig)]
        if unknown := sorted(set(rule) - set(names)):
            raise ValueError(f"success has {unknown}: the conditions are {', '.join(names)}")
        rule = SuccessConfig(**rule)
    return None if rule == SuccessConfig() else rule


def is_success(rule: SuccessConfig, terminated: bool, last_reward: float, total: float, flag: bool = False) -> bool:
    """Returns whether an episode that is over fulfils `rule`: `total` is the sum of its rewards, `flag` the last
    info["success"]."""
    return (
        rule.terminated in (None, terminated)
        and rule.info_success in (None, bool(flag))
        and (rule.last_reward_above is None or last_reward > rule.last_reward_above)
        and (rule.return_above is None or total > rule.return_above)
    )


def checked_reset(result: Any) -> Any:
    """Returns the observation of what `reset` returned; raises ValueError if that is not what gymnasium's returns."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise ValueError(f"reset returned {reprlib.repr(result)}: not observation, info")
    return result[0]


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


@dataclass(eq=False)
class TextEnv:
    """A text environment; settings left at None are read off the gymnasium environment.

    A few random walks are played twice when it is made: an environment that does not repeat itself is refused. One that
    is not `repeatable` is not tried out, and plays episodes from its resets alone.

    Raises:
        ValueError: settings contradict each other or the environment, or it ignores its seeds.
        RuntimeError: the environment or `observation_to_text` raises; names the seed and the actions that led there.
    """

    env_id: str
    observation_to_text: Callable[[Any, Any], str] | None = None  # default: ansi rendering, or `observation_text`
    text_to_action: Callable[[str], Any | None] | None = None  # default: `last_mention` of a name, or `read_action`
    _: KW_ONLY
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    instruction: str | None = None
    action_names: Sequence[str] | None = None  # by action: canonical answer, then synonyms after |; default: numbers
    observation_names: Sequence[str] | None = None  # written before each number of a flat observation
    max_turns: int | None = None  # an episode's limit; default: the one registered with the id, or 100
    reward: str | None = None  # of compute_reward: "progress" (default where there is a transition table) or "env"
    invalid_action: str = "retry"  # an answer without a legal action uses up a turn; or "end": it ends the episode
    invalid_reward: float | None = None  # for such an answer; default: the worst of the table or the walks, at most 0
    invalid_feedback: str = "That was no legal action."  # goes before the observation that follows it; "": nothing
    success: SuccessConfig | Mapping[str, Any] | None = None  # which episodes succeed; default: as info["success"] says
    max_walk: int = 20  # most random moves from a reset to a training state
    from_start: bool = False  # training states are those in which episodes start, to be played from there
    repeatable: bool = True  # whether a reset to the same seed and the same actions lead to the same state
    random_map: Callable[[int], dict[str, Any]] | None = None  # reset seed -> constructor arguments, hashable
    exclude_seeds: Collection[int] = ()  # held out: no training state has one of these seeds or a random map of theirs
    seed: int = 0  # of the sequence of training states
    timeout: float | None = 60.0  # seconds that a reset or a step may take when it is tried out

    def __post_init__(self) -> None:
        self._build()
        worst = self._try_out() if self.repeatable else 0.0
        if self.invalid_reward is None:
            self.invalid_reward = worst

    def _build(self) -> None:
        self._layout, self._over = self.layout(0), True
        self._env = self._make(self._layout)
        self._set_observations()
        self._worlds: dict[Layout, gym.Env] = {}  # states are computed in these, apart from the episode's
        self._best = lru_cache(maxsize=256)(lambda layout: best_actions(transition_table(self._world(layout))))
        if "action_space" not in dir(self._env.unwrapped):
            raise ValueError(f"{self.env_id} has no action_space: gymnasium asks for one, gym.spaces.Text for any text")
        self._space, self._acted = self._env.action_space, text_of(self._env.action_space, self.env_id)
        self._set_actions(self._space)
        if self.max_turns is None:
            self.max_turns = gym.spec(self._env.unwrapped.spec.id).max_episode_steps or 100
        self.success = success_rule(self.success)
        tabular = transition_table(self._env) is not None
        self.reward = self.reward or ("progress" if tabular else "env")
        if self.invalid_action not in ("retry", "end"):
            raise ValueError(f"invalid_action={self.invalid_action!r}: an illegal answer is a 'retry', or the 'end'")
        if self.max_turns < 1:
            raise ValueError(f"max_turns={self.max_turns}: an episode needs at least 1 turn")
        if self.reward not in ("progress", "env") or (self.reward == "progress" and not tabular):
            raise ValueError(f"reward={self.reward!r} for {self.env_id}: 'env', or 'progress' where it has a table P")

    def _world(self, layout: Layout) -> gym.Env:
        if layout not in self._worlds:
            if len(self._worlds) == MAX_WORLDS:
                self._close_one(self._worlds.pop(next(iter(self._worlds))))
            self._worlds[layout] = self._make(layout)
        return self._worlds[layout]

    def _try_out(self) -> float:
        """Plays a few random walks twice, in a thread, as episodes are: the worst reward of a legal action, at most 0.

        Raises ValueError if a walk goes differently the second time, or if a move takes more than `timeout` seconds.
        """
        worst: Future[float] = Future()

        def play() -> None:
            try:
                worst.set_result(self._play_walks())
            except Exception as error:  # raised by `result` in the thread that waits
                worst.set_exception(error)

        self._tried, previous = 0, -1
        Thread(target=play, daemon=True).start()
        while not worst.done() and self._tried != previous:
            previous = self._tried
            wait([worst], self.timeout)
        if worst.done():
            return worst.result()
        problem = f"move {previous} took more than env.timeout={self.timeout:g} seconds"
        raise ValueError(f"{self.env_id}, tried out: {problem}: raise it, or leave the trial out by repeatable=False")

    def _play_walks(self) -> float:
        worst, worlds = 0.0, {}
        try:
            for seed in range(TRIAL_WALKS):
                layout = self.layout(seed)
                env = worlds[layout] = worlds[layout] if layout in worlds else self._make(layout)
                walk = self._random_walk(env, seed, TRIAL_MOVES)
                first, second = (list(self._moments(env, seed, walk)) for _ in range(2))
                for played, (moment, repeated) in enumerate(zip(first, second, strict=False)):
                    self._check_equal(moment, repeated, f"after reset(seed={seed}) and actions {list(walk[:played])}")
                worst = min([worst, *(reward for _, reward, _ in first)])
            table = transition_table(self._env)
            return worst if table is None else min(worst, worst_reward(table))
        finally:
            for env in worlds.values():
                self._close_one(env)

    def _check_equal(self, moment: Moment, repeated: Moment, context: str) -> None:
        for part, first, second in zip(("observation", "reward", "end"), moment, repeated, strict=True):
            if first != second:
                raise ValueError(
                    f"{self.env_id} does not repeat itself: {context} the {part} was {reprlib.repr(first)}, then "
                    f"{reprlib.repr(second)}: begin reset with super().reset(seed=seed), draw from self.np_random"
                )

    def _moments(self, env: gym.Env, seed: int, actions: Sequence[Any]) -> Iterator[Moment]:
        """Yields the state after the reset, then after each action until the episode is over."""
        played: list[Any] = []
        with self._blame(seed, played):
            observation = checked_reset(env.reset(seed=seed))
            yield self._observe(env, observation), 0.0, False
            for action in actions:
                self._tried += 1
                played.append(action)
                observation, reward, terminated, truncated, info = self._step(env, action)
                if "success" in info and self.success is None:
                    self.success = SuccessConfig(info_success=True)
                yield self._observe(env, observation), reward, terminated or truncated
                if terminated or truncated:
                    return

    def _set_observations(self) -> None:
        """Chooses how observations become text where no function does it: rendered, or written out."""
        renders = "ansi" in self._env.metadata.get("render_modes", ())
        self._renders, self._observed = self.observation_to_text is None and renders, None
        if self._renders and self._env.render_mode != "ansi":
            self._close_one(self._env)
            self.env_kwargs = {**self.env_kwargs, "render_mode": "ansi"}
            self._env = self._make(self._layout)
        if self.observation_to_text is None and not renders:
            has_space = "observation_space" in dir(self._env.unwrapped)
            self._observed = text_of(self._env.observation_space if has_space else gym.Space(), self.env_id)
            try:
                self._observed.check(self.observation_names)
            except ValueError as error:
                raise ValueError(f"{self.env_id}: {error}") from error

    @property
    def writes_out(self) -> bool:
        """Says whether observations are written out from their space, as nothing makes texts of them."""
        return self._observed is not None and not isinstance(self._observed.space, gym.spaces.Text)

    def _set_actions(self, space: gym.Space) -> None:
        self._answers: dict[int, str] = {}
        self._numbered = isinstance(space, gym.spaces.Discrete)
        if not self._numbered:
            if self.text_to_action is None:
                self.instruction = self._how_to_answer() if self.instruction is None else self.instruction
            return
        numbers = range(int(space.start), int(space.start + space.n))
        self.action_names = tuple(self.action_names or map(str, numbers))
        if len(self.action_names) != len(numbers):
            raise ValueError(f"{len(self.action_names)} action_names, but {self.env_id} has {len(numbers)} actions")
        self._answers = {a: name.split("|")[0] for a, name in zip(numbers, self.action_names, strict=True)}
        if self.instruction is None and self.text_to_action is None:
            self.instruction = f"Answer with one of: {', '.join(self._answers.values())}."
        for answer in self._answers.values() if self.text_to_action else ():
            self.extract_action(answer)  # raises now, not in training, if it returns no number

    def _how_to_answer(self) -> str:
        try:
            return self._acted.how_to_answer()
        except ValueError as error:
            raise ValueError(f"{self.env_id}: {error}: pass text_to_action, which makes one of an answer") from error

    @property
    def module(self) -> str:
        """Names the module that registers the id; "": none need be loaded."""
        return split_id(self.env_id)[0]

    @property
    def actions(self) -> tuple[int, ...]:
        """The numbered actions, where actions are numbered."""
        return tuple(self._answers)

    def layout(self, seed: int) -> Layout:
        """Identifies the map of a seed: equal layouts are the same map. Empty without `random_map`."""
        return tuple(sorted(self.random_map(seed).items())) if self.random_map else ()

    def train_seed(self, i: int) -> int:
        """Returns the reset seed of the i-th training state or episode, fixed by (seed, i); its map is not held out."""
        rng = np.random.default_rng((self.seed, i))
        for _ in range(1000):
            seed = int(rng.integers(2**31))
            if (self.layout(seed) or seed) not in self._held_out:
                return seed
        raise ValueError(f"{self.env_id}: 1000 random maps were all held out: exclude fewer seeds or use larger maps")

    @cached_property
    def _held_out(self) -> frozenset[Layout]:
        """The starts of the episodes that are held out: the map where there are several, else the seed itself."""
        return frozenset(self.layout(seed) or seed for seed in self.exclude_seeds)

    def start_state(self, seed: int) -> EnvState:
        """Returns the state in which `reset(seed)` starts."""
        return self._restore(self._world(self.layout(seed)), seed, ())

    def get_state(self, i: int, reset_seed: int | None = None) -> EnvState:
        """Returns the i-th training state, fixed by (seed, i), after `reset_seed` if given: a start (`from_start`), a
        state where some action is better, by a deterministic table's shortest way, or the end of a random walk."""
        seed = self.train_seed(i) if reset_seed is None else reset_seed
        if self.from_start:
            return self.start_state(seed)
        if not self.repeatable:
            raise ValueError(f"{self.env_id} is not repeatable: it has no states but starts; set env.mode=episode")
        env = self._world(self.layout(seed))
        return self._play(env, seed, self._plan(env, seed, np.random.default_rng((self.seed, i, 1))))

    def _plan(self, env: gym.Env, seed: int, rng: np.random.Generator) -> tuple[int, ...]:
        table, paths = transition_table(env), {}
        if table is not None:
            self._play(env, seed, ())
            paths = shortest_paths(table, env.unwrapped.s)
        if not paths:
            seed_of_moves, length = int(rng.integers(2**31)), int(rng.integers(self.max_walk + 1))
            return self._random_walk(env, seed_of_moves, length)
        useful = useful_paths(paths, self._best(self.layout(seed)))
        if not useful:
            raise ValueError(f"{self.env_id}, seed {seed}: no action is better than another; is the goal within reach?")
        return useful[rng.integers(len(useful))]

    def _random_walk(self, env: gym.Env, seed: int, length: int) -> tuple[Any, ...]:
        """Returns `length` random plain actions of `env`, fixed by `seed`."""
        env.action_space.seed(seed)
        return tuple(self._acted.plain(env.action_space.sample()) for _ in range(length))

    def optimal_actions(self, state: EnvState) -> tuple[int, ...]:
        """Returns all optimal actions by the environment's own transition table; () where it has none."""
        layout = self.layout(state.seed)
        env = self._world(layout)
        if transition_table(env) is None:
            return ()
        self._restore(env, state.seed, state.actions)
        return tuple(np.flatnonzero(self._best(layout)[env.unwrapped.s]).tolist())

    def get_action(self, state: EnvState | int) -> int | None:
        """Returns an optimal action in a state, or in the i-th training state; None: there is no transition table."""
        state = self.get_state(state) if isinstance(state, int) else state
        return next(iter(self.optimal_actions(state)), None)

    def compute_reward(self, state: EnvState, action: int | None) -> float:
        """Returns the reward of an action: under "progress" 1.0 if it is optimal, else 0.0; under "env" what the
        environment pays, and `invalid_reward` for one that is not legal (None, or outside the action space)."""
        action = self._legal(action)
        if self.reward == "progress":
            return float(action in self.optimal_actions(state))
        if action is None:
            return self.invalid_reward
        env = self._world(self.layout(state.seed))
        self._restore(env, state.seed, state.actions)
        with self._blame(state.seed, [*state.actions, action]):
            return self._step(env, action)[1]

    def state_to_text(self, state: EnvState) -> str:
        """Returns the prompt: the instruction, if there is one, and the observation."""
        return f"{self.instruction}\n\n{state.text}" if self.instruction else state.text

    def extract_action(self, text: str) -> int | None:
        """Returns the action an answer asks for; None if it names none that is legal."""
        if self.text_to_action is not None:
            action = self.text_to_action(text)
            return self._legal(action, f"text_to_action returned {action!r} for the answer {text!r}")
        if not self._numbered:
            return self._legal(self._acted.read(text))
        index = last_mention(self.action_names, text)
        return None if index is None else self.actions[index]

    def _legal(self, action: Any, problem: str = "") -> Any | None:
        """Returns the plain form of an action ("0" and 0.0 are 0, where they are numbered); None: it is outside the
        action space. Raises ValueError, beginning with `problem`, if it is no action of any form."""
        if action is None:
            return None
        try:
            plain = float(action) if self._numbered else self._acted.plain(action)
            if self._numbered and not plain.is_integer():
                raise ValueError
        except (TypeError, ValueError, KeyError):
            form = "is a whole number in" if self._numbered else "has the form of"
            rule = f"an action of {self.env_id} {form} {self._space}, or None where the text names none"
            raise ValueError(f"{problem or f'the action {action!r} was given'}: {rule}") from None
        plain = int(plain) if self._numbered else plain
        return plain if self._space.contains(self._acted.native(plain)) else None

    def action_to_text(self, action: Any) -> str:
        """Returns the canonical answer for an action, as a demonstration; `extract_action` is sure to read it back."""
        answer = self._answers.get(action) if self._numbered else self._acted.answer(action)
        if answer is None or self.extract_action(answer) != action:
            raise ValueError(f"{self.env_id} has no answer that reads as {action} (found {answer!r}): set action_names")
        return answer

    def reset(self, seed: int, actions: Sequence[int] = ()) -> str:
        """Starts an episode, from a training state if its `actions` are given too; returns the prompt."""
        layout = self.layout(seed)
        if layout != self._layout:
            self._close_one(self._env)
            self._env, self._layout = self._make(layout), layout
        state = self._restore(self._env, seed, actions)
        self._seed, self._actions, self._text = seed, list(actions), state.text
        self._turns, self._invalid, self._return, self._reported, self._over = 0, 0, 0.0, None, False
        self._feedback = ""
        return self.prompt

    @property
    def prompt(self) -> str:
        """Returns the text that the player of the running episode reads now: the instruction and the observation."""
        return self.state_to_text(self.state)

    @property
    def state(self) -> EnvState:
        """The state of the running episode."""
        return EnvState(self._seed, tuple(self._actions), self._text, self._feedback)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one answer: observation text, reward, terminated, truncated, info, as in gymnasium; see `act`."""
        return self.act(self.extract_action(text))

    def act(self, action: Any | None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one plain action, read from an answer; returns what `step` does: the text is what the player is told.

        None, or an action outside the action space, earns `invalid_reward` and leaves the environment as it is: it uses
        up a turn, or ends the episode, as `invalid_action` says. `info` adds action, turns, invalid (answers so far),
        return (the sum of rewards), success and end_reason (terminated, env_truncated, max_turns, None). Success is
        what the rule says of an episode that is over (before, or after an illegal end: False); None without a rule.
        """
        if self._over:
            raise ValueError("no episode is running: call reset(seed) first")
        action, terminated, truncated, info = self._legal(action), self.invalid_action == "end", False, {}
        legal, reward, self._turns = action is not None, self.invalid_reward, self._turns + 1
        if legal:
            self._actions.append(action)
            with self._blame(self._seed, self._actions):
                observation, reward, terminated, truncated, info = self._step(self._env, action)
                self._text = self._observe(self._env, observation)
        self._invalid += not legal
        self._feedback = "" if legal else self.invalid_feedback
        reasons = {"terminated": terminated, "env_truncated": truncated, "max_turns": self._turns >= self.max_turns}
        reason = next((name for name, holds in reasons.items() if holds), None)
        self._over = reason is not None
        self._return += reward
        self._reported = info.get("success", self._reported)
        success = None
        if self.success is not None:
            stood_still = self.success.terminated is False and not truncated and self._invalid  # turns, but no time
            counts = self._over and (legal or not terminated) and not stood_still
            success = counts and is_success(self.success, terminated, reward, self._return, self._reported)
        elif "success" in info:
            notice_once(f"{self.env_id} has info['success'] now, not at the start: set env.success.info_success=true.")
        report = {**info, "success": success, "action": action, "turns": self._turns, "invalid": self._invalid}
        report |= {"return": self._return, "end_reason": reason}
        return self.state.reply, reward, terminated, self._over and not terminated, report

    def close(self) -> None:
        """Closes its environments; an error of one is a warning. It must not be used again."""
        self._over = True
        for env in (self._env, *self._worlds.values()):
            self._close_one(env)
        self._worlds.clear()

    def _close_one(self, env: gym.Env) -> None:
        with warns_of_close(f"the environment {self.env_id}"):
            env.close()

    def clone(self) -> "TextEnv":
        """Makes a fresh environment with the same settings, to play several episodes side by side."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:  # settings travel between processes, built environments do not
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        vars(self).update(settings)
        self._build()  # it was tried out when it was made

    def _make(self, layout: Layout) -> gym.Env:
        """Makes the environment itself, without gymnasium's own step limit (ours is max_turns) and its checks."""
        module, name, settings = split_id(self.env_id)
        settings = {**self.env_kwargs, **settings, **dict(layout), "max_episode_steps": -1, "disable_env_checker": True}
        if module and name not in gym.registry:
            load_module(module)
        try:
            return gym.make(name, **settings)
        except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv) as error:
            remedy = f"{module} has no gym.register({name!r}, …)" if module else "Name what registers it"
            remedy = f" {remedy}, as in env.id=my_module:MyGame-v0."
            names_successor = isinstance(error, gym.error.DeprecatedEnv)
            raise ValueError(f"{self.env_id!r}: {error}{'' if names_successor else remedy}") from error

    def _step(self, env: gym.Env, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return checked_step(env.step(self._acted.native(action)))

    def _observe(self, env: gym.Env, observation: Any) -> str:
        if self._renders:
            text = env.render()
        elif self._observed is not None:
            text = self._observed.write(observation, self.observation_names)
        else:
            text = self.observation_to_text(env.unwrapped, observation)
        if not isinstance(text, str):
            raise TypeError(f"observation_to_text returned {text!r}, which is no text")
        if not text.isascii():
            check_text(text, "environment")
        return mark_ansi(text)

    def _play(self, env: gym.Env, seed: int, actions: Sequence[int]) -> EnvState:
        """Resets and plays `actions`, up to the one that would end the episode; returns the state reached."""
        played: list[Any] = []
        with self._blame(seed, played):
            observation = checked_reset(env.reset(seed=seed))
            for action in actions:
                played.append(action)
                observation, _, terminated, truncated, _ = env.step(self._acted.native(action))
                if terminated or truncated:
                    break
            else:
                return EnvState(seed, tuple(played), self._observe(env, observation))
        return self._play(env, seed, played[:-1])

    def _restore(self, env: gym.Env, seed: int, actions: Sequence[int]) -> EnvState:
        state = self._play(env, seed, actions)
        if len(state.actions) < len(actions):
            raise ValueError(f"{self.env_id}: after reset(seed={seed}) the actions {list(actions)} end the episode")
        return state

    @contextmanager
    def _blame(self, seed: int, actions: list[int]) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            context = f"after reset(seed={seed}) and actions {actions}"
            is_stop = isinstance(error, StopIteration)  # a context manager would raise it in place of ours
            cause = RuntimeError(error).with_traceback(error.__traceback__) if is_stop else error
            raise RuntimeError(f"{self.env_id} raised {type(error).__name__}: {error}, {context}") from cause
