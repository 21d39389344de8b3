"""States of an environment as training prompts: edit this file to change what the policy is shown.

Row i is the environment's i-th state, rendered to a prompt. It carries the state itself, so that the reward can be
computed in the real environment, and the expected action where the environment knows one.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.schema import DataConfig
from custom.env_wrapper import EnvState, TextEnv
from data.rl_dataset import RLHFDataset, prompt_text
from data.unknown_characters import report_unknown_characters

SAMPLE = 32  # states that are looked at before training


class CustomEnvDataset(RLHFDataset):
    """`size` states of `environment`, from its `first`-th on. States are made when asked for; nothing is stored."""

    def __init__(
        self,
        environment: TextEnv,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        size: int,
        first: int = 0,
    ) -> None:
        super().__init__(None, tokenizer, config=config)
        self.environment = environment
        self.size = size
        self.first = first
        # An environment or prompt that cannot work says so now, not at the first step.
        sample = [self[position] for position in range(min(size, SAMPLE))]
        texts = ((prompt_text(row["raw_prompt"]), row["raw_prompt_ids"]) for row in sample)
        report_unknown_characters(texts, tokenizer, f"the first {len(sample)} states of {environment.env_id}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> dict[str, Any]:
        state = self.environment.get_state(self.first + position)
        row = {
            self.config.prompt_key: [{"role": "user", "content": self.state_to_text(state)}],
            "data_source": self.environment.env_id,
            "reward_model": {"style": "rule", "ground_truth": self.expected_answer(state)},
            "extra_info": {"index": position, "state": state},
        }
        return self.make_row(row, position)

    def state_to_text(self, state: EnvState) -> str:
        """The prompt that shows `state` to the policy."""
        return self.environment.state_to_text(state)

    def expected_answer(self, state: EnvState) -> str | None:
        """The answer of an optimal player, where the environment can tell."""
        action = self.environment.get_action(state)
        return None if action is None else self.environment.action_to_text(action)
