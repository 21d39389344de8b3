"""Episodes of an environment: the policy acts, and is shown what came of it."""

from collections.abc import Callable
from typing import Any

from data.concurrency import in_thread
from data.types import Reply, Row
from training.environment import Environment, EnvSetup
from workers.agents.episode import Episode


class EnvEpisode(Episode):
    """An episode from the state in `row`, in an environment of its own.

    It is played in another thread, which the environment may keep waiting for `timeout` seconds at a time (None: any).
    With `apart`, every state is shown in a prompt of its own, as the dataset shows the first; else by what the dataset
    writes behind an action. `free` are environments that no episode of this worker uses: one is taken from there, or
    else made, and given back at the end.
    """

    def __init__(self, row: Row, game: EnvSetup, free: list[Environment], apart: bool, timeout: float | None) -> None:
        self.prompt_ids = row["raw_prompt_ids"]
        self.seed, self.actions = row["extra_info"]["state"].seed, row["extra_info"]["state"].actions
        self.columns = {"success": None, "invalid_actions": 0, "reset_seed": self.seed}
        self.game, self.free, self.apart, self.timeout = game, free, apart, timeout
        self.environment: Environment | None = None
        self.is_usable = False

    async def start(self) -> None:
        if not self.game.environment.repeatable:  # it may not begin as the row has seen it
            self.prompt_ids = await self._in_thread(self._begin)

    async def step(self, answer: str) -> Reply:
        return await self._in_thread(self._act, answer)

    async def close(self) -> None:
        if self.is_usable:  # not after an error, or while it hangs
            self.free.append(self.environment)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.is_usable = False
        result = await in_thread(function, *arguments, deadline=self.timeout)
        self.is_usable = True
        return result

    def _reset(self) -> None:
        self.environment = self.free.pop() if self.free else self.game.environment.clone()
        self.environment.reset(self.seed, self.actions)

    def _begin(self) -> list[int]:
        """Resets the environment; returns the token ids of the first prompt."""
        self._reset()
        prompt_ids = self.game.dataset.encode_state(self.environment.state)
        if prompt_ids is None:
            raise ValueError("the first prompt is longer than data.max_prompt_length: raise it")
        return prompt_ids

    def _act(self, answer: str) -> Reply:
        if self.environment is None:
            self._reset()
        game = self.game
        _, reward, _, _, info = self.environment.act(game.reader.extract_action(answer))
        columns = {"success": info["success"], "invalid_actions": info["invalid"]}
        if info["end_reason"] is not None:
            return Reply(reward=reward, end_reason=info["end_reason"], columns=columns)
        if not self.apart:
            messages = game.dataset.turn_messages(self.environment.state)
            return Reply(messages, reward=reward, columns=columns)
        prompt_ids = game.dataset.encode_state(self.environment.state)
        full = None if prompt_ids is not None else "context_full"
        return Reply(prompt_ids=prompt_ids, reward=reward, end_reason=full, columns=columns)
