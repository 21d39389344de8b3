"""Conversations checked before any model loads: tools, their format, simulated users, and the rows that name them."""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.loader import notice
from configs.schema import MultiTurnConfig
from data.interactions import BaseInteraction, interaction_of, load_interactions
from data.tool_files import load_tools
from data.tool_parsers import ToolParser

KEY = "actor_rollout_ref.rollout.multi_turn"
TOOL_AGENT = "tool_agent"  # what verl's rows that are conversations hold in the column agent_name


def tool_schemas(settings: MultiTurnConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The schemas that prompts describe to the policy: one for each tool; [] where rows are no conversations.

    Raises:
        ValueError, FileNotFoundError, RuntimeError: a file, class, schema or format that cannot be used; names it.
    """
    if not settings.enable:
        return []
    tools = load_tools(settings.tool_config_path, settings.function_tool_path)
    if not tools:
        return []
    try:
        ToolParser.get_tool_parser(settings.format)
    except ValueError as error:
        raise ConfigError(f"{KEY}.format={settings.format}: {error}") from error
    if "tools" not in str(tokenizer.chat_template):
        notice(
            f"the chat template does not show tools, so the policy reads nothing of {', '.join(tools)}: say in the "
            "prompts how they are called, begin with a model that knows it, or set "
            "actor_rollout_ref.model.custom_chat_template."
        )
    return [tool.tool_schema.model_dump() for tool in tools.values()]


def simulated_users(settings: MultiTurnConfig) -> dict[str, BaseInteraction]:
    """The interactions that rows may name; {} where rows are no conversations. Raises as `load_interactions`."""
    return load_interactions(settings.interaction_config_path) if settings.enable else {}


def check_row(
    row: Mapping[str, Any], place: str, settings: MultiTurnConfig, interactions: Mapping[str, BaseInteraction]
) -> None:
    """Raises ConfigError if a row asks for a conversation and there are none, or names no interaction that there is."""
    if row.get("agent_name") == TOOL_AGENT and not settings.enable:
        raise ConfigError(
            f"{place}: agent_name is {TOOL_AGENT}, and {KEY}.enable=false: the row would be answered once, without "
            f"tools. Set {KEY}.enable=true, or take the column away."
        )
    try:
        interaction_of(interactions, row.get("extra_info"))
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


def check_rows(rows: Iterable[tuple[int, Mapping[str, Any]]], source: str, settings: MultiTurnConfig) -> None:
    """`check_row` for rows with their positions in the dataset that `source` names."""
    interactions = simulated_users(settings)
    for position, row in rows:
        check_row(row, f"{source}, row {position}", settings, interactions)
