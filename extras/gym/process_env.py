"""Episodes in processes of their own: for environments that are slow, hang or crash.

A process plays many episodes, one call at a time. A call that is not done by its deadline ends its process for good,
and whatever it hung in; the other episodes of that process are replayed in the next one, as a reset seed and the
actions since restore everything.
"""

import itertools
import pickle
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

from configs.errors import users_line
from configs.import_utils import load_module
from data.concurrency import run_in_background
from extras.processes.child import START_SECONDS, Channel, Child, ProcessEnded

if TYPE_CHECKING:  # it loads torch, which the process of an environment does without
    from training.environment import Environment

READ = ("success", "action", "turns", "invalid", "return", "end_reason")  # of info; the rest stays in the process
Story = tuple[tuple[str, tuple[Any, ...]], ...]  # methods of TextEnv and arguments: (("reset", (7, ())), ("act", (2,)))


class ProcessEnv:
    """A `TextEnv` whose episodes are played in other processes, which its clones share.

    Everything that does not concern the running episode (instruction, single states, how answers are read) is done by
    `environment`, in this process.

    Raises, in `reset`, `step` and `act`:
        TimeoutError: the call took more than `timeout` seconds (None: any); its process is no more.
        RuntimeError: the environment raised, or its process ended.
    """

    def __init__(self, environment: "Environment", processes: int, timeout: float | None = 60.0) -> None:
        self.environment, self.processes, self.timeout = environment, processes, timeout
        self._pool = [Process(environment, timeout) for _ in range(processes)]
        self._numbers = itertools.count()
        self._begin()

    def _begin(self) -> None:
        self._number = next(self._numbers)
        self._process = self._pool[self._number % len(self._pool)]
        self._life, self._story = None, ()  # the process's life at the last call; all calls since the reset
        weakref.finalize(self, self._process.forget, self._number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessEnv, (self.environment, self.processes, self.timeout)

    def clone(self) -> "ProcessEnv":
        """Returns an environment with the same settings and processes, to play several episodes side by side."""
        twin = object.__new__(ProcessEnv)
        vars(twin).update(vars(self))
        twin._begin()
        return twin

    def reset(self, seed: int, actions: Sequence[Any] = ()) -> str:
        """Starts an episode in a process, as `TextEnv.reset` does; returns the prompt."""
        self._story = (("reset", (seed, tuple(actions))),)
        with self._process.lock:
            self._process.start()
            _, self._state = self._process.call(self._number, self._story)
            self._life = self._process.life
        return self.prompt

    def act(self, action: Any | None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one action, as `TextEnv.act` does; an episode whose process was lost is replayed first."""
        if not self._story:
            raise ValueError("no episode is running: call reset(seed) first")
        with self._process.lock:
            self._process.start()
            if self._life != self._process.life:  # another episode took the process down
                if not self.environment.repeatable:
                    raise RuntimeError(f"{self.env_id} is not repeatable, and its process is lost: {self._process.end}")
                self._process.call(self._number, self._story)
                self._life = self._process.life
            moved, self._state = self._process.call(self._number, (("act", (action,)),), self._story)
        self._story = (*self._story, ("act", (action,)))
        return moved

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one answer, as `TextEnv.step` does."""
        return self.act(self.environment.extract_action(text))

    @property
    def state(self) -> Any:
        """The state of the running episode, as `TextEnv.state` is."""
        return self._state

    @property
    def prompt(self) -> str:
        """Returns the text that the player reads now, as `TextEnv.prompt` does."""
        return self.environment.state_to_text(self._state)

    def close(self) -> None:
        """Ends the episode, as `TextEnv.close` does: its process forgets it, and continues with others."""
        self._story = ()
        self._process.forget(self._number)


class Process:
    """Plays episodes in a process. `lock` is to be held around `start` and `call`; `life` counts the starts, and
    `end` says how the process before this one ended."""

    def __init__(self, environment: "Environment", timeout: float | None) -> None:
        self.environment, self.timeout, self.lock = environment, timeout, threading.Lock()
        self._child, self._forgotten, self.end = Child(serve, partial(pack, environment)), deque(), ""

    @property
    def life(self) -> int:
        return self._child.starts

    def forget(self, number: int) -> None:
        """Frees the resources of an episode at the next call."""
        self._forgotten.append(number)

    def call(self, number: int, chapters: Story, before: Story = ()) -> tuple[Any, Any]:
        """Continues the episode `number`; returns the result of the last of the chapters, and the state after it."""
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        seconds = None if self.timeout is None else self.timeout * len(chapters)
        answer = self._child.ask(pickle.dumps((number, chapters, forgotten)), seconds)
        story = describe((*before, *chapters))
        result, error, trace = pickle.loads(self._wait(answer, seconds, story, " (env.timeout)"))
        if error is not None:
            error.add_note(f"in the environment's process:\n{trace}")
            raise error
        return result

    def start(self) -> None:
        """Starts the process, if there is none or it has ended."""
        if not self._child.is_running():
            self._wait(self._child.start(), START_SECONDS, "to be built in a process of its own")

    def _wait(self, work: Coroutine[Any, Any, Any], seconds: float | None, description: str, key: str = "") -> Any:
        description = f"{self.environment.env_id}, {description}"
        try:
            return run_in_background(work)
        except TimeoutError:
            self._child.end()
            self.end = f"{description}: not done after {seconds:g} seconds{key}, so its process was killed"
            raise TimeoutError(self.end) from None
        except ProcessEnded as ended:
            self.end = f"{description}: {ended}"
            raise RuntimeError(self.end) from None


def describe(story: Story) -> str:
    """Names the reset of a story, and the actions since."""
    (_, (seed, start)), *acts = story
    return f"after reset(seed={seed}) and actions {[*start, *(action for _, (action,) in acts)]}"


def pack(environment: "Environment") -> bytes:
    """Returns the first request to a process: the user's module, and the environment."""
    return pickle.dumps((environment.module, cloudpickle.dumps(environment)))


def serve(channel: Channel) -> None:
    """Continues one episode at each call, until the parent is gone; answers result, exception and traceback.

    Any exception that a `TextEnv` does not raise by contract ends the process.
    """
    first, body = channel.read()
    module, pickled = pickle.loads(body)
    if module:
        load_module(module)  # registers the id, and is where the pickled functions are
    environment: Environment = cloudpickle.loads(pickled)
    episodes: dict[int, Environment] = {}
    channel.write(first, b"")
    while (call := channel.read()) is not None:
        request, body = call
        number, chapters, forgotten = pickle.loads(body)
        for old in forgotten:
            if old in episodes:
                episodes.pop(old).close()
        if number not in episodes:
            episodes[number] = environment.clone()
        channel.write(request, pickle.dumps(play(episodes[number], chapters)))


def play(episode: "Environment", chapters: Story) -> tuple[Any, Exception | None, str]:
    """Returns (result of the last chapter, state), exception or None, its traceback."""
    try:
        for method, arguments in chapters:
            moved = getattr(episode, method)(*arguments)
        if method == "act":
            moved = (*moved[:4], {key: moved[4][key] for key in READ})
        return (moved, episode.state), None, ""
    except (RuntimeError, ValueError, TypeError) as error:
        line = users_line(error) if error.__cause__ else None
        return None, type(error)(f"{error} (at {line})") if line else error, traceback.format_exc()
