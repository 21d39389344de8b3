"""Scores answers to single states by the environment (which pays for whole episodes by itself): edit this file.

Try it without a model:

    manager = CustomRewardManager(make_env("FrozenLake-v1"))
    state = manager.environment.get_state(0)
    manager(DataProto.from_single_dict({"responses": ["right"], "extra_info": [{"state": state}]}))
"""

from configs.errors import users_line
from custom.env_wrapper import EnvState, TextEnv
from data.protocol import DataProto
from data.types import NotScored, Score


class CustomRewardManager:
    """Scores responses by what the environment pays for the action they name."""

    def __init__(self, environment: TextEnv) -> None:
        self.environment = environment

    def __call__(self, data: DataProto) -> list[Score | NotScored]:
        """Returns one dict per response: `score`, and `valid_action` to see in the log whether answers can be read.

        `data.responses` are texts; `data.extra_info[i]["state"]` is the state that response i answers. Where the
        environment raises, the response is not scored, and the others are.
        """
        states = [info["state"] for info in data.extra_info]
        return [self._score_or_failure(text, state) for text, state in zip(data.responses, states, strict=True)]

    def _score_or_failure(self, response: str, state: EnvState) -> Score | NotScored:
        try:
            return self.score(response, state)
        except RuntimeError as error:  # from the environment; it names the seed and the actions
            location = users_line(error.__cause__ or error)
            return NotScored("error", f"{error} (at {location})" if location else str(error))

    def score(self, response: str, state: EnvState) -> Score:
        action = self.extract_action(response)
        return {"score": self.environment.compute_reward(state, action), "valid_action": float(action is not None)}

    def extract_action(self, text: str) -> int | None:
        """Returns the action that an answer names, in training and in validation episodes; None: no legal one."""
        return self.environment.extract_action(text)
