"""Calls of user code off the caller's thread, each given up at its deadline.

A thread cannot be stopped, so one that hangs is left behind: it is a daemon, and does not keep the process from ending.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Overdue(TimeoutError):
    """A call was not done by its deadline."""


class DaemonThreads:
    """Threads that take one call at a time; there are as many as calls were ever under way at once."""

    def __init__(self) -> None:
        self.idle: list[SimpleQueue[Callable[[], None]]] = []

    def submit(self, call: Callable[[], None]) -> None:
        try:
            calls = self.idle.pop()
        except IndexError:  # atomic, unlike a look before it
            calls = SimpleQueue()
            Thread(target=self._serve, args=(calls,), daemon=True, name="user code").start()
        calls.put(call)

    def _serve(self, calls: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            calls.get()()
            self.idle.append(calls)


threads = DaemonThreads()


async def in_thread(function: Callable[..., Any], *arguments: Any, deadline: float | None = None) -> Any:
    """The result of `function(*arguments)`, computed in another thread while this event loop goes on.

    Raises:
        Overdue: it took more than `deadline` seconds (None: any).
        whatever `function` raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # given up
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def call() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:  # handed on to whoever waits
            error = as_failure(raised)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threads.submit(call)
    return await by_deadline(future, deadline)


def as_failure(error: BaseException) -> Exception:
    """`error`, or, where an event loop would take it for its own (SystemExit, StopIteration), what names it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


async def by_deadline(future: asyncio.Future[Any], deadline: float | None) -> Any:
    """The result of `future`, which is cancelled if it is not there after `deadline` seconds (None: any).

    Raises:
        Overdue: it was not.
        whatever it raised, a TimeoutError of its own included.
    """
    try:
        done, _ = await asyncio.wait([future], timeout=deadline)
    except asyncio.CancelledError:
        future.cancel()
        raise
    if not done:
        future.cancel()
        raise Overdue(f"not done after {deadline:g} seconds")
    return future.result()
