"""Translates env.id=verifiers:NAME: its rows are the data, and its rubric, or the environment itself, the reward."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.errors import ConfigError
from configs.settings import Keys

PREFIX = "verifiers:"
FILE = "extras/verifiers/bridge.py"
SPLITS = {"train": "train", "val": "eval"}  # of data, and of an environment


class VerifiersKeys(Keys):
    """Sets what env.id=verifiers:NAME stands for, where the run sets nothing else."""

    def translate_yaml(self, config: DictConfig, overrides: Any, file: str) -> None:
        expand(config)

    def translate_override(self, config: DictConfig, override: Any) -> None:
        expand(config)


def expand(config: DictConfig) -> None:
    """Replaces env.id=verifiers:NAME by the data and the reward of that environment."""
    env_id = OmegaConf.select(config, "env.id")
    if not isinstance(env_id, str) or not env_id.startswith(PREFIX):
        return
    if OmegaConf.select(config, "env.kwargs"):
        raise ConfigError(f"env.kwargs: arguments are part of the name, env.id={env_id.partition('?')[0]}?KEY=VALUE.")
    from extras.verifiers.bridge import has_one_turn  # loads what reads data, which other runs do not need yet

    config.env.id = None
    joint = "&" if "?" in env_id else "?"
    settings = {f"data.{split}_files": [f"{env_id}{joint}split={name}"] for split, name in SPLITS.items()}
    try:
        one_turn = has_one_turn(env_id)
    except (ValueError, TypeError, LookupError, AttributeError, ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"env.id={env_id}: {type(error).__name__}: {error}") from error
    if one_turn:
        function = "reward.custom_reward_function"
        settings |= {f"{function}.path": FILE, f"{function}.name": "rubric"}
    else:
        settings["actor_rollout_ref.rollout.agent.program"] = f"{FILE}:play"
    for key, value in settings.items():
        if OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, value, force_add=True)
