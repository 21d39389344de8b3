"""Loads what a run's rows talk to, tools and simulated users, and makes an episode of each row."""

import types
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError, notice, notice_once
from configs.import_utils import find, load_module
from configs.schema import MultiTurnConfig
from data.chat import QUESTION, ChatFormat
from data.rows import kwargs_in
from data.types import Row
from extras.tools.factory import Factory, ToolsBeside
from extras.tools.files import tools_of_yaml
from extras.tools.parsers import ToolParser, shows_tools, tool_kwargs
from extras.tools.tool_classes import KEY, TOOL_MARK, BaseTool, FunctionTool
from extras.tools.tool_episode import ToolEpisode
from extras.tools.toolbox import Toolbox
from workers.agents.episode import Episode


def load_tools(settings: MultiTurnConfig) -> dict[str, BaseTool]:
    """Loads all tools that the settings name, by name: of a yaml, of the functions of a file, and of the methods of
    the object that a factory makes for each episode."""
    files, tools = settings.files(), list[BaseTool]()
    if path := files.get("tool_config_path"):
        tools += tools_of_yaml(path)
    if path := files.get("function_tool_path"):
        tools += tools_of_functions(path)
    if path := files.get("environment_factory"):
        tools += Factory(path).tools()
    names = [tool.name for tool in tools]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{' and '.join(files.values())}: two tools are called {duplicates[0]!r}: rename one.")
    return dict(zip(names, tools, strict=True))


def tools_of_functions(path: str) -> list[FunctionTool]:
    """Returns the functions marked with `@function_tool`; if there are none, all public ones that the file defines."""
    module = load_module(path, f"{KEY}.function_tool_path")
    functions = {name: value for name, value in vars(module).items() if isinstance(value, types.FunctionType)}
    if marked := [vars(function)[TOOL_MARK] for function in functions.values() if TOOL_MARK in vars(function)]:
        return marked
    names = [name for name in functions if functions[name].__module__ == module.__name__ and name[0] != "_"]
    if not names:
        raise ValueError(f"{KEY}.function_tool_path={path}: it defines no function; write one, with type hints.")
    return [FunctionTool(functions[name]) for name in names]


class ToolEpisodes:
    """Makes an episode of each row; what tools and simulated users hold is shared by all."""

    def __init__(self, settings: MultiTurnConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.settings = settings
        self.tools = load_tools(settings)
        files = settings.files()
        self.factory = Factory(files["environment_factory"]) if "environment_factory" in files else None
        try:
            self.parser = ToolParser.get_tool_parser(settings.format, tokenizer)
        except ValueError as error:
            raise ConfigError(f"{KEY}.format={settings.format}: {error}") from error
        path, key = files.get("interaction_config_path"), f"{KEY}.interaction_config_path"
        self.users = path and find("source", "interactions", key)(path, settings.tool_timeout)

    def template_kwargs(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Returns the arguments of `encode_prompt` that describe the tools to the policy."""
        return tool_kwargs([tool.tool_schema.model_dump() for tool in self.tools.values()], self.parser, tokenizer)

    def tell(self, chat: ChatFormat) -> None:
        """Says where prompts describe the tools, if the chat template does not, or that nothing does. Raises ValueError
        for a template that does not go on from an answer by what users and tools say."""
        names, form = ", ".join(self.tools), f"{KEY}.format={self.settings.format}"
        if "tool_text" in chat.template_kwargs:
            notice(
                f"the chat template does not show tools, so the system message describes {names} and how {form} calls "
                "them, in prompts that are chats."
            )
        elif self.tools and not shows_tools(chat.tokenizer):
            notice(
                f"neither the chat template nor {form} shows tools, so the policy reads nothing of {names}: say in the "
                "prompts how they are called, or set custom_chat_template."
            )
        if self.users:
            chat.check_keeps_thoughts("user")
        if self.tools:
            chat.increment_text([{"role": "tool", "content": QUESTION}])

    def check(self, row: Row) -> None:
        """Raises ValueError if a row names a simulated user that is not there, or none where there are some."""
        if self.tools and isinstance(row.get("raw_prompt"), str):
            notice_once(
                f"there are prompts that are texts, and texts show no tools: give chat messages, or say there how "
                f"{', '.join(self.tools)} are called."
            )
        if self.users:
            self.users.check(row)

    def toolbox(self, row: Row) -> Toolbox:
        """Returns the tools of a row's episode."""
        return Toolbox(self.tools, self.parser, self.settings, kwargs_in(row, "tools_kwargs"))

    def beside(self, episode: Episode, row: Row) -> Episode:
        """Returns an environment's episode with the tools beside it, if there are any."""
        return ToolsBeside(episode, self.toolbox(row)) if self.tools else episode

    def __call__(self, row: Row, chat: ChatFormat | None = None, width: int = 0) -> ToolEpisode:
        """Returns the episode of a row; raises ValueError if it names no user where there are some."""
        toolbox = self.toolbox(row)
        user = self.users and self.users(row, toolbox.data)
        if self.factory is None:
            return ToolEpisode(row, toolbox, user)
        return self.factory(row, toolbox, user, chat, width)
