"""Plays an environment in which the policy may call tools, too."""

from dataclasses import replace
from typing import Any

from data.types import Reply, Row
from workers.agents.episode import Episode
from workers.agents.tools import Toolbox


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
