"""Plays episodes of an environment: the policy acts, and is shown what came of it."""

from collections.abc import Callable
from typing import Any

from configs.errors import warns_of_close
from data.types import Reply, Row
from training.environment import EnvSetup
from workers.agents.episode import Episode
from workers.agents.user_code import Overdue, UserThread


class EnvSlot:
    """An environment, and the thread that made it and makes all its calls, as many environments need."""

    def __init__(self) -> None:
        self.thread, self.environment = UserThread(), None

    async def leave(self, timeout: float | None) -> None:
        """Closes the environment, and ends the thread; warns if it raises or hangs."""
        with warns_of_close("an environment"):
            await self.thread.run(self.close, deadline=timeout)
        self.thread.end()

    def close(self) -> None:
        environment, self.environment = self.environment, None
        if environment is not None:
            with warns_of_close(f"the environment {environment.env_id}"):
                environment.close()


class EnvEpisode(Episode):
    """An episode from the state in `row`, in an environment of its own.

    It is played in one other thread, which the environment may keep waiting for `timeout` seconds at a time (None:
    any). With `apart`, every state is shown in a prompt of its own, as the dataset shows the first; else by what the
    dataset writes behind an action. `free` are environments that no episode of this worker uses: one is taken from
    there, or else made, and given back at the end; one that failed is closed.
    """

    def __init__(self, row: Row, env_setup: EnvSetup, free: list[EnvSlot], apart: bool, timeout: float | None) -> None:
        self.prompt_ids = row["raw_prompt_ids"]
        self.seed, self.actions = row["extra_info"]["state"].seed, row["extra_info"]["state"].actions
        self.columns = {"success": None, "invalid_actions": 0, "reset_seed": self.seed}
        self.env_setup, self.free, self.apart, self.timeout = env_setup, free, apart, timeout
        self.slot: EnvSlot | None = None
        self.played: list[Any] = []
        self.is_reset = self.is_usable = False

    async def start(self) -> None:
        if not self.env_setup.environment.repeatable:  # it may begin in another state than the row's
            self.prompt_ids = await self._in_thread(self._begin)

    async def step(self, answer: str) -> Reply:
        return await self._in_thread(self._act, answer)

    async def close(self) -> None:
        if self.is_usable:
            self.free.append(self.slot)
        elif self.slot is not None and not self.slot.thread.given_up:
            await self.slot.leave(self.timeout)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.slot is None:
            self.slot = self.free.pop() if self.free else EnvSlot()
        self.is_usable, slot = False, self.slot
        try:
            result = await slot.thread.run(function, *arguments, deadline=self.timeout, cleanup=slot.close)
        except Overdue as error:
            way = f"after reset(seed={self.seed}) and actions {[*self.actions, *self.played]}"
            raise TimeoutError(f"{self.env_setup.environment.env_id}, {way}: {error} (env.timeout)") from None
        self.is_usable = True
        return result

    def _reset(self) -> None:
        if self.slot.environment is None:
            self.slot.environment = self.env_setup.environment.clone()
        self.slot.environment.reset(self.seed, self.actions)
        self.is_reset = True

    def _begin(self) -> list[int]:
        """Resets the environment; returns the token ids of the first prompt."""
        self._reset()
        prompt_ids = self.env_setup.dataset.encode_state(self.slot.environment.state)
        if prompt_ids is None:
            raise ValueError("the first prompt is longer than data.max_prompt_length: raise it")
        return prompt_ids

    def _act(self, answer: str) -> Reply:
        if not self.is_reset:
            self._reset()
        env_setup, environment = self.env_setup, self.slot.environment
        action = env_setup.reader.extract_action(answer)
        self.played += [] if action is None else [action]
        _, reward, _, _, info = environment.act(action)
        columns = {"success": info["success"], "invalid_actions": info["invalid"]}
        if info["end_reason"] is not None:
            return Reply(reward=reward, end_reason=info["end_reason"], columns=columns)
        if not self.apart:
            return Reply(env_setup.dataset.turn_messages(environment.state), reward=reward, columns=columns)
        prompt_ids = env_setup.dataset.encode_state(environment.state)
        full = None if prompt_ids is not None else "context_full"
        return Reply(prompt_ids=prompt_ids, reward=reward, end_reason=full, columns=columns)
