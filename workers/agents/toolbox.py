"""The calls of one episode's answers: run side by side, each by its deadline, and told to the policy."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from configs.errors import notice_once, printable, users_line
from configs.import_utils import accepts
from configs.schema import MultiTurnConfig
from data.tool_parsers import ParsedAnswer, ToolCall, ToolParser, without_thoughts
from data.tools import AgentData, BaseTool, ToolResponse, as_response, as_reward, checked_arguments
from data.types import check_text
from workers.agents.user_code import Overdue, in_users_loop

places: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, asyncio.Semaphore]] = WeakKeyDictionary()


@dataclass
class ToolReplies:
    """Results of the calls of one answer.

    Attributes:
        messages: one of the role tool for each call, in their order, and for each that is malformed.
        rewards: one a call; 0 for one that failed.
        counts: "calls", and of those that failed malformed, unknown_tool, bad_arguments, raised, timeout and not_run.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, text: str, name: str | None = None, reward: float = 0.0, failure: str | None = None) -> None:
        self.messages.append({"role": "tool", **({"name": name} if name else {}), "content": text})
        self.rewards.append(reward)
        self.counts["calls"] += 1
        if failure is not None:
            self.counts[failure] += 1


class Toolbox:
    """The tools of one episode.

    Args:
        tools: by name; shared by all episodes.
        tools_kwargs: of the row, by name of the tool: create_kwargs, execute_kwargs, calc_reward_kwargs,
            release_kwargs.

    Attributes:
        data: the episode, for tools whose `execute` takes `agent_data`.
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
        self.data = AgentData(tools_kwargs=tools_kwargs or {})
        self.instances: dict[str, str] = {}  # by name of the tool
        self.creating = asyncio.Lock()

    def parse(self, answer: str) -> ParsedAnswer:
        return self.parser.parse(without_thoughts(answer), self.schemas)

    async def respond(self, parsed: ParsedAnswer) -> ToolReplies:
        """Runs the calls of an answer, the first max_parallel_calls of them side by side.

        The policy reads what a tool raises, and earns nothing by that call. Raises ValueError for what cannot be read.
        """
        replies, most = ToolReplies(), self.settings.max_parallel_calls
        calls, rest = parsed.calls[:most], parsed.calls[most:]
        answers = await asyncio.gather(*map(self._answer, calls))
        for call, (text, reward, failure) in zip(calls, answers, strict=True):
            check_text(text, f"tool {call.name}")
            replies.add(self._cut(text), call.name, reward, failure)
        for error in parsed.errors:
            replies.add(f"Error: {error}", failure="malformed")
        for call in rest:
            replies.add(f"Error: not run, as only {most} may be called at once", call.name, failure="not_run")
        return replies

    async def finish(self) -> dict[str, float]:
        """Returns the reward of the whole episode by name of the tools that were called."""
        return {
            name: as_reward(await self._call(name, "calc_reward", instance, **self._kwargs(name, "calc_reward")))
            for name, instance in self.instances.items()
        }

    async def close(self) -> None:
        """Releases what was created; what a tool raises there is warned of, as its episode is over."""
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
        result = await self._call(name, "execute", self.instances[name], arguments, **kwargs)
        response, reward, _ = result
        return as_response(response), as_reward(reward)

    async def _call(self, name: str, method: str, *arguments: Any, **kwargs: Any) -> Any:
        """Awaits a method of a tool; what waits because `max_concurrent` calls are under way has no deadline yet."""
        tool = self.tools[name]
        async with place(tool.queue, tool.max_concurrent):
            return await in_users_loop(tool, getattr(tool, method)(*arguments, **kwargs), self.settings.tool_timeout)

    def _kwargs(self, name: str, step: str) -> dict[str, Any]:
        return (self.data.tools_kwargs.get(name) or {}).get(f"{step}_kwargs") or {}

    def _cut(self, text: str) -> str:
        return truncate(text, self.settings.max_tool_response_length, self.settings.tool_response_truncate_side)


def place(queue: Any, most: int = BaseTool.max_concurrent) -> asyncio.Semaphore:
    """Returns what lets `most` calls of this queue run side by side in the running loop."""
    return places.setdefault(asyncio.get_running_loop(), {}).setdefault(queue, asyncio.Semaphore(most))


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
    """Warns of what a tool raised, once for each line: the policy, which is told, is not who can mend it."""
    place = users_line(error)
    where = f" ({place})" if place else ""
    notice_once(f"the tool {name} raised {type(error).__name__}: {error}{where}", about=(name, place))
