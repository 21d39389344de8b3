"""Finds the user's classes that play episodes, and runs their coroutines, and those of tools and simulated users, by
deadlines, in one event loop that they share.

What blocks such a coroutine blocks all, so a thread looks who does; workers/agents/user_code.py runs calls in threads.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Event, Thread
from traceback import walk_stack
from typing import Any
from weakref import WeakKeyDictionary

from configs.errors import ConfigError, is_users, notice_once
from configs.extras import has
from configs.import_utils import bind, find, load_named
from configs.schema import AgentConfig, Config
from data.chat import ChatFormat
from data.concurrency import run, start_loop
from data.seeding import derive_seed
from data.types import Reply, Row
from training.environment import AGENT_COLUMN, AGENT_KEY, PROGRAM, known_names
from workers.agents.episode import Episode
from workers.agents.user_code import LOOK_SECONDS, as_failure, by_deadline, in_thread

SIDE_BY_SIDE = 64  # calls of one owner
LATE = 1.0  # seconds from which on who holds up the shared loop is named
HANGS = 600.0  # seconds after which who holds it up may never end, and the others need not wait for that
slots_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, asyncio.Semaphore]] = WeakKeyDictionary()


@dataclass(eq=False)
class Agent:
    """A class that plays episodes, an `Episode` or an agent loop, under the name that rows call it by.

    Attributes:
        settings: arguments of its constructor.
        is_ready: whether its `init_class` was called, which prepares what its episodes share.
        blocks: whether it computes or waits without `await`; an episode then has a thread of its own.
    """

    name: str
    cls: Any
    settings: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = False

    def __post_init__(self) -> None:
        self.blocks: bool = "blocks" in dir(self.cls) and self.cls.blocks
        if not isinstance(self.cls, type) or not {"run", "step"} & {*dir(self.cls)}:
            raise ConfigError(f"{AGENT_KEY}: {self.name} is {self.cls!r}, which plays no episodes: define step or run.")

    @property
    def kind(self) -> str:
        """The kind of its episodes in the table of extras."""
        return "agent_loop" if "run" in dir(self.cls) else "class"


def load_agents(config: AgentConfig) -> dict[str, Agent]:
    """Loads the user's agents by name: an extra's, default_agent_loop as file.py:Class, and agent.program."""
    agents = find("source", "agents")(config) if has("source", "agents") else {}
    default = config.default_agent_loop
    if default is not None and default not in agents:
        if "." not in default and ":" not in default:
            raise ConfigError(f"{AGENT_KEY}.default_agent_loop={default}: {known_names(agents)}")
        agents[default] = Agent(default, load_named(default, f"{AGENT_KEY}.default_agent_loop"))
    if config.program:
        agents[PROGRAM] = find("source", PROGRAM)(config)
    return agents


class SharedLoop:
    """Runs the coroutines of users in one event loop, and looks from another thread which call holds it up.

    A call that computes or waits without `await` is named once; the seconds, `held` by all, are lost to no other call.
    """

    def __init__(self) -> None:
        self.loop, thread = start_loop()
        self.held, self.calls = 0.0, WeakKeyDictionary[asyncio.Task[Any], SharedCall | None]()
        self.loop.set_task_factory(self._make_task)
        Thread(target=self._look, args=[thread.ident], daemon=True, name="looks after user code").start()

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **settings: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **settings)
        self.calls[task] = current_call.get(None)
        return task

    def _look(self, thread: int) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self.loop.call_soon_threadsafe((runs := Event()).set)
            began = last = time.monotonic()
            while not runs.wait(LOOK_SECONDS):
                task, now = asyncio.current_task(self.loop), time.monotonic()
                if call := task and self.calls.get(task):
                    if now - began < HANGS:
                        call.held, self.held = call.held + now - last, self.held + now - last
                    if now - began > LATE:
                        name_blocking(call.owner.name, thread)
                last = now


class SharedCall:
    """Runs `coroutine`, of `owner`, in the shared event loop, which it has `held` up for so many seconds."""

    def __init__(self, owner: Any, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.owner, self.held, self.shared = owner, 0.0, shared_loop()
        self.held_before = self.shared.held
        current_call.set(self)  # of its tasks, to which the context is handed on
        self.future = asyncio.run_coroutine_threadsafe(contain(coroutine), self.shared.loop)

    def lost_seconds(self) -> float:
        """Returns the seconds for which other calls have held up the loop since this one began."""
        return self.shared.held - self.held_before - self.held


current_call: ContextVar[SharedCall] = ContextVar("current_call")
shared_loop = cache(SharedLoop)


def name_blocking(name: str, thread: int) -> None:
    """Says, once for each line, where the user's code in this thread holds up all coroutines."""
    stack = ((frame.f_code.co_filename, line) for frame, line in walk_stack(sys._current_frames()[thread]))
    line = next((f" (at {file}:{line})" for file, line in stack if is_users(file)), "")
    notice_once(
        f"{name} computes or waits without await{line}, and all other coroutines wait for it. Await there, or set "
        "blocks = True in its class; a function without `async` has a thread of its own.",
        topic=(name, line),
    )


async def in_users_loop(
    owner: Any, coroutine: Coroutine[Any, Any, Any], deadline: float, extends: Callable[[], bool] = bool
) -> Any:
    """Returns the result of `coroutine`, of `owner`, run in the event loop that user code shares.

    It has a thread of its own where `owner.blocks`: where it computes or waits without `await`.

    Raises:
        Overdue: it took more than `deadline` seconds, as `by_deadline`.
        Exception: it raised this; what an event loop would take for its own (SystemExit) as an error that names it.
    """
    if owner.blocks:
        return await in_thread(run, contain(coroutine), deadline=deadline, extends=extends)
    call = SharedCall(owner, coroutine)
    return await by_deadline(asyncio.wrap_future(call.future), deadline, extends, call.lost_seconds)


async def contain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except BaseException as error:  # SystemExit too, which would end the event loop
        if asyncio.current_task().cancelling():
            raise
        raise as_failure(error)  # noqa: B904  (it is the error itself, or has it as its cause)


def slots(queue: Any, size: int = SIDE_BY_SIDE) -> asyncio.Semaphore:
    """Returns the semaphore that lets `size` calls of this queue run side by side in the running loop."""
    return slots_of_loop.setdefault(asyncio.get_running_loop(), {}).setdefault(queue, asyncio.Semaphore(size))


class Asked(Counter[int]):
    """Numbers requests of one episode that may come at once by what they ask and how often that was asked, so that
    their draws do not depend on the order in which they come."""

    def number(self, prompt_ids: Sequence[int], *ways: int | str) -> int:
        digest = derive_seed(0, *prompt_ids, *ways)
        self[digest] += 1
        return derive_seed(digest, self[digest])


class UsersEpisode(Episode):
    """An `Episode` of the user's class, each step of it by the deadline of a tool's call.

    Its constructor is given what it names of row, config, tokenizer and chat. Raises ValueError if it needs more.
    """

    def __init__(self, row: Row, agent: Agent, config: Config, chat: ChatFormat) -> None:
        super().__init__(row)
        self.agent, self.config, self.chat = agent, config, chat
        self.row = {name: value for name, value in row.items() if name != AGENT_COLUMN}
        self.timeout = config.actor_rollout_ref.rollout.multi_turn.tool_timeout
        self.inner: Episode | None = None

    async def start(self) -> None:
        await self._in_time(self._begin())
        self.prompt_ids, self.columns = self.inner.prompt_ids, self.inner.columns

    async def _begin(self) -> None:
        arguments = {"row": self.row, "config": self.config, "tokenizer": self.chat.tokenizer, "chat": self.chat}
        self.inner = bind(self.agent.cls, arguments, self.agent.settings, self.agent.name)()
        await self.inner.start()

    async def step(self, answer: str) -> Reply:
        return await self._in_time(self.inner.step(answer))

    async def finish(self) -> Reply:
        return await self._in_time(self.inner.finish())

    async def close(self) -> None:
        if self.inner is not None:
            await self._in_time(self.inner.close())

    async def _in_time(self, coroutine: Any, extends: Any = bool) -> Any:
        async with slots(self.agent) if self.agent.blocks else nullcontext():  # each such call has a thread
            return await in_users_loop(self.agent, coroutine, self.timeout, extends)
