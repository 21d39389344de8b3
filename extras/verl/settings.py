"""Settings of agent loops in verl's form: actor_rollout_ref.rollout.agent…"""

from dataclasses import dataclass

from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    agent_loop_config_path: str | None = setting(
        None, "Yaml or json of verl's agents (name, _target_, …), or file.py:function of classes by name."
    )
    trust_logprobs: bool = setting(
        True, "Take the response_logprobs of an agent loop as they are; false: they must be the engine's."
    )
