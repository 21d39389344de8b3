"""Logs how often each action of a discrete environment is played, and what it earns: entropy shows neither."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from data.protocol import DataProto
from data.types import Metrics, Stage
from training.environment import ActionReader

MOST_ACTIONS = 20  # that an environment may have to log each


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
        game, reader = self.trainer.game, self.trainer.reward
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
