"""Rows of data as episodes: the policy calls tools, and talks to a simulated user."""

import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from configs.import_utils import bind
from configs.schema import MultiTurnConfig
from data.chat import ChatFormat, as_messages, as_text, encode_pieces, tool_kwargs
from data.rows import RUN_COLUMNS, beside, kwargs_in
from data.tool_parsers import ParsedAnswer, ToolParser
from data.tools import MethodTool
from data.types import Reply, Row, check_text
from extras.interactions.base import BaseInteraction, interaction_of, load_interactions
from extras.tools.files import load_factory, load_tools
from workers.agents.episode import Episode
from workers.agents.toolbox import Toolbox, place
from workers.agents.user_code import in_users_loop

OF_THE_POLICY = ("malformed", "unknown_tool", "bad_arguments", "not_run")  # failures of calls that are its own fault


class ToolEpisodes:
    """Makes an episode of each row; what tools and simulated users hold is shared by all.

    Raises:
        ValueError, FileNotFoundError, RuntimeError: as `load_tools`, `load_interactions` and `get_tool_parser`.
    """

    def __init__(self, settings: MultiTurnConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.settings = settings
        self.tools = load_tools(settings.tool_config_path, settings.function_tool_path, settings.environment_factory)
        self.factory = load_factory(settings.environment_factory) if settings.environment_factory else None
        self.parser = ToolParser.get_tool_parser(settings.format, tokenizer)
        self.interactions = load_interactions(settings.interaction_config_path)

    def template_kwargs(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Arguments by which prompts describe the tools."""
        schemas = [tool.tool_schema.model_dump() for tool in self.tools.values()]
        return tool_kwargs(schemas, self.parser, tokenizer)

    def toolbox(self, row: Mapping[str, Any]) -> Toolbox:
        """Returns the tools of a row's episode."""
        return Toolbox(self.tools, self.parser, self.settings, kwargs_in(row, "tools_kwargs"))

    def __call__(self, row: Mapping[str, Any], chat: ChatFormat | None = None, width: int = 0) -> "ToolEpisode":
        """Returns the episode of a row; raises ValueError if it names no interaction where there are some."""
        toolbox = self.toolbox(row)
        user = interaction_of(self.interactions, row)
        if self.factory is None:
            return ToolEpisode(row, toolbox, user, self.settings)
        return EnvironmentEpisode(row, toolbox, user, self.settings, factory=self.factory, chat=chat, width=width)


class ToolEpisode(Episode):
    """One conversation about a row.

    What an answer calls is run, and the policy goes on from the results. After an answer without a call, the simulated
    user speaks; where there is none, the episode is over. At the limits of turns calls are not run any more, and the
    user still scores the answer, but is not heard.

    Attributes:
        columns: tool_call_counts; invalid_actions, the calls among them that the policy got wrong; tool_failures, how
            often each kind of failure; tool_rewards and turn_scores, one number a call and one a user's turn; and what
            tools keep in agent_data.extra_fields, as extra_NAME where another column has that name; __messages__,
            the conversation, which a reward may read.
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        toolbox: Toolbox,
        interaction: BaseInteraction | None,
        settings: MultiTurnConfig,
    ) -> None:
        self.prompt_ids = list(row["raw_prompt_ids"])
        self.messages = as_messages(row["raw_prompt"])
        self.toolbox, self.interaction, self.settings = toolbox, interaction, settings
        self.taken = row.keys() | RUN_COLUMNS
        self.data = toolbox.data
        self.data.messages, self.data.prompt_ids = self.messages, self.prompt_ids
        self.data.interaction, self.data.interaction_kwargs = interaction, kwargs_in(row, "interaction_kwargs")
        self.instance: str | None = None  # of the interaction, once it has begun
        self.counts: Counter[str] = Counter()

    @property
    def columns(self) -> dict[str, Any]:
        return {
            "tool_call_counts": self.counts["calls"],
            "invalid_actions": sum(self.counts[kind] for kind in OF_THE_POLICY),
            "tool_failures": {kind: count for kind, count in self.counts.items() if kind != "calls"},
            "tool_rewards": list(self.data.tool_rewards),
            "turn_scores": list(self.data.turn_scores),
            "success": None,
            "__messages__": list(self.messages),
            **beside(self.data.extra_fields, self.taken, "extra"),
        }

    async def step(self, answer: str) -> Reply:
        self.data.assistant_turns += 1
        self.messages.append({"role": "assistant", "content": answer})
        parsed = self.toolbox.parse(answer)
        if parsed.calls or parsed.errors:
            return await self._end("max_turns") if self.at_limit else await self._call(parsed)
        if self.interaction is None:
            return await self._end(None)
        return await self._talk(self.interaction)

    @property
    def at_limit(self) -> bool:
        """True if the policy may not speak again."""
        answers, replies = self.settings.max_assistant_turns, self.settings.max_user_turns
        said, heard = self.data.assistant_turns, self.data.user_turns
        return bool((answers and said >= answers) or (replies and heard >= replies))

    async def close(self) -> None:
        await self.toolbox.close()
        if self.instance is not None:
            instance, self.instance = self.instance, None
            await self._in_time(self.interaction.finalize_interaction(instance))

    async def _call(self, parsed: ParsedAnswer) -> Reply:
        replies = await self.toolbox.respond(parsed)
        self.counts += replies.counts
        self.data.tool_rewards += replies.rewards
        return self._reply(replies.messages, sum(replies.rewards))

    async def _talk(self, user: BaseInteraction) -> Reply:
        kwargs = self.data.interaction_kwargs
        if self.instance is None:
            self.instance = await self._in_time(user.start_interaction(str(uuid4()), **kwargs))
        said = user.generate_response(self.instance, list(self.messages), **kwargs)
        is_over, text, score, _ = await self._in_time(said)
        self.data.turn_scores.append(float(score))
        if is_over or self.at_limit:
            return await self._end("terminated" if is_over else "max_turns", float(score))
        return self._reply([{"role": "user", "content": text}], float(score))

    def _reply(self, messages: list[dict[str, Any]], reward: float) -> Reply:
        self.data.user_turns += 1
        self.messages += messages
        return Reply(messages=messages, reward=reward, columns=self.columns)

    async def _end(self, end_reason: str | None, reward: float = 0.0) -> Reply:
        reward += sum((await self.toolbox.finish()).values())
        return Reply(reward=reward, end_reason=end_reason, columns=self.columns)

    async def _in_time(self, work: Any) -> Any:
        return await in_users_loop(self.interaction, work, self.settings.tool_timeout)


class EnvironmentEpisode(ToolEpisode):
    """A conversation with an object of its own, whose methods are tools beside the others.

    Its column is for rewards, which may name it `environment`; where that is in another process, what can be pickled of
    the object's public attributes is there.
    """

    blocks = True  # it is made, and reset, in a thread

    def __init__(self, row: Row, *parts: Any, factory: Callable[[], Any], chat: ChatFormat, width: int) -> None:
        super().__init__(row, *parts)
        self.row, self.factory, self.chat, self.width = row, factory, chat, width
        self.name = f"reset of {factory.__qualname__}"
        self.environment: Any = None

    @property
    def columns(self) -> dict[str, Any]:
        return super().columns | {"__environment__": self.environment and EnvironmentView(self.environment)}

    async def start(self) -> None:
        async with place(self.factory):
            said = await in_users_loop(self, self._begin(), self.settings.tool_timeout)
        tools = {
            name: it.of(self.environment, self) for name, it in self.toolbox.tools.items() if isinstance(it, MethodTool)
        }
        self.toolbox.tools = {**self.toolbox.tools, **tools}
        if said is not None:
            check_text(said, self.name)
            self._show(said)

    async def _begin(self) -> str | None:
        self.environment = self.factory()
        if "reset" not in dir(self.environment):
            return None
        said = bind(self.environment.reset, self.row, key=self.name)()
        return await said if isawaitable(said) else said

    def _show(self, said: str) -> None:
        """Puts what `reset` returned behind the prompt: into its last message, if that is a user's text."""
        match self.messages:
            case [*_, {"role": "user", "content": str(text)} as last]:
                self.messages[-1] = {**last, "content": text + said}
            case _:
                self.messages.append({"role": "user", "content": said})
        prompt, tokenizer = self.row["raw_prompt"], self.chat.tokenizer
        if isinstance(prompt, str):
            self.prompt_ids = encode_pieces(prompt + as_text(said, tokenizer), tokenizer, opens=True)
        else:
            self.prompt_ids = self.chat.prompt_ids(self.messages)
        self.data.prompt_ids = self.prompt_ids
        if len(self.prompt_ids) > self.width:
            raise ValueError(
                f"with what {self.name} returned, the prompt has {len(self.prompt_ids)} tokens, more than "
                f"data.max_prompt_length={self.width}: raise that, or return less."
            )


class ToolsBeside(Episode):
    """An episode of an environment, beside which the policy may call tools: an answer with calls is no action."""

    def __init__(self, game: Episode, toolbox: Toolbox) -> None:
        self.game, self.toolbox, self.counts, self.rewards = game, toolbox, Counter[str](), list[float]()

    @property
    def prompt_ids(self) -> list[int]:
        return self.game.prompt_ids

    @property
    def columns(self) -> dict[str, Any]:
        return self.game.columns | {"tool_call_counts": self.counts["calls"], "tool_rewards": list(self.rewards)}

    async def start(self) -> None:
        await self.game.start()

    async def step(self, answer: str) -> Reply:
        parsed = self.toolbox.parse(answer)
        if not parsed.calls and not parsed.errors:
            reply = await self.game.step(answer)
            paid = sum((await self.toolbox.finish()).values()) if reply.end_reason else 0.0
            return replace(reply, reward=reply.reward + paid)
        replies = await self.toolbox.respond(parsed)
        self.counts += replies.counts
        self.rewards += replies.rewards
        told = {name: self.columns[name] for name in ("tool_call_counts", "tool_rewards")}
        return Reply(messages=replies.messages, reward=sum(replies.rewards), columns=told)

    async def close(self) -> None:
        await self.toolbox.close()
        await self.game.close()


class EnvironmentView:
    """An environment as rewards see it; pickled, it is its public attributes, those of them that can be."""

    def __init__(self, environment: Any) -> None:
        self.__dict__["_environment"] = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_environment"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {}
        for name, value in vars(self.__dict__["_environment"]).items():
            with suppress(pickle.PicklingError, TypeError, AttributeError):
                if not name.startswith("_") and pickle.dumps(value):
                    kept[name] = value
        return EnvironmentView, (SimpleNamespace(**kept),)
