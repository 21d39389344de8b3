"""Playouts by a policy's own answers: what a move is worth if the policy plays on after it (policy iteration).

A model answers many prompts at once far faster than one by one. So states are worked on many at a time: a playout that
comes to a prompt which has not been answered ends there, and is played again when all such prompts have been.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from configs.schema import Config
from custom.env_wrapper import EnvState
from data.chat import encode_prompt
from data.pretrained import load_tokenizer
from data.types import Request, SamplingParams
from extras.lookahead.credit import Playouts
from extras.standalone.rollout import StandaloneRollout


class NotKnown(BaseException):
    """A policy was asked for moves that it has not made yet."""


class Policy:
    """The greedy answers of the model at `config.actor_rollout_ref.model.path`, by what it is shown.

    Attributes:
        known: the move of each prompt; None: no legal one.
        asked: prompts that are to be answered.
    """

    def __init__(self, config: Config, environment: Any, dataset: Any) -> None:
        self.environment, self.dataset = environment, dataset
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        self.tokenizer = load_tokenizer(model, "actor_rollout_ref.model")
        self.template = dataset.config.apply_chat_template_kwargs
        self.rollout = StandaloneRollout(model, rollout, self.tokenizer, config.trainer.n_threads)
        self.sampling = SamplingParams(False, 1.0, -1, 1.0, rollout.response_length)
        self.known: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}

    def __call__(self, state: Any) -> Any | None:
        """Returns its move in a state, None for no legal one; raises NotKnown if it has not been asked before."""
        messages = self.dataset.messages(state)
        if (key := str(messages)) not in self.known:
            self.asked[key] = messages
            raise NotKnown
        return self.known[key]

    def answer(self) -> None:
        """Makes all moves that it has been asked for."""
        requests = [
            Request(index, encode_prompt(messages, self.tokenizer, **self.template), self.sampling, seed=0)
            for index, messages in enumerate(self.asked.values())
        ]
        with self.rollout.precision():
            completions = self.rollout.engine.generate(requests)
        texts = self.tokenizer.batch_decode([done.token_ids for done in completions], skip_special_tokens=True)
        self.known |= zip(self.asked, map(self.environment.extract_action, texts), strict=True)
        self.asked = {}

    def settle(self, work: Callable[[int], Any], indices: Sequence[int]) -> list[Any]:
        """Returns the results of `work`, which is begun again until it comes by no prompt that is not answered."""
        results: dict[int, Any] = {}
        while len(results) < len(indices):
            for index in indices:
                if index not in results:
                    with suppress(NotKnown):
                        results[index] = work(index)
            self.answer()
        return [results[index] for index in indices]


class PolicyPlayouts(Playouts):
    """Estimates what a move is worth by the mean return of a policy's play after it."""

    def __init__(self, environment: Any, policy: Policy) -> None:
        super().__init__(environment)
        self.policy, self.is_known = policy, True

    def estimate(self, seed: int, actions: tuple[Any, ...], moves: tuple[Any, ...]) -> list[float]:
        """Returns the mean returns; raises NotKnown, after all playouts, if the policy does not know its answers."""
        self.is_known = True
        values = super().estimate(seed, actions, moves)
        if not self.is_known:
            raise NotKnown
        return values

    def following(self, world: Any, drawn: Iterator[Any]) -> Iterator[Any]:
        """Yields the policy's moves; of no legal one, that which is drawn in its place."""
        for move in drawn:
            try:
                answer = self.policy(EnvState(world.seed, tuple(world.actions), world.text))
            except NotKnown:
                self.is_known = False
                return
            yield move if answer is None else answer
