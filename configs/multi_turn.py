"""Whom the policy talks to, whether there is somebody, and who pays: checked before torch is imported."""

from pathlib import Path

from configs.errors import ConfigError
from configs.paths import find_path
from configs.schema import Config, MultiTurnConfig


def check_multi_turn(settings: MultiTurnConfig, env_id: str | None) -> None:
    key = "actor_rollout_ref.rollout.multi_turn"
    named = {
        "tool_config_path": settings.tool_config_path,
        "function_tool_path": settings.function_tool_path,
        "interaction_config_path": settings.interaction_config_path,
    }
    files = {name: file for name, file in named.items() if file}
    for name, file in files.items():
        if not find_path(file).is_file():
            raise ConfigError(f"{key}.{name}={file}: there is no such file (looked in {Path.cwd()}).")
    if files and not settings.enable:
        raise ConfigError(
            f"{key} names {', '.join(files)}, and {key}.enable=false: rows would be answered once, without them. Set "
            f"{key}.enable=true, or take them back."
        )
    if settings.enable and not files and env_id is None:
        raise ConfigError(
            f"{key}.enable=true, and there is nobody to talk to: name tools ({key}.tool_config_path or "
            f"function_tool_path), simulated users ({key}.interaction_config_path), or an environment (env.id)."
        )
    if files and env_id is not None:
        raise ConfigError(
            f"{key} names {', '.join(files)}, and env.id={env_id}: tools and simulated users go with rows of "
            "data.train_files. Take one of the two back."
        )


def check_episodes(config: Config) -> None:
    """Raises ConfigError for settings that whole episodes of an environment would pass over."""
    if config.env.mode != "episode":
        return
    if config.env.id is None:
        raise ConfigError("env.mode=episode: there is no environment to play. Set env.id, e.g. env.id=FrozenLake-v1.")
    if source := config.reward.source():
        raise ConfigError(
            f"{source}, and env.mode=episode: the environment pays for its episodes. Have it pay otherwise (a "
            "gymnasium wrapper), or train on single states: env.mode=step."
        )
    if config.env.val_size:
        raise ConfigError(
            f"env.val_size={config.env.val_size}, and env.mode=episode: there are no single states to validate on. Set "
            "env.val_episodes, and env.val_size=0."
        )
