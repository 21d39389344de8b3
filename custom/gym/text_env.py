"""Text environments: states that can be replayed, optimal actions, rewards and whole episodes.

custom/env_wrapper.py says how each environment looks as text; custom/gym/world.py plays it. Left out: images,
vectorised environments, and sharing one object between threads (take a `clone` for each).
"""

import copy
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np

from configs.errors import notice_once
from configs.extras import has
from configs.import_utils import find
from configs.schema import SuccessConfig
from custom.gym.planning import worst_reward
from custom.gym.texts import NamedActions, text_of
from custom.gym.world import World, make_gym, split_id

MAX_WORLDS = 256  # that states are computed in
CHARACTERS = string.ascii_letters + string.digits + string.punctuation  # that may be answers
NUMBER_STYLES = ("plain", "fixed", "bars")
CREDITS = ("search", "playouts")  # rewards of single moves by looking ahead (extras/lookahead)
Layout = tuple[tuple[str, Any], ...]  # constructor arguments that differ from seed to seed, hashable


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


def success_rule(rule: SuccessConfig | Mapping[str, Any] | None) -> SuccessConfig | None:
    """Returns the rule with at least one condition, or None. Raises ValueError for a condition that does not exist."""
    names = [setting.name for setting in fields(SuccessConfig)]
    if isinstance(rule, Mapping) and (unknown := sorted({*rule} - {*names})):
        raise ValueError(f"success has {unknown}: the conditions are {', '.join(names)}")
    rule = SuccessConfig(**rule) if isinstance(rule, Mapping) else rule
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


@dataclass(eq=False)
class TextEnv:
    """A text environment; settings left at None are read off the gymnasium environment.

    It is tried out when it is made (extras/gym/walks.py): an environment that does not repeat itself is refused. One
    that is not `repeatable` is not tried out, and plays episodes from its resets alone.

    Raises:
        ValueError: settings contradict each other or the environment, or it ignores its seeds.
        RuntimeError: the environment or `observation_to_text` raises; names the seed and the actions that led there.

    Attributes:
        actions: the numbered actions; (): they are not numbered.
        writes_out: whether observations are written out from their space, as nothing makes texts of them.
    """

    env_id: str
    observation_to_text: Callable[[Any, Any], str] | None = None  # default: ansi rendering, or by its space
    text_to_action: Callable[[str], Any | None] | None = None  # default: `last_mention` of a name, or by its space
    _: KW_ONLY
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    instruction: str | None = None
    action_names: Sequence[str] | None = None  # by action: canonical answer, then synonyms after |; default: numbers
    observation_names: Sequence[str] | None = None  # written before each number of a flat observation
    observation_style: str = "plain"  # of numbers; or "fixed": all as wide as the widest; or "bars": with bars beside
    observation_ranges: Sequence[Sequence[float]] | None = None  # of bars; default: what random play meets
    max_turns: int | None = None  # an episode's limit; default: the one registered with the id, or 100
    reward: str | None = None  # of compute_reward: "progress" (default with a transition table), "env", or of CREDITS
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
    playouts: int = 16  # of a move that may be the best, under reward="playouts"
    horizon: int | None = None  # most moves of a playout; default: to the end of the episode
    discount: float = 0.97  # of what comes a move later, under "playouts" and "search": sooner is better
    search_budget: int = 80_000  # most moves that are tried in the positions of a reset, under reward="search"
    timeout: float | None = 60.0  # seconds that a reset or a step may take when it is tried out

    def __post_init__(self) -> None:
        self._build()
        worst, table = 0.0, self._world.table
        if self.repeatable and has("environment", "trial"):
            worst, self.success, self.observation_ranges = find("environment", "trial")(self)
        if self.invalid_reward is None:
            self.invalid_reward = worst if table is None else min(0.0, worst_reward(table))
        if self.repeatable and self.credit is not None:
            self.credit.check()

    def _build(self) -> None:
        self._worlds: dict[Layout, World] = {}  # states are computed in these, apart from the episode's
        self._layout, self._over = self.layout(0), True
        self._set_actions(env := self._make(self._layout))
        self._write, self.writes_out = self.observation_to_text, False
        if self._write is None and "ansi" not in env.metadata.get("render_modes", ()):
            self._write = self._by_space(env)
        if self._write is None and env.render_mode != "ansi":
            World(env, self.env_id, self._acts, None).close()
            self.env_kwargs = {**self.env_kwargs, "render_mode": "ansi"}
            env = self._make(self._layout)
        self._world = World(env, self.env_id, self._acts, self._write)
        if self.max_turns is None:
            self.max_turns = gym.spec(env.unwrapped.spec.id).max_episode_steps or 100
        self.success = success_rule(self.success)
        tabular = self._world.table is not None
        self.reward = self.reward or ("progress" if tabular else "env")
        if self.invalid_action not in ("retry", "end"):
            raise ValueError(f"invalid_action={self.invalid_action!r}: an illegal answer is a 'retry', or the 'end'")
        if self.observation_style not in NUMBER_STYLES:
            raise ValueError(f"observation_style={self.observation_style!r}: it is one of {', '.join(NUMBER_STYLES)}")
        if self.observation_style == "bars" and not self.repeatable and self.observation_ranges is None:
            raise ValueError("observation_style='bars' of what is not repeatable: set observation_ranges")
        if self.max_turns < 1:
            raise ValueError(f"max_turns={self.max_turns}: an episode needs at least 1 turn")
        if self.reward not in ("progress", "env", *CREDITS) or (self.reward == "progress" and not tabular):
            rule = f"'env', {', '.join(map(repr, CREDITS))}, or 'progress' where it has a table P"
            raise ValueError(f"reward={self.reward!r} for {self.env_id}: {rule}")

    def _by_space(self, env: gym.Env) -> Callable[[Any, Any], str]:
        """Returns what writes observations out by their space."""
        space = env.observation_space if "observation_space" in dir(env.unwrapped) else gym.Space()
        observed = text_of(space, self.env_id, fixed_width=self.observation_style != "plain")
        self.writes_out = not isinstance(space, gym.spaces.Text)
        observed.check(self.observation_names)
        return lambda _, observation: observed.write(observation, self.observation_names, self.observation_ranges or ())

    def _set_actions(self, env: gym.Env) -> None:
        if "action_space" not in dir(env.unwrapped):
            raise ValueError(f"{self.env_id} has no action_space: gymnasium asks for one, gym.spaces.Text for any text")
        self._acts, self.actions = text_of(env.action_space, self.env_id), ()
        if isinstance(env.action_space, gym.spaces.Discrete):
            self._acts = NamedActions(env.action_space, self.action_names)
            self.actions, self.action_names = self._acts.actions, self._acts.names
        if self.text_to_action is None and self.instruction is None:
            self.instruction = self._acts.how_to_answer()
        for action in self.actions if self.text_to_action else ():
            self.extract_action(self._acts.answer(action))  # raises now, not in training, if it returns no number

    @property
    def module(self) -> str:
        """Names the module that registers the id; "": none need be loaded."""
        return split_id(self.env_id)[0]

    def _make(self, layout: Layout) -> gym.Env:
        return make_gym(self.env_id, {**self.env_kwargs, **dict(layout)})

    def make_world(self, layout: Layout) -> World:
        """Makes an environment to play in."""
        return World(self._make(layout), self.env_id, self._acts, self._write)

    @cached_property
    def credit(self) -> Any | None:
        """Judges moves where a reward asks for it (extras/lookahead); None: the environment itself pays."""
        return find("environment", self.reward, "env.kwargs.reward")(self) if self.reward in CREDITS else None

    def world_of(self, seed: int) -> World:
        """Returns the environment in which states of a reset seed are computed."""
        layout = self.layout(seed)
        if layout not in self._worlds:
            if len(self._worlds) == MAX_WORLDS:
                self._worlds.pop(next(iter(self._worlds))).close()
            self._worlds[layout] = self.make_world(layout)
        return self._worlds[layout]

    def layout(self, seed: int) -> Layout:
        """Identifies the map of a seed: equal layouts are the same map; () without `random_map`."""
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
        world = self.world_of(seed)
        world.play(seed, ())
        return EnvState(seed, (), world.text)

    def get_state(self, i: int, reset_seed: int | None = None) -> EnvState:
        """Returns the i-th training state, fixed by (seed, i), after `reset_seed` if given: a start (`from_start`), a
        state where some action is better, by a deterministic table's shortest way, or the end of a random walk."""
        seed = self.train_seed(i) if reset_seed is None else reset_seed
        if self.from_start:
            return self.start_state(seed)
        if not self.repeatable:
            raise ValueError(f"{self.env_id} is not repeatable: it has no states but starts; set env.mode=episode")
        world = self.world_of(seed)
        world.play(seed, self._way(world, seed, np.random.default_rng((self.seed, i, 1))))
        return EnvState(seed, tuple(world.actions), world.text)

    def _way(self, world: World, seed: int, rng: np.random.Generator) -> tuple[Any, ...]:
        """Draws the actions that lead to a training state."""
        ways = None
        if self.credit is not None:
            ways = self.credit.ways(seed) or None  # of a reset without better moves any state will do
        elif world.table is not None:
            world.play(seed, ())
            ways = world.decisive_paths()
        if ways is None:
            walk = world.random_walk(int(rng.integers(2**31)), int(rng.integers(self.max_walk + 1)))
            world.play(seed, walk)
            way = tuple(world.actions)  # cut anywhere if it ran past the end: short games have other states than last
            return way if len(way) == len(walk) else way[: rng.integers(len(way) + 1)]
        if not ways:
            raise ValueError(f"{self.env_id}, seed {seed}: no action is better than another; is the goal within reach?")
        return ways[rng.integers(len(ways))]

    def optimal_actions(self, state: EnvState) -> tuple[int, ...]:
        """Returns all optimal actions, by the environment's own transition table or by `credit`; () without either."""
        if self.credit is not None:
            return self.credit.best(state)
        world = self.world_of(state.seed)
        if world.table is None:
            return ()
        world.restore(state.seed, state.actions)
        return tuple(np.flatnonzero(world.best[world.env.unwrapped.s]).tolist())

    def get_action(self, state: EnvState | int) -> int | None:
        """Returns an optimal action in a state, or in the i-th training state; None: there is no transition table."""
        state = self.get_state(state) if isinstance(state, int) else state
        return next(iter(self.optimal_actions(state)), None)

    def compute_reward(self, state: EnvState, action: int | None) -> float:
        """Returns the reward of an action: under "progress" 1.0 if it is optimal, else 0.0; under "env" what the
        environment pays, and `invalid_reward` for one that is not legal (None, or outside the action space); under one
        of CREDITS how good it is among those of its state."""
        action = self._legal(action)
        if self.credit is not None:
            return self.credit.reward(state, action)
        if self.reward == "progress":
            return float(action in self.optimal_actions(state))
        if action is None:
            return self.invalid_reward
        world = self.world_of(state.seed)
        world.restore(state.seed, state.actions)
        return world.step(action)[0]

    def state_to_text(self, state: EnvState) -> str:
        """Returns the prompt: the instruction, if there is one, and the observation."""
        return f"{self.instruction}\n\n{state.text}" if self.instruction else state.text

    def extract_action(self, text: str) -> Any | None:
        """Returns the action an answer asks for; None if it names none that is legal."""
        if self.text_to_action is None:
            return self._legal(self._acts.read(text))
        action = self.text_to_action(text)
        return self._legal(action, f"text_to_action returned {action!r} for the answer {text!r}")

    def _legal(self, action: Any, problem: str = "") -> Any | None:
        """Returns the plain form of an action; None: it is outside the action space. Raises ValueError, beginning with
        `problem`, if it is no action of any form."""
        if action is None:
            return None
        try:
            plain = self._acts.plain(action)
        except (TypeError, ValueError, KeyError):
            rule = f"{self.env_id} takes actions of {self._acts.space}, or None where the text names none"
            raise ValueError(f"{problem or f'the action {action!r} was given'}: {rule}") from None
        return plain if self._acts.space.contains(self._acts.native(plain)) else None

    def action_to_text(self, action: Any) -> str:
        """Returns the canonical answer for an action, as a demonstration; where the user's text_to_action does not read
        it, the first character that it reads as the action. Raises ValueError if there is none."""
        answer = self._acts.answer(action)
        texts = (answer, *(CHARACTERS if self.text_to_action else ()))
        for text in texts:
            if text is not None and self.extract_action(text) == action:
                return text
        raise ValueError(f"{self.env_id} has no answer that reads as {action} (found {answer!r}): set action_names")

    def reset(self, seed: int, actions: Sequence[Any] = ()) -> str:
        """Starts an episode, from a training state if its `actions` are given too; returns the prompt."""
        if (layout := self.layout(seed)) != self._layout:
            self._world.close()
            self._world, self._layout = self.make_world(layout), layout
        self._world.restore(seed, actions)
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
        return EnvState(self._world.seed, tuple(self._world.actions), self._world.text, self._feedback)

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
        action = self._legal(action)
        if action is not None:
            reward, terminated, truncated, info = self._world.step(action)
        else:
            reward, terminated, truncated, info = self.invalid_reward, self.invalid_action == "end", False, {}
        self._feedback = self.invalid_feedback if action is None else ""
        self._turns, self._return = self._turns + 1, self._return + reward
        self._invalid += action is None
        self._reported = info.get("success", self._reported)
        reasons = {"terminated": terminated, "env_truncated": truncated, "max_turns": self._turns >= self.max_turns}
        reason = next((name for name, holds in reasons.items() if holds), None)
        self._over, success = reason is not None, None
        if self.success is not None:
            stood_still = self.success.terminated is False and not truncated and self._invalid  # turns, but no time
            counts = self._over and (action is not None or not terminated) and not stood_still
            success = counts and is_success(self.success, terminated, reward, self._return, self._reported)
        elif "success" in info:
            notice_once(f"{self.env_id} has info['success'] now, not at the start: set env.success.info_success=true.")
        report = {**info, "success": success, "action": action, "turns": self._turns, "invalid": self._invalid}
        report |= {"return": self._return, "end_reason": reason}
        return self.state.reply, reward, terminated, self._over and not terminated, report

    def close(self) -> None:
        """Closes its environments; an error of one is a warning. It must not be used again."""
        self._over = True
        for world in (self._world, *self._worlds.values()):
            world.close()

    def clone(self) -> "TextEnv":
        """Makes a fresh environment with the same settings, to play several episodes side by side."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:  # settings travel between processes, built environments do not
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        vars(self).update(settings)
        self._build()  # it was tried out when it was made
