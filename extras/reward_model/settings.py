"""Settings of a learned reward model; configs/schema.py, which is imported first, puts them into its section."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.schema import FSDPConfig, PretrainedModelConfig
from configs.settings import Frozen, group, setting


@dataclass
class RewardModelConfig(Frozen):
    enable: bool = setting(False, "Score responses by a learned reward model.")
    model: PretrainedModelConfig = group(
        PretrainedModelConfig, "The reward model: transformers has it as a sequence classifier with one output."
    )
    micro_batch_size_per_gpu: int | None = setting(
        None, "Sequences per forward pass; null: as many as forward_max_token_len_per_gpu allows.", ge=1
    )
    forward_max_token_len_per_gpu: int = setting(16384, "Tokens a forward pass may hold, padding included.", ge=1)
    max_length: int | None = setting(
        None, "Tokens that the model reads, the last of longer conversations; null: all its positions.", ge=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig, "Precision and offloading.")
    function_weight: float = setting(
        0.0, "Weight of a reward function's or environment's score beside the model's; 0: only logged."
    )


@dataclass
class Settings(Frozen):
    """Stand in the section `reward`."""

    switches = "reward_model.enable: reward_model"
    reward_model: RewardModelConfig = group(RewardModelConfig, "A learned reward model; it scores training alone.")

    @property
    def fallback(self) -> str:
        return "model" if self.reward_model.enable else super().fallback

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.reward_model.enable and config.env.id and config.env.history == "turns":
            raise ConfigError(
                "reward_model.enable with env.history=turns: it scores whole responses: set env.history=transcript."
            )
