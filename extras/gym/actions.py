"""Logs how often each action of a discrete environment is played, and what it earns: entropy shows neither.

Before that, it compares what the moves of single states are paid: where all are paid alike, nothing can be learnt.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from configs.extras import has
from data.protocol import DataProto
from data.seeding import rng_state, set_rng_state
from data.types import Metrics, Stage
from training.environment import ActionReader

MOST_ACTIONS = 20  # that an environment may have to log each
MOST_STATES, MOST_MOVES, MOST_SECONDS = 30, 8, 3.0  # that are compared; more moves are drawn from
FEW = 0.1  # of the states: where moves differ in no more, they teach nothing


@runtime_checkable
class NamesActions(Protocol):
    """An environment whose `actions` are numbered; without such, action_names is None."""

    actions: Sequence[int]
    action_names: Sequence[str] | None


@runtime_checkable
class OfEnvironment(ActionReader, Protocol):
    """A reward of single states that reads the actions of its environment."""

    environment: Any


class ActionShares(Stage):
    """Computes `action/NAME/share` of all answers, and `action/NAME/reward/mean` of those that name the action.

    Only of an environment with a few numbered actions, and without tools beside it, whose calls are answers as well.
    """

    at = "prepared"

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        game, reader = self.trainer.env_setup, self.trainer.reward
        environment = reader.environment if game is None and isinstance(reader, OfEnvironment) else None
        if game is not None:
            reader, environment = game.reader, game.environment
        names = environment.action_names or () if isinstance(environment, NamesActions) else ()
        if not 0 < len(names) <= MOST_ACTIONS or self.config.actor_rollout_ref.rollout.multi_turn.files():
            return {}
        earned = defaultdict(list)
        for text, reward in answers(batch, self.trainer.tokenizer):
            earned[str(reader.extract_action(text))].append(reward)
        count, metrics = sum(map(len, earned.values())), {}
        for number, name in zip(environment.actions, names, strict=True):
            rewards, head = earned[str(number)], f"action/{name.split('|')[0]}"
            metrics |= {f"{head}/share": len(rewards) / count} if count else {}
            metrics |= {f"{head}/reward/mean": fmean(rewards)} if rewards else {}
        return metrics


def answers(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, float]]:
    """Yields the text of each answer of the policy in a batch, one a turn, and what it earned."""
    columns = (batch.batch[name].tolist() for name in ("response_mask", "responses", "token_level_scores"))
    for row in zip(*columns, strict=True):
        for policy, run in groupby(zip(*row, strict=True), key=itemgetter(0)):
            if policy:
                _, token_ids, rewards = zip(*run, strict=True)
                yield tokenizer.decode(token_ids, skip_special_tokens=True), sum(rewards)


@runtime_checkable
class ComparesMoves(Protocol):
    """An environment whose states can be asked what each move is paid."""

    actions: Sequence[int]
    reward: str
    get_state: Callable[[int], Any]
    compute_reward: Callable[[Any, Any], float]
    world_of: Callable[[int], Any]  # what draws actions


@dataclass(frozen=True)
class Moves:
    """Counts states, and those of them in which all legal moves are paid alike; `pays` has what is paid in these,
    `illegal` is what an answer that is no legal move is paid."""

    states: int
    alike: int
    pays: frozenset[float]
    illegal: float = 0.0

    @property
    def teach_nothing(self) -> bool:
        return self.alike >= (1 - FEW) * self.states > 0

    def advice(self, kind: str) -> str:
        """Says that moves teach nothing in states of this kind, and what to set."""
        pays = f" ({next(iter(self.pays)):g}; an illegal answer {self.illegal:g})" if len(self.pays) == 1 else ""
        credit = "env.kwargs.reward=search (or playouts)"
        remedy = f"Set {credit}" if has("environment", "search") else "Have the reward tell moves apart"
        return (
            f"in {self.alike} of {self.states} {kind} all legal actions pay alike{pays}: single moves teach nothing. "
            f"{remedy}, or play whole episodes (--config-name multiturn): docs/environments.md, The training prompts."
        )


def compare_moves(reward: Any, states: Iterable[Any] | None = None) -> Moves | None:
    """Compares what the moves of states are paid by their environment; by default, of training states.

    It stops where too many differ, or after MOST_SECONDS. None: nobody can say, as the reward or the environment is of
    a class of the user's, or values moves by more than what the environment pays.
    """
    environment = reward.environment if isinstance(reward, OfEnvironment) else None
    classes = [cls for cls in type(reward).__mro__ if cls.__module__ != "custom.reward_manager"]
    scores_itself = any(name in vars(cls) for cls in classes for name in ("__call__", "score"))
    if scores_itself or not isinstance(environment, ComparesMoves) or environment.reward != "env":
        return None
    began, chance, payments = time.monotonic(), rng_state(), list[frozenset[float]]()
    try:
        for state in map(environment.get_state, range(MOST_STATES)) if states is None else dict.fromkeys(states):
            payments.append(payments_in(environment, state))
            alike = [pays for pays in payments if len(pays) == 1]
            if len(payments) - len(alike) > FEW * MOST_STATES or time.monotonic() - began > MOST_SECONDS:
                break
        illegal = environment.compute_reward(state, None) if payments else 0.0
    except (RuntimeError, ValueError):  # of the environment: the run meets it, too, and says where
        return None
    finally:
        set_rng_state(chance)
    return Moves(len(payments), len(alike), frozenset().union(*alike), illegal) if payments else None


def payments_in(environment: ComparesMoves, state: Any) -> frozenset[float]:
    """Returns what the legal moves of a state are paid; of many, some that are drawn for it."""
    moves = environment.actions
    if not 0 < len(moves) <= MOST_MOVES:
        moves = environment.world_of(state.seed).random_walk(state.seed % 2**31 + len(state.actions), MOST_MOVES)
    return frozenset(environment.compute_reward(state, move) for move in moves)
