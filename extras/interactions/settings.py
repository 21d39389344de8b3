"""Settings of simulated users: actor_rollout_ref.rollout.multi_turn.interaction_config_path."""

from dataclasses import dataclass

from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    interaction_config_path: str | None = setting(
        None, "Yaml of simulated users, verl's: a list `interaction` of name, class_name, config.", file=True
    )
