"""Conversations checked before any model loads: tools, their format, simulated users, and the rows that name them."""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.loader import notice
from configs.schema import MultiTurnConfig
from data.interactions import interaction_of, load_interactions
from data.rl_dataset import RLHFDataset
from data.sampler import PromptLoader
from data.tool_files import load_tools
from data.tool_parsers import ToolParser
from training.game import AGENT_COLUMN, SINGLE_TURN, TOOL_AGENT

KEY = "actor_rollout_ref.rollout.multi_turn"


def tool_schemas(settings: MultiTurnConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The schemas that prompts describe to the policy: one for each tool; [] where rows are no conversations.

    Raises:
        ValueError, FileNotFoundError, RuntimeError: a file, class, schema or format that cannot be used; names it.
    """
    tools = load_tools(settings.tool_config_path, settings.function_tool_path) if settings.enable else {}
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


def check_rows(settings: MultiTurnConfig, loader: PromptLoader, positions: Iterable[int]) -> None:
    """Rows ask for conversations only where there are some, and for simulated users that there are.

    Rows of files are all looked at, those that a dataset makes at these positions.

    Raises:
        ConfigError: names the row and the remedy.
    """
    dataset, interactions = loader.dataset, {}
    if settings.enable:
        interactions = load_interactions(settings.interaction_config_path)
    if isinstance(dataset, RLHFDataset) and dataset.rows:
        rows = enumerate(dataset.rows)
    else:
        rows = ((position, loader.row(position)) for position in (positions if interactions else ()))
    for position, row in rows:
        agent = row.get(AGENT_COLUMN, SINGLE_TURN)
        if agent not in (SINGLE_TURN, TOOL_AGENT):
            raise ConfigError(
                f"row {position} has {AGENT_COLUMN}={agent}; it must be {SINGLE_TURN}, answered once, or {TOOL_AGENT}, "
                "a conversation; or take the column away from all rows."
            )
        if agent == TOOL_AGENT and not settings.enable:
            raise ConfigError(
                f"row {position} has {AGENT_COLUMN}={TOOL_AGENT}, and {KEY}.enable=false: it would be answered once, "
                f"without tools. Set {KEY}.enable=true, or take the column away."
            )
        try:
            interaction_of(interactions, row.get("extra_info"))
        except ValueError as error:
            raise ConfigError(f"row {position}: {error}") from error
