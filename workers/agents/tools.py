"""Holds conversations about rows: the policy calls tools and reads their results, and a simulated user may speak."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once, printable, users_line
from configs.extras import find
from configs.import_utils import accepts
from configs.schema import MultiTurnConfig
from data.chat import ChatFormat, as_messages, tool_kwargs
from data.rows import RUN_COLUMNS, beside, kwargs_in
from data.tool_parsers import ParsedAnswer, ToolCall, ToolParser, without_thoughts
from data.tools import (
    KEY,
    AgentData,
    BaseTool,
    ToolResponse,
    as_response,
    as_reward,
    checked_arguments,
    load_tools,
)
from data.types import Reply, Row, check_text
from training.environment import load_users
from workers.agents.episode import Episode
from workers.agents.user_code import Overdue, in_users_loop, slots

OF_THE_POLICY = ("malformed", "unknown_tool", "bad_arguments", "not_run")  # failures of calls that are its own fault


class Toolbox:
    """The tools of one episode.

    Args:
        tools: by name; shared by all episodes.
        tools_kwargs: of the row, by name of the tool: create_kwargs, execute_kwargs, calc_reward_kwargs,
            release_kwargs.

    Attributes:
        data: the episode, for tools whose `execute` takes `agent_data`; its tool_rewards has a number for each call.
        counts: "calls", and of those that failed malformed, unknown_tool, bad_arguments, raised, timeout and not_run.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        parser: ToolParser,
        settings: MultiTurnConfig,
        tools_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tools, self.parser, self.settings = tools, parser, settings
        self.schemas = {name: tool.tool_schema for name, tool in tools.items()}
        self.data, self.counts = AgentData(tools_kwargs=tools_kwargs or {}), Counter[str]()
        self.instances: dict[str, str] = {}  # by name of the tool
        self.creating = asyncio.Lock()

    def parse(self, answer: str) -> ParsedAnswer:
        return self.parser.parse(without_thoughts(answer), self.schemas)

    async def respond(self, parsed: ParsedAnswer) -> Reply:
        """Runs the calls of an answer, the first max_parallel_calls of them side by side.

        The policy reads what a tool raises, and earns nothing by that call. Raises ValueError for what cannot be read.
        """
        settings, results = self.settings, []
        calls, surplus = parsed.calls[: settings.max_parallel_calls], parsed.calls[settings.max_parallel_calls :]
        answers = await asyncio.gather(*map(self._answer, calls))
        for call, (text, reward, failure) in zip(calls, answers, strict=True):
            check_text(text, f"tool {call.name}")
            text = truncate(text, settings.max_tool_response_length, settings.tool_response_truncate_side)
            results.append((call.name, text, reward, failure))
        results += [(None, f"Error: {error}", 0.0, "malformed") for error in parsed.errors]
        refusal = f"Error: not run, as only {settings.max_parallel_calls} may be called at once"
        results += [(call.name, refusal, 0.0, "not_run") for call in surplus]
        rewards = [reward for _, _, reward, _ in results]
        self.data.tool_rewards += rewards
        self.counts.update(kind for *_, failure in results for kind in ("calls", failure) if kind)
        messages = [{"role": "tool", **({"name": name} if name else {}), "content": text} for name, text, *_ in results]
        return Reply(messages, reward=sum(rewards))

    async def finish(self) -> float:
        """Returns what the tools that were called pay for the whole episode."""
        rewards = [
            as_reward(await self._call(name, "calc_reward", instance, **self._kwargs(name, "calc_reward")))
            for name, instance in self.instances.items()
        ]
        return sum(rewards)

    async def close(self) -> None:
        """Releases what was created; warns of what a tool raises, as its episode is over."""
        while self.instances:
            name, instance = self.instances.popitem()
            try:
                await self._call(name, "release", instance, **self._kwargs(name, "release"))
            except Exception as error:
                warn_once(name, error)

    async def _answer(self, call: ToolCall) -> tuple[str, float, str | None]:
        """Returns (text for the policy, reward, kind of failure) of one call."""
        if call.name not in self.tools:
            return f"Error: there is no tool {call.name!r}; there are {', '.join(self.tools)}", 0.0, "unknown_tool"
        try:
            arguments = checked_arguments(self.schemas[call.name], call.arguments)
        except ValueError as error:
            return f"Error: {error}", 0.0, "bad_arguments"
        try:
            response, reward = await self._execute(call.name, arguments)
        except Overdue:
            return f"Error: no answer in {self.settings.tool_timeout:g} seconds", 0.0, "timeout"
        except Exception as error:  # whatever the user's tool raises is an answer to the policy, and is counted
            warn_once(call.name, error)
            return printable(f"Error when executing tool: {error}"), 0.0, "raised"
        return "" if response.text is None else response.text, reward, None

    async def _execute(self, name: str, arguments: dict[str, Any]) -> tuple[ToolResponse, float]:
        async with self.creating:  # parallel calls share the instance
            if name not in self.instances:
                created = await self._call(name, "create", create_kwargs=self._kwargs(name, "create"))
                self.instances[name] = created[0] if isinstance(created, tuple) else created
        kwargs = self._kwargs(name, "execute")
        if accepts(self.tools[name].execute, "agent_data"):
            kwargs = kwargs | {"agent_data": self.data}
        response, reward, _ = await self._call(name, "execute", self.instances[name], arguments, **kwargs)
        return as_response(response), as_reward(reward)

    async def _call(self, name: str, method: str, *arguments: Any, **kwargs: Any) -> Any:
        """Awaits a method of a tool; what waits because `max_concurrent` calls are under way has no deadline yet."""
        tool = self.tools[name]
        async with slots(tool.queue, tool.max_concurrent):
            return await in_users_loop(tool, getattr(tool, method)(*arguments, **kwargs), self.settings.tool_timeout)

    def _kwargs(self, name: str, step: str) -> dict[str, Any]:
        return (self.data.tools_kwargs.get(name) or {}).get(f"{step}_kwargs") or {}


def truncate(text: str, limit: int, side: str) -> str:
    """Returns `text` without what exceeds `limit` characters on the named side: left, right or middle."""
    if len(text) <= limit:
        return text
    if side == "left":
        return "(truncated)..." + text[-limit:]
    if side == "right":
        return text[:limit] + "...(truncated)"
    half = limit // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


def warn_once(name: str, error: Exception) -> None:
    """Warns of what a tool raised, once for each line, as the policy, which is told, cannot mend it."""
    line = users_line(error)
    suffix = f" ({line})" if line else ""
    notice_once(f"the tool {name} raised {type(error).__name__}: {error}{suffix}", topic=(name, line))


class User(Protocol):
    """A simulated user in one conversation."""

    async def speak(self, messages: list[dict[str, Any]]) -> tuple[bool, str, float]:
        """Answers the last of `messages`: (whether the conversation ends, text, score)."""

    async def close(self) -> None:
        """Gives back what the conversation holds."""


class ToolEpisodes:
    """Makes an episode of each row; what tools and simulated users hold is shared by all."""

    def __init__(self, settings: MultiTurnConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.settings = settings
        self.tools = load_tools(settings)
        path = settings.files().get("environment_factory")
        self.factory = path and find("source", "factory", f"{KEY}.environment_factory")(path)
        self.parser = ToolParser.get_tool_parser(settings.format, tokenizer)
        self.users = load_users(settings)

    def template_kwargs(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Returns the arguments by which prompts describe the tools."""
        schemas = [tool.tool_schema.model_dump() for tool in self.tools.values()]
        return tool_kwargs(schemas, self.parser, tokenizer)

    def toolbox(self, row: Row) -> Toolbox:
        """Returns the tools of a row's episode."""
        return Toolbox(self.tools, self.parser, self.settings, kwargs_in(row, "tools_kwargs"))

    def __call__(self, row: Row, chat: ChatFormat | None = None, width: int = 0) -> "ToolEpisode":
        """Returns the episode of a row; raises ValueError if it names no user where there are some."""
        toolbox = self.toolbox(row)
        user = self.users and self.users(row, toolbox.data)
        if self.factory is None:
            return ToolEpisode(row, toolbox, user)
        return self.factory(row, toolbox, user, chat, width)


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

    def __init__(self, row: Row, toolbox: Toolbox, user: User | None = None) -> None:
        self.row, self.toolbox, self.user = row, toolbox, user
        self.prompt_ids, self.messages = list(row["raw_prompt_ids"]), as_messages(row["raw_prompt"])
        self.data, self.counts = toolbox.data, toolbox.counts
        self.data.messages, self.data.prompt_ids = self.messages, self.prompt_ids

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
            **beside(self.data.extra_fields, self.row.keys() | RUN_COLUMNS, "extra"),
        }

    async def step(self, answer: str) -> Reply:
        self.data.assistant_turns += 1
        self.messages.append({"role": "assistant", "content": answer})
        parsed = self.toolbox.parse(answer)
        if parsed.calls or parsed.errors:
            if self.at_limit:
                return Reply(end_reason="max_turns")
            reply = await self.toolbox.respond(parsed)
            return self._reply(reply.messages, reply.reward)
        return Reply() if self.user is None else await self._talk(self.user)

    @property
    def at_limit(self) -> bool:
        """Says whether the policy may not speak again."""
        settings, data = self.toolbox.settings, self.data
        limits = (settings.max_assistant_turns, data.assistant_turns), (settings.max_user_turns, data.user_turns)
        return any(limit and turns >= limit for limit, turns in limits)

    async def close(self) -> None:
        await self.toolbox.close()
        if self.user is not None:
            await self.user.close()

    async def _talk(self, user: User) -> Reply:
        is_over, text, score = await user.speak(list(self.messages))
        self.data.turn_scores.append(score)
        if is_over or self.at_limit:
            return Reply(reward=score, end_reason="terminated" if is_over else "max_turns")
        return self._reply([{"role": "user", "content": text}], score)

    def _reply(self, messages: list[dict[str, Any]], reward: float) -> Reply:
        self.data.user_turns += 1
        self.messages += messages
        return Reply(messages=messages, reward=reward, columns=self.columns)

    async def finish(self) -> Reply:
        return Reply(reward=await self.toolbox.finish(), columns=self.columns)
