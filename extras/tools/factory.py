"""Conversations with an object of their own, whose public methods are tools: multi_turn.environment_factory.

And episodes of an environment, beside which there are tools.
"""

import pickle
import types
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any

from configs.import_utils import bind, load_named
from data.chat import ChatFormat, as_text, encode_pieces
from data.types import Reply, Row, check_text
from extras.tools.shared_loop import in_users_loop, slots
from extras.tools.tool_classes import KEY, FunctionTool
from extras.tools.tool_episode import ToolEpisode, User
from extras.tools.toolbox import Toolbox
from workers.agents.episode import Episode


class Factory:
    """Makes the object of each episode, by what `path` names; raises ValueError if that cannot be called."""

    def __init__(self, path: str) -> None:
        self.make = load_named(path, f"{KEY}.environment_factory")
        if not callable(self.make):
            raise ValueError(f"{KEY}.environment_factory={path}: it must be a class or a function.")

    def tools(self) -> list["MethodTool"]:
        """Returns the public methods of an object as tools, but for `reset`; raises ValueError if it has none."""
        owner = self.make()
        methods = [getattr(owner, name) for name in dir(owner) if not name.startswith("_") and name != "reset"]
        tools = [MethodTool(method) for method in methods if isinstance(method, types.MethodType)]
        if not tools:
            raise ValueError(f"{type(owner).__qualname__} has no public method beside reset: these are the tools.")
        return tools

    def __call__(self, row: Row, toolbox: Toolbox, user: User | None, chat: ChatFormat, width: int) -> "FactoryEpisode":
        return FactoryEpisode(row, toolbox, user, self.make, chat, width)


class MethodTool(FunctionTool):
    """A method of an object that an episode has for itself; of one object's methods one runs at a time."""

    max_concurrent = 1

    def of(self, owner: Any, queue: Any) -> "MethodTool":
        """Returns the tool that is the same method of another object."""
        tool = copy(self)
        tool.function, tool.queue = getattr(owner, self.function.__name__), queue
        return tool


class FactoryEpisode(ToolEpisode):
    """A conversation with an object of its own, whose methods are tools beside the others.

    Its column is for rewards, which may name it `environment`; where that is in another process, what can be pickled of
    the object's public attributes is there.
    """

    blocks = True  # it is made, and reset, in a thread

    def __init__(
        self, row: Row, toolbox: Toolbox, user: User | None, factory: Callable[[], Any], chat: ChatFormat, width: int
    ) -> None:
        super().__init__(row, toolbox, user)
        self.factory, self.chat, self.width = factory, chat, width
        self.name = f"reset of {factory.__qualname__}"
        self.environment: Any = None

    @property
    def columns(self) -> dict[str, Any]:
        return super().columns | {"__environment__": self.environment and EnvironmentView(self.environment)}

    async def start(self) -> None:
        async with slots(self.factory):
            text = await in_users_loop(self, self._begin(), self.toolbox.settings.tool_timeout)
        self.toolbox.tools = {
            name: tool.of(self.environment, self) if isinstance(tool, MethodTool) else tool
            for name, tool in self.toolbox.tools.items()
        }
        if text is not None:
            check_text(text, self.name)
            self._show(text)

    async def _begin(self) -> str | None:
        self.environment = self.factory()
        if "reset" not in dir(self.environment):
            return None
        text = bind(self.environment.reset, self.row, key=self.name)()
        return await text if isawaitable(text) else text

    def _show(self, text: str) -> None:
        """Puts what `reset` returned behind the prompt: into its last message, if that is a user's text."""
        match self.messages:
            case [*_, {"role": "user", "content": str(question)} as last]:
                self.messages[-1] = {**last, "content": question + text}
            case _:
                self.messages.append({"role": "user", "content": text})
        prompt, tokenizer = self.row["raw_prompt"], self.chat.tokenizer
        if isinstance(prompt, str):
            self.prompt_ids = encode_pieces(prompt + as_text(text, tokenizer), tokenizer, begins_text=True)
        else:
            self.prompt_ids = self.chat.prompt_ids(self.messages)
        self.data.prompt_ids = self.prompt_ids
        if len(self.prompt_ids) > self.width:
            raise ValueError(
                f"with what {self.name} returned, the prompt has {len(self.prompt_ids)} tokens, more than "
                f"data.max_prompt_length={self.width}: raise that, or return less."
            )


class EnvironmentView:
    """An environment as rewards see it; pickled, it is its public attributes, those of them that can be."""

    def __init__(self, environment: Any) -> None:
        self.__dict__["_environment"] = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_environment"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = {}
        for name, value in vars(self.__dict__["_environment"]).items():
            with suppress(pickle.PicklingError, TypeError, AttributeError):
                if not name.startswith("_") and pickle.dumps(value):
                    attributes[name] = value
        return EnvironmentView, (SimpleNamespace(**attributes),)


class ToolsBeside(Episode):
    """An episode of an environment, beside which the policy may call tools: an answer with calls is no action."""

    def __init__(self, game: Episode, toolbox: Toolbox) -> None:
        self.game, self.toolbox = game, toolbox

    @property
    def prompt_ids(self) -> list[int]:
        return self.game.prompt_ids

    @property
    def columns(self) -> dict[str, Any]:
        return self.game.columns | self.own_columns

    @property
    def own_columns(self) -> Row:
        calls, rewards = self.toolbox.counts["calls"], list(self.toolbox.data.tool_rewards)
        return {"tool_call_counts": calls, "tool_rewards": rewards}

    async def start(self) -> None:
        await self.game.start()

    async def step(self, answer: str) -> Reply:
        parsed = self.toolbox.parse(answer)
        if not parsed.calls and not parsed.errors:
            return await self.game.step(answer)
        return replace(await self.toolbox.respond(parsed), columns=self.own_columns)

    async def finish(self) -> Reply:
        return Reply(reward=await self.toolbox.finish(), columns=self.own_columns)

    async def close(self) -> None:
        await self.toolbox.close()
        await self.game.close()
