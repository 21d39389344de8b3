"""Settings of tools that an extra loads: actor_rollout_ref.rollout.multi_turn.tool_config_path, environment_factory."""

from dataclasses import dataclass

from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    tool_config_path: str | None = setting(
        None, "Yaml of tools, verl's: a list `tools` of class_name, config, tool_schema.", file=True
    )
    environment_factory: str | None = setting(
        None, "file.py:Class, an object per episode: its methods are tools; reset(**row) may add text.", file=True
    )
