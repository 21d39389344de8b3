"""Settings of tools of yaml files: actor_rollout_ref.rollout.multi_turn.tool_config_path."""

from dataclasses import dataclass

from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    tool_config_path: str | None = setting(
        None, "Yaml of tools, verl's: a list `tools` of class_name, config, tool_schema.", file=True
    )
