"""Holds a conversation about a row: the policy calls tools and reads their results, and a simulated user may speak."""

from typing import Any, Protocol

from data.chat import as_messages
from data.rows import RUN_COLUMNS, beside
from data.types import Reply, Row
from extras.tools.toolbox import Toolbox
from workers.agents.episode import Episode

OF_THE_POLICY = ("malformed", "unknown_tool", "bad_arguments", "not_run")  # failures of calls that are its own fault


class User(Protocol):
    """A simulated user in one conversation."""

    async def speak(self, messages: list[dict[str, Any]]) -> tuple[bool, str, float]:
        """Answers the last of `messages`: (whether the conversation ends, text, score)."""

    async def close(self) -> None:
        """Gives back what the conversation holds."""


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
        self.messages.append({"role": "assistant", "content": str(answer)})
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
