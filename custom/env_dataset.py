"""Shows states of an environment as training prompts: edit this file to change what the policy is shown.

Row i is the environment's i-th state, rendered to a prompt. It carries the state itself, so that the reward can be
computed in the real environment, and the expected action where the environment knows one. Validation episodes are shown
by the same object, state by state.
"""

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once
from configs.schema import DataConfig, EnvConfig
from custom.env_wrapper import EnvState, TextEnv
from data.rl_dataset import RLHFDataset

logger = logging.getLogger(__name__)

STATES_CHECKED = 64  # states whose prompts are measured at the start
MAX_REDRAWS = 100
REDRAW_STRIDE = 1 << 40  # leads to states that no other row has


class CustomEnvDataset(RLHFDataset):
    """`size` states of `environment`, from its `first`-th on, made when they are asked for.

    The prompts of 64 states, spread over all, are measured at once. Of a longer one that comes later, another state is
    drawn in its place (data.filter_overlong_prompts), else it is cut or refused (data.truncation). Another is drawn,
    with a notice, where the environment fails to make one. Without a tokenizer, rows have texts alone; a run gives its
    own to a dataset that has none.

    Raises:
        ValueError: prompts exceed data.max_prompt_length, and nothing says that they may be cut.
    """

    def __init__(
        self,
        environment: TextEnv,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: DataConfig | None = None,
        size: int = EnvConfig.train_size,
        first: int = 0,
    ) -> None:
        super().__init__(config=config)
        self.environment, self.size, self.first = environment, size, first
        if tokenizer is not None:
            self.setup(tokenizer, config)

    def setup(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig | None) -> None:
        super().setup(tokenizer, config)
        positions = np.linspace(0, self.size - 1, min(self.size, STATES_CHECKED)).astype(int).tolist()
        states = [self.environment.get_state(self.first + position) for position in positions]
        self.check_sizes(states, "states")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> dict[str, Any]:
        for draw in range(MAX_REDRAWS):
            try:
                state = self.environment.get_state(self.first + position + draw * REDRAW_STRIDE)
            except (RuntimeError, TimeoutError) as error:  # the environment raised or hung: the run goes on
                if draw == MAX_REDRAWS - 1:
                    raise
                notice_once(f"states that cannot be made have others drawn in their place: {error}", topic=id(self))
                continue
            if self.tokenizer is None:
                return self.columns(state, position)
            prompt_ids = self.encode_state(state)
            if prompt_ids is not None:
                return self.make_row(self.columns(state, position), position, prompt_ids)
            self.num_filtered += 1
        raise ValueError(
            f"{type(self).__name__}, row {position}: {MAX_REDRAWS} states in a row have prompts of more than "
            f"data.max_prompt_length={self.config.max_prompt_length} tokens: raise it"
        )

    def columns(self, state: EnvState, position: int) -> dict[str, Any]:
        """Returns the columns of a row beside its tokens."""
        return {
            self.config.prompt_key: self.messages(state),
            "data_source": self.environment.env_id,
            "reward_model": {"style": "rule", "ground_truth": self.expected_answer(state)},
            "extra_info": {"index": position, "state": state},
        }

    def messages(self, state: EnvState) -> list[dict[str, Any]]:
        """Returns the chat that shows `state` to the policy, in training and in validation episodes."""
        return [{"role": "user", "content": self.state_to_text(state)}]

    def state_to_text(self, state: EnvState) -> str:
        """Returns the text that shows `state` to the policy."""
        return self.environment.state_to_text(state)

    def turn_messages(self, state: EnvState) -> list[dict[str, Any]]:
        """Returns the messages that show `state` to the policy after an action, where it has all before it in view."""
        return [{"role": "user", "content": state.reply}]

    def expected_answer(self, state: EnvState) -> str | None:
        """Returns the answer of an optimal player, where the environment can tell."""
        action = self.environment.get_action(state)
        return None if action is None else self.environment.action_to_text(action)

    def encode_state(self, state: EnvState) -> list[int] | None:
        """Returns the token ids of the prompt that shows `state`, at most data.max_prompt_length.

        A longer one is cut by data.truncation, or None where data.filter_overlong_prompts leaves it out.
        """
        prompt_ids = self._encode_whole(state)
        if self.config.filter_overlong_prompts and len(prompt_ids) > self.config.max_prompt_length:
            return None
        return self._fit(prompt_ids, self._origin(state))

    def check_sizes(self, states: Iterable[EnvState], label: str) -> None:
        """Measures the prompts of `states`, which messages call `label`; too long ones are refused, or reported."""
        settings, lengths = self.config, [len(self._encode_whole(state)) for state in states]
        longest, overlong = max(lengths), sum(length > settings.max_prompt_length for length in lengths)
        if not overlong:
            return
        text = (
            f"{type(self).__name__}: {overlong} of {len(lengths)} {label} have prompts of more than "
            f"data.max_prompt_length={settings.max_prompt_length} tokens, the longest {longest}"
        )
        none_left = settings.filter_overlong_prompts and overlong == len(lengths)
        if settings.truncation == "error" or none_left:
            remedy = "or cut them by data.filter_overlong_prompts=false data.truncation=left"
            raise ValueError(f"{text}: raise it to at least {longest}, {remedy}.")
        outcome = "left out" if settings.filter_overlong_prompts else f"cut ({settings.truncation})"
        logger.warning("%s: such prompts are %s.", text, outcome)

    def _encode_whole(self, state: EnvState) -> list[int]:
        return self._encode({self.config.prompt_key: self.messages(state)}, self._origin(state))

    def _origin(self, state: EnvState) -> str:
        moves = len(state.actions)
        return f"{type(self).__name__}, {self.environment.env_id} after reset(seed={state.seed}) and {moves} actions"
