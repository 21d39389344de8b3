"""Runs event loops in threads, beside the caller's work."""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import cache
from threading import Lock, Thread, current_thread
from typing import Any

STOP_SECONDS = 1  # in which coroutines clean up when one has failed, or at an interrupt


class Connection(asyncio.selector_events._SelectorSocketTransport):
    """A connection that is closed for good where it is collected.

    A client that nobody closes is collected together with its connections, and openai's closes them once more after
    that: another connection has their file descriptors by then, and would lose its reader, and wait for ever.
    """

    def __del__(self, *arguments: Any) -> None:
        super().__del__(*arguments)
        self._closing, self._conn_lost = True, self._conn_lost + 1


class EventLoop(asyncio.SelectorEventLoop):
    """An event loop for the user's code."""

    def _make_socket_transport(self, *arguments: Any, **settings: Any) -> Connection:
        return Connection(self, *arguments, **settings)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs `coroutine` in an event loop of its own, and returns its result, as asyncio.run does."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(coroutine)


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    return start_loop()[0]


starting = Lock()  # two threads that begin at once must share one loop: what it holds belongs to it
os.register_at_fork(
    before=starting.acquire,
    after_in_parent=starting.release,
    after_in_child=lambda: (background_loop.cache_clear(), starting.release()),  # threads do not survive a fork
)


def run_in_background(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of `coroutine`, run in an event loop that this process keeps in a thread for such callers."""
    with starting:
        loop = background_loop()
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def run_all(awaitables: Sequence[Awaitable], max_concurrent: int, timeout: float | None, late: Any = None) -> list[Any]:
    """Returns results in order: at most `max_concurrent` at once, each for at most `timeout` seconds (None: any).

    They run in an event loop in a thread of its own: a notebook already runs one in this thread. The first failure
    ends the wait, and so does Ctrl-C, at once; what is still under way is cancelled. With `late`, one that took longer
    has that for a result, and so have those that one which blocks kept from being done.

    Raises:
        TimeoutError: one took longer, and there is no `late`; names its place and the key.
    """
    slots, results = asyncio.Semaphore(max_concurrent), [late] * len(awaitables)

    async def result_of(row: int, awaitable: Awaitable) -> None:
        try:
            async with slots, asyncio.timeout(timeout) as deadline:
                results[row] = await awaitable
        except TimeoutError as error:
            if not deadline.expired():  # the user's code raised it
                raise
            if late is not None:
                return
            call = f"the call for response {row}" if len(awaitables) > 1 else "the call"
            raise TimeoutError(
                f"{call} was not done after reward.timeout={timeout:g} seconds: raise it (null: "
                "no limit), or have the function give up earlier and return a score"
            ) from error
        finally:
            if inspect.iscoroutine(awaitable):
                awaitable.close()  # else Python warns of one that never began

    async def gather() -> None:
        await asyncio.gather(*(result_of(row, awaitable) for row, awaitable in enumerate(awaitables)))

    longest = None if late is None or timeout is None else timeout * -(-len(results) // max_concurrent) + STOP_SECONDS
    with loop_in_thread() as loop:
        gathering = asyncio.run_coroutine_threadsafe(gather(), loop)
        if gathering in wait([gathering], longest).done:
            gathering.result()  # raises what they raised
        return results.copy()  # one that blocks may write more


@contextmanager
def loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Runs an event loop in a thread of its own until the end of the block, and then cancels what it still does.

    It gets STOP_SECONDS for that. A task that blocks instead of awaiting, and so cannot be cancelled, is left behind:
    it does not keep the process from ending.
    """
    loop, thread = start_loop()
    try:
        yield loop
    finally:
        stop_loop(loop, thread)


def start_loop() -> tuple[asyncio.AbstractEventLoop, Thread]:
    """Starts an event loop in a thread of its own."""
    loop = EventLoop()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # leaving it cancels tasks and closes the loop
            runner.get_loop().run_forever()

    thread = Thread(target=serve, daemon=True)
    thread.start()
    return loop, thread


def stop_loop(loop: asyncio.AbstractEventLoop, thread: Thread) -> None:
    """Ends what `start_loop` started, and cancels what it still does."""
    loop.call_soon_threadsafe(loop.stop)
    if thread is not current_thread():
        thread.join(STOP_SECONDS)
