"""Episodes of a game that counts, for tests of what plays them: in a file that several of them import."""

from threading import Event
from typing import Any, ClassVar

import gymnasium as gym

from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import TextEnv
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from data.types import SamplingParams
from tests.runs import compose
from training.environment import ENVIRONMENT, EnvSetup, begin_episodes
from workers.agent_loop import AgentLoop
from workers.rollout import Rollout

TOKENIZER = build_tokenizer()
SAMPLED = SamplingParams(True, 1.0, -1, 1.0, 400)
stop_hanging = Event()


class Counting(gym.Env):
    """Says 0, and counts on by the action; at 5 it is over. The seed decides what else it does in its second step."""

    observation_space, action_space = gym.spaces.Discrete(100), gym.spaces.Discrete(3)
    trouble: ClassVar[dict[int, str]] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.seed, self.count, self.steps = seed, 0, 0
        return 0, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.count, self.steps = self.count + action, self.steps + 1
        trouble = self.trouble.get(self.seed) if self.steps == 2 else None
        if trouble == "raises":
            raise OSError("the board fell")
        if trouble == "hangs":
            stop_hanging.wait()
        if trouble == "garbage":
            return object(), 0.0, False, False, {}
        return self.count, float(action), self.count >= 5, False, {}


gym.register("Counting-v0", Counting)


def as_text(env: Any, observation: int) -> str:
    if not isinstance(observation, int):
        raise TypeError(f"no number: {type(observation).__name__}")
    return f"{observation}"


def game_of(config: Any, tokenizer: Any, environment: Any) -> EnvSetup:
    manager = CustomRewardManager(environment)
    return EnvSetup(environment, CustomEnvDataset(environment, tokenizer, config.data, size=2), manager)


def episodes_config(*overrides: str) -> Any:
    return compose("env.mode=episode", "data.max_prompt_length=32", "data.max_response_length=400", *overrides)


def starts(game: EnvSetup, seeds: list[int]) -> DataProto:
    states = [game.environment.start_state(seed) for seed in seeds]
    rows = {
        "raw_prompt_ids": [game.dataset.encode_state(state) for state in states],
        "extra_info": [{"state": state} for state in states],
        "uid": [str(seed) for seed in seeds],
    }
    return begin_episodes(DataProto.from_single_dict(rows), ENVIRONMENT)


def counting(*overrides: str, tokenizer: Any = TOKENIZER, max_turns: int = 8) -> tuple[Any, EnvSetup]:
    config = episodes_config(*overrides)
    return config, game_of(config, tokenizer, TextEnv("Counting-v0", as_text, instruction="", max_turns=max_turns))


def played(
    config: Any, game: EnvSetup, engine: Rollout, seeds: list[int], sampling: SamplingParams = SAMPLED
) -> DataProto:
    return AgentLoop(config, game.dataset.tokenizer, engine, game).generate_sequences(
        starts(game, seeds), sampling, seed=7, first_row=0
    )


def row_text(batch: DataProto, row: int) -> str:
    real = batch.attention_mask[row] == 1
    return TOKENIZER.decode(batch.input_ids[row][real])
