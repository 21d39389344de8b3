"""Playouts by a policy's own answers: what a move is worth if the policy plays on after it (policy iteration).

A model answers many prompts at once far faster than one by one. So states are worked on many at a time: a playout that
comes to a prompt which has not been answered ends there, and is played again when all such prompts have been.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from configs.errors import ConfigError
from configs.schema import Config
from data.chat import encode_prompt
from data.pretrained import load_tokenizer
from data.types import Message, Request, SamplingParams
from extras.lookahead.credit import Playouts
from extras.standalone.rollout import StandaloneRollout

FIRST, AT_ONCE = 4, 256  # resets that are worked on at once, twice as many each time: how long they take is not known
Ask = Callable[[list[list[Message]]], list[str]]  # of prompts: their answers


class NotKnown(BaseException):  # which nobody takes for a failure of the environment or of a player
    """A policy was asked for moves that it has not made yet."""


class Policy:
    """A policy's moves by what it is shown: `ask` answers prompts, many at a time.

    Attributes:
        known: the move of each prompt so far; None: no legal one.
        asked: prompts that are to be answered.
    """

    def __init__(self, environment: Any, dataset: Any, ask: Ask) -> None:
        self.environment, self.dataset, self.ask = environment, dataset, ask
        self.known: dict[str, Any] = {}
        self.asked: dict[str, list[Message]] = {}

    def __call__(self, state: Any) -> Any | None:
        """Returns its move in a state, None for no legal one; raises NotKnown if that has not been answered yet."""
        messages = self.dataset.messages(state)
        if (prompt := str(messages)) not in self.known:
            self.asked[prompt] = messages
            raise NotKnown
        return self.known[prompt]

    def settle(self, work: Callable[[int], Any], seconds: float = math.inf) -> Iterator[Any]:
        """Yields the results of `work` for 0, 1, … until so many seconds have passed; it is begun again until it meets
        no prompt without an answer."""
        end, size = time.monotonic() + seconds, FIRST
        first = 0
        while time.monotonic() < end:
            results: dict[int, Any] = {}
            while len(results) < size:
                for index in range(first, first + size):
                    if index not in results:
                        with suppress(NotKnown):
                            results[index] = work(index)
                answers = self.ask([*self.asked.values()]) if self.asked else []
                self.known |= zip(self.asked, map(self.environment.extract_action, answers), strict=True)
                self.asked = {}
            yield from (results[index] for index in range(first, first + size))
            first, size = first + size, min(2 * size, AT_ONCE)


def play_on(config: Config, environment: Any, dataset: Any) -> Policy:
    """Has the model at actor_rollout_ref.model.path play on after the moves that playouts judge in `environment`, in
    half as many of them: its play varies less than a random player's, and takes longer.

    Raises:
        ConfigError: they are not judged by playouts.
    """
    if environment.reward != "playouts":
        raise ConfigError(f"a policy plays playouts on, and env.kwargs.reward={environment.reward}: set playouts.")
    policy = Policy(environment, dataset, answers_of(config))
    environment.playouts = -(-environment.playouts // 2)
    environment.credit = PolicyPlayouts(environment, policy)
    return policy


def answers_of(config: Config) -> Ask:
    """Returns what answers prompts by the model at actor_rollout_ref.model.path, greedily."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    tokenizer = load_tokenizer(model, "actor_rollout_ref.model")
    standalone = StandaloneRollout(model, rollout, tokenizer, config.trainer.n_threads)
    encode = partial(encode_prompt, tokenizer=tokenizer, **config.data.apply_chat_template_kwargs)
    greedy = SamplingParams(False, 1.0, -1, 1.0, rollout.response_length)

    def ask(prompts: list[list[Message]]) -> list[str]:
        requests = [Request(index, encode(messages), greedy, seed=0) for index, messages in enumerate(prompts)]
        with standalone.precision():
            completions = standalone.engine.generate(requests)
        return tokenizer.batch_decode([done.token_ids for done in completions], skip_special_tokens=True)

    return ask


class PolicyPlayouts(Playouts):
    """Estimates what a move is worth by the mean return of a policy's play after it."""

    def __init__(self, environment: Any, policy: Policy) -> None:
        super().__init__(environment)
        self.policy, self.is_known = policy, True
        self.state = environment.start_state(environment.train_seed(0))
        self.begun: dict[tuple, np.ndarray] = {}  # returns of playouts, where some are not known yet

    def estimate(self, seed: int, actions: tuple[Any, ...], moves: tuple[Any, ...]) -> list[float]:
        """Returns the mean returns; raises NotKnown, after all playouts, if the policy does not know its answers."""
        key = seed, actions, moves
        returns = self.begun.setdefault(key, np.full((self.environment.playouts, len(moves)), np.nan))
        self.play_all(*key, returns)
        if np.isnan(returns).any():
            raise NotKnown
        return self.begun.pop(key).mean(0).tolist()

    def go_on_with(self, playing: np.ndarray, returns: np.ndarray) -> np.ndarray:
        """Returns all moves: whose returns are not known yet cannot be given up."""
        return playing

    def play_out(self, world: Any, moves: Iterator[Any]) -> float:
        """Plays moves until the episode is over; returns the discounted sum of rewards, NaN if it is not known yet."""
        self.is_known = True
        total = super().play_out(world, moves)
        return total if self.is_known else np.nan

    def following(self, world: Any, drawn: Iterator[Any]) -> Iterator[Any]:
        """Yields the policy's moves; of no legal one, that which is drawn in its place."""
        for move in drawn:
            try:
                answer = self.policy(
                    replace(self.state, seed=world.seed, actions=tuple(world.actions), text=world.text)
                )
            except NotKnown:
                self.is_known = False
                return
            yield move if answer is None else answer

    def step(self, world: Any, move: Any) -> tuple[float, bool, bool]:
        """Plays a move: reward, terminated, truncated. The policy reads where it leads."""
        return world.step(move)[:3]
