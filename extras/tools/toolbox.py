"""Runs the calls of an episode: their arguments are held against the schemas, and what comes back is text."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from configs.errors import notice_once, printable, users_line
from configs.import_utils import accepts
from configs.schema import MultiTurnConfig
from data.types import Reply, check_text
from extras.tools.parsers import ParsedAnswer, ToolCall, ToolParser, parse_answer
from extras.tools.shared_loop import in_users_loop, slots
from extras.tools.tool_classes import BaseTool, ToolResponse, as_one_of, as_response, as_reward, types_of
from workers.agents.user_code import Overdue


@dataclass(eq=False)
class AgentData:
    """An episode as tools that ask for `agent_data` see it: verl's class of this name, with arguments by name.

    Attributes:
        messages: the conversation so far, the answer with the call included.
        request_id: of the episode; prompt_ids: its first prompt.
        assistant_turns, user_turns: answers, and what was said to the policy after them.
        tool_rewards, turn_scores: one number a call and one a user's turn, so far.
        extra_fields: kept for the episode; becomes columns of its rows, which rewards may name.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    image_data: Any = None
    video_data: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    request_id: str = field(default_factory=lambda: uuid4().hex)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    interaction: Any = None
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    tool_calls: list[Any] = field(default_factory=list)
    routed_experts: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


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
        return parse_answer(self.parser, answer, self.schemas)

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
            except Exception as error:  # of the user's tool, whatever it is
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


def checked_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call as the schema types them: a number written as text becomes one, and the reverse.

    Raises:
        ValueError: one is missing, unknown, of the wrong type or not among the allowed; a sentence for the policy.
    """
    parameters = schema["function"]["parameters"]
    known = parameters["properties"]
    if unknown := [name for name in arguments if name not in known]:
        raise ValueError(f"there is no argument {unknown[0]!r}; the arguments are {', '.join(known) or 'none'}")
    if missing := [name for name in parameters["required"] if name not in arguments]:
        raise ValueError(f"the argument {missing[0]!r} is missing")
    return {name: _as_typed(name, value, known[name]) for name, value in arguments.items()}


def _as_typed(name: str, value: Any, property_schema: Mapping[str, Any]) -> Any:
    kinds = types_of(property_schema)
    if not kinds or (value is None and "null" in kinds):
        return value
    if (result := as_one_of(value, kinds)) is None:
        raise ValueError(f"the argument {name!r} must be of type {' or '.join(kinds)}")
    if "enum" in property_schema and result not in property_schema["enum"]:
        raise ValueError(f"the argument {name!r} must be one of {', '.join(map(str, property_schema['enum']))}")
    return result
