"""Runs the user's code of episodes by deadlines, in threads of its own.

A call that hangs is given up: its thread cannot be killed, only counted. Processes can be: env.processes.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

MOST_STUCK = 16  # threads of calls that were given up and are not over
LOOK_SECONDS = 0.05  # between two looks at a loop (extras/tools/shared_loop.py); of a deadline, so few count as none
stuck: set["UserThread"] = set()  # the threads of such calls


class Overdue(TimeoutError):
    """A call was not done by its deadline."""


class UserThread:
    """Runs calls one after the other in a thread of its own, as some objects belong to the thread that made them.

    It is a daemon, unlike the threads of an executor: a call that hangs does not keep the process from ending.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.given_up = False
        Thread(target=self._serve, daemon=True, name="user code").start()

    async def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        deadline: float | None = None,
        cleanup: Callable[[], Any] | None = None,
        extends: Callable[[], bool] = bool,
    ) -> Any:
        """Returns the result of `function(*arguments)`, while this event loop continues.

        Raises:
            Overdue: it took more than `deadline` seconds. The thread is given up: it ends after the call and `cleanup`.
            Exception: `function` raised it.
        """
        try:
            return await by_deadline(asyncio.wrap_future(self._submit(function, *arguments)), deadline, extends)
        except (Overdue, asyncio.CancelledError):
            self.given_up = True
            stuck.add(self)
            if cleanup is not None:
                self._submit(cleanup)
            self.end()
            raise

    def end(self) -> None:
        """Ends the thread after the calls that were submitted."""
        self.calls.put(None)

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.put((future, partial(function, *arguments)))
        return future

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    hand_over, value = future.set_result, function()
                except BaseException as raised:  # it is raised where the result is awaited
                    hand_over, value = future.set_exception, as_failure(raised)
                hand_over(value)
            del call, future, function  # frees what they hold
        stuck.discard(self)


async def in_thread(
    function: Callable[..., Any], *arguments: Any, deadline: float | None = None, extends: Callable[[], bool] = bool
) -> Any:
    """Returns the result of `function(*arguments)`, computed in another thread; as `UserThread.run`."""
    thread = UserThread()
    try:
        return await thread.run(function, *arguments, deadline=deadline, extends=extends)
    finally:
        thread.end()


async def by_deadline(
    future: asyncio.Future[Any], deadline: float | None, extends: Callable[[], bool] = bool,
    lost: Callable[[], float] = float,
) -> Any:  # fmt: skip
    """Returns the result of `future`, which is cancelled if it is not there after `deadline` seconds (None: any).

    The deadline begins anew where `extends`, asked when it is over, says that others than the user were at work; the
    seconds, so far, that were `lost` to another's code do not count.

    Raises:
        Overdue: it was not there.
        Exception: the future did, with a TimeoutError of its own too.
    """
    remaining, lost_before = deadline, 0.0
    try:
        while not (await asyncio.wait([future], timeout=remaining))[0]:
            lost_now = lost()
            remaining, lost_before = lost_now - lost_before, lost_now
            if extends():
                remaining = deadline
            elif remaining < LOOK_SECONDS:
                raise Overdue(f"not done after {deadline:g} seconds")
    finally:
        future.cancel()
    return future.result()


def as_failure(error: BaseException) -> Exception:
    """Returns `error`, or an error that names it, where an event loop would take it for its own (SystemExit)."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
