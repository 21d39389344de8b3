"""User code of episodes, by deadlines: calls in threads, and coroutines in an event loop that others do not share.

An environment keeps its thread. What hangs is given up: a thread cannot be killed (env.processes can), only counted.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from configs.errors import notice
from data.concurrency import start_loop

LONGEST_STEP = 2.0  # seconds for which a coroutine may keep the event loop
TICK = 0.05  # seconds between two looks at the threads' processor times
MOST_STUCK = 16  # threads of calls that were given up and are not over


class Overdue(TimeoutError):
    """A call was not done by its deadline."""


class GivenUp(BaseException):
    """Interrupts a call that nobody waits for any more."""


alive: set["UserThread"] = set()
stuck: set["UserThread"] = set()  # those that were given up, and whose call is not over
idle: list["UserThread"] = []


class UserThread:
    """Runs calls of user code, one after the other, in a thread of its own: what belongs to a thread stays there."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.given_up = False
        alive.add(self)
        self.thread = Thread(target=self._serve, daemon=True, name="user code")
        self.thread.start()

    @classmethod
    def take(cls) -> "UserThread":
        """Returns a thread that nobody uses; there are as many as were ever used at once."""
        try:
            return idle.pop()
        except IndexError:  # atomic, unlike a look before it
            return cls()

    def give_back(self) -> None:
        """Leaves the thread to others, unless it was given up."""
        if not self.given_up:
            idle.append(self)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Runs `function(*arguments)` after all that was submitted before."""
        future: Future[Any] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    put, value = future.set_result, function(*arguments)
                except BaseException as raised:  # handed on to whoever waits
                    put, value = future.set_exception, as_failure(raised)
                put(value)

        self.calls.put(call)
        return future

    async def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        deadline: float | None = None,
        last: Callable[[], Any] | None = None,
        anew: Callable[[], bool] = bool,
    ) -> Any:
        """Returns the result of `function(*arguments)`, while this event loop goes on.

        The deadline counts the seconds that the thread had, and not those for which it waited for other threads.

        Raises:
            Overdue: it took more than `deadline` seconds (None: any). The thread is given up: it calls `last` when the
                call is over, and ends.
            Exception: `function` raised it.
        """
        try:
            future = asyncio.wrap_future(self.submit(function, *arguments))
            return await by_deadline(future, deadline, self._stopwatch(), anew)
        except (Overdue, asyncio.CancelledError):
            self._give_up(last)
            raise

    def _give_up(self, last: Callable[[], Any] | None) -> None:
        """Ends the thread after its call, which is interrupted where it computes in Python, but not where it waits."""
        self.given_up = True
        stuck.add(self)
        if last is not None:
            self.submit(last)
        self.calls.put(None)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(GivenUp))

    def _serve(self) -> None:
        with suppress(GivenUp):
            while (call := self.calls.get()) is not None:
                call()
                del call  # and what it holds
        alive.discard(self)
        stuck.discard(self)

    def _stopwatch(self) -> Callable[[], float]:
        """Returns the function that says how many seconds the thread has had since now: those in which no other thread
        of user code computed (Python runs one at a time), and no less than its share among those that did."""
        begun, before = time.monotonic(), processor_times(time.monotonic() // TICK)

        def had() -> float:
            passed, times = time.monotonic() - begun, processor_times(time.monotonic() // TICK)
            others = [seconds - before.get(thread, 0.0) for thread, seconds in times.items() if thread is not self]
            computed, most = sum(others), max(others, default=0.0)
            return max(passed - computed, passed / (1 + computed / most) if most > 0 else passed)

        return had


@lru_cache(maxsize=1)
def processor_times(tick: float) -> dict[UserThread, float]:
    """Returns the seconds for which each thread of user code computed, or waited for a core to do so, where the system
    counts them; once in a `tick`, as it takes some time."""
    found = {}
    for thread in [*alive]:
        with suppress(OSError, ValueError):  # it has ended
            ran, waited, _ = Path(f"/proc/self/task/{thread.thread.native_id}/schedstat").read_text().split()
            found[thread] = (int(ran) + int(waited)) / 1e9
    return found


async def in_thread(
    function: Callable[..., Any], *arguments: Any, deadline: float | None = None, anew: Callable[[], bool] = bool
) -> Any:
    """Returns the result of `function(*arguments)`, computed in another thread; as `UserThread.run`."""
    thread = UserThread.take()
    try:
        return await thread.run(function, *arguments, deadline=deadline, anew=anew)
    finally:
        thread.give_back()


def as_failure(error: BaseException) -> Exception:
    """Returns `error`, or an error that names it, where an event loop would take it for its own (SystemExit)."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


async def by_deadline(
    future: asyncio.Future[Any],
    deadline: float | None,
    had: Callable[[], float] | None = None,
    anew: Callable[[], bool] = bool,
) -> Any:
    """Returns the result of `future`, which is cancelled if it is not there after `deadline` seconds (None: any).

    Args:
        had: says how many of the seconds since then count; None: all.
        anew: says whether they are counted anew, as others than the user were at it since it was last asked.

    Raises:
        Overdue: it was not.
        Exception: the future did, with a TimeoutError of its own too.
    """
    left, before = deadline, 0.0
    try:
        while not (await asyncio.wait([future], timeout=left))[0]:
            before = had() if had and anew() else before
            left = deadline - had() + before if had else 0.0
            if left <= 0:
                raise Overdue(f"not done after {deadline:g} seconds")
    finally:
        future.cancel()
    return future.result()


class Blockable(Protocol):
    """An object of the user's with coroutines; `blocks`: they compute or wait without an `await`."""

    name: str
    blocks: bool


owners: WeakKeyDictionary[asyncio.Task[Any], Blockable] = WeakKeyDictionary()


@cache
def users_loop() -> asyncio.AbstractEventLoop:
    return start_loop()[0]


async def in_users_loop(
    owner: Blockable, work: Coroutine[Any, Any, Any], deadline: float, anew: Callable[[], bool] = bool
) -> Any:
    """Returns the result of `work`, a coroutine of `owner`, run in an event loop for such alone; if `owner` blocks, in
    one of its own, in a thread.

    A coroutine that keeps that loop for LONGEST_STEP seconds marks its owner as blocking, and others get a new loop.

    Raises:
        Overdue: it took more than `deadline` seconds, counted anew where `anew`, asked now and then, says so.
        Exception: `work` raised it; what an event loop would take for its own (SystemExit) as an error that names it.
    """
    if owner.blocks:
        return await in_thread(lambda: asyncio.run(contain(work, owner)), deadline=deadline, anew=anew)
    loop, left = users_loop(), deadline
    future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(contain(work, owner), loop))
    try:
        while left > 0:
            answered = Event()
            loop.call_soon_threadsafe(answered.set)
            if (await asyncio.wait([future], timeout=min(left, LONGEST_STEP)))[0]:
                return future.result()
            left = deadline if anew() else left - LONGEST_STEP
            if not answered.is_set():
                leave_loop(loop)
    finally:
        future.cancel()
    raise Overdue(f"not done after {deadline:g} seconds")


async def contain(work: Coroutine[Any, Any, Any], owner: Blockable) -> Any:
    task = asyncio.current_task()
    owners[task] = owner
    try:
        return await work
    except Exception:
        raise
    except BaseException as raised:
        if task.cancelling():
            raise
        raise as_failure(raised) from raised


def leave_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Gives an event loop up to the coroutine that blocks it, whose owner's calls run in threads from now on."""
    owner = owners.get(asyncio.current_task(loop))
    if owner is None:  # it is busy, but with nothing of the user's
        return
    if users_loop() is loop:
        users_loop.cache_clear()
    if not owner.blocks:
        owner.blocks = True
        notice(
            f"{owner.name} keeps its event loop for more than {LONGEST_STEP:g} seconds without an await, and nothing "
            "else goes on there: it runs in threads from now on. Await what waits, or set `blocks = True` in its class."
        )


def forget_threads() -> None:
    """Forgets, in a fork of this process, the threads that it does not have."""
    users_loop.cache_clear()
    for threads in (alive, stuck, idle):
        threads.clear()


os.register_at_fork(after_in_child=forget_threads)
