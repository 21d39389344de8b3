"""Settings of conversations with tools, under actor_rollout_ref.rollout.multi_turn."""

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
    function_tool_path: str | None = setting(None, "Python file whose typed functions are tools.", file=True)
    max_assistant_turns: int | None = setting(None, "Most answers of the policy in an episode; null or 0: any.", ge=0)
    max_user_turns: int | None = setting(None, "Most turns of tools and of the simulated user; null or 0: any.", ge=0)
    max_parallel_calls: int = setting(1, "Calls of one answer that are run, in parallel.", ge=1)
    max_tool_response_length: int = setting(256, "Characters of a tool's answer; longer ones are cut.", ge=1)
    tool_response_truncate_side: str = setting("middle", "Side left out.", choices=("left", "middle", "right"))
