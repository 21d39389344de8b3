"""The user's reward function in processes that can be killed: started when needed, reused, replaced when they end.

A call that is not done by its deadline ends its process, with all that it started. All bookkeeping is done in one event
loop, in a thread of its own; whoever submits waits for a future.
"""

import asyncio
import json
import pickle
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from configs.process import available_cores
from configs.schema import RewardFunctionConfig, ScoringConfig
from data.concurrency import start_loop, stop_loop
from data.types import NotScored
from extras.processes.child import Child, ProcessEnded
from extras.scorers.program import ScorerSpec, is_async, serve

GRACE_SECONDS = 0.5  # for async calls to end themselves at their deadline, so that those beside them go on
COMPUTING = 0.1  # of a core, above which a process computes and does not wait; a busy machine gives it little
QUICK_RATE = 500  # calls a second of one process, above which sending them is what takes the time


class ScorerProcess:
    """A process that calls the function. `seconds`: for a row; None: any. `grace`: that a call may take longer."""

    def __init__(self, spec: ScorerSpec, seconds: float | None, grace: float) -> None:
        self.spec, self.seconds, self.grace = spec, seconds, grace
        self.child = Child(serve, partial(pickle.dumps, spec), output=subprocess.PIPE)
        self.start_seconds: float | None = None  # that a start took; None: it has not started yet

    async def score(self, body: bytes, rows: int) -> Any:
        """Makes one call of `rows` rows with pickled arguments; returns the decoded JSON result, or NotScored."""
        while True:
            await self._start()
            seconds = None if self.seconds is None else self.seconds * rows + self.grace
            try:
                outcome, value = json.loads(await self.child.ask(body, seconds))
            except ProcessEnded as ended:
                if ended.aside:
                    continue
                return NotScored("error", str(ended))
            except ValueError as error:  # the function wrote into the channel
                return NotScored("error", f"its process sent what is no answer: {error}")
            except TimeoutError:
                outcome = "timeout"
            if outcome == "timeout":
                of = f" for each of {rows} responses" if rows > 1 else ""
                return NotScored("timeout", f"it was not done after reward.timeout={self.seconds:g} seconds{of}")
            return value if outcome == "ok" else NotScored("error", one_line(value), value["trace"])

    async def _start(self) -> None:
        began, problem = time.monotonic(), f"{self.spec.path} cannot be loaded in a process of its own"
        try:
            answer = await self.child.start()
        except (TimeoutError, ProcessEnded) as error:
            raise RuntimeError(f"{problem}: {error}") from error
        if answer is None:
            return
        outcome, value = json.loads(answer)
        if outcome == "error":
            error = RuntimeError(f"{problem}: {one_line(value)}. reward.in_process=true calls its functions here.")
            error.add_note(value["trace"])
            raise error
        self.start_seconds = time.monotonic() - began


class Scorers:
    """Calls one function of the user's, in processes.

    A plain function is called by up to `num_workers` of them, one call each, and by no more than there are cores if it
    `computes`, or is seen to. An async one is in one process, with up to `max_concurrent` calls under way.
    """

    def __init__(
        self, function: Callable, entry: RewardFunctionConfig, config: ScoringConfig, computes: bool = False
    ) -> None:
        asynchronous = is_async(function)
        soft = config.timeout if asynchronous else None
        self.spec = ScorerSpec(entry.path, entry.name, entry.reward_kwargs, config.memory_limit_mb, soft)
        self.seconds, self.grace = config.timeout, GRACE_SECONDS if asynchronous else 0.0
        self.most, self.places = (1, config.max_concurrent) if asynchronous else (config.num_workers, 1)
        self.cores, _ = available_cores()
        if computes:
            self.most = min(self.most, self.cores)
        self.processes: list[ScorerProcess] = []
        self.free: asyncio.LifoQueue[ScorerProcess] = asyncio.LifoQueue()
        self.waiting, self.done = 0, 0  # calls
        self.limits = [  # reward.max_rpm calls and reward.max_tpm tokens a minute
            (AsyncTokenBucket(most / 60, max(most / 60, amount)), amount)  # one call at least, or the first would wait
            for most, amount in ((config.max_rpm, 1.0), (config.max_tpm, float(config.estimated_tokens_per_request)))
            if most is not None
        ]
        self.growing: asyncio.Task | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.lock = threading.Lock()

    def __call__(self, calls: list[dict[str, Any]], rows: int) -> Callable[[], list[Any]]:
        """Submits calls of so many rows each; returns a function that waits for the results."""
        return partial(results_of, [self.submit(call, rows) for call in calls])

    def submit(self, arguments: dict[str, Any], rows: int = 1) -> Future:
        """Calls the function with `arguments`, of so many rows; the future has its result, or NotScored."""
        try:
            body = pickle.dumps(arguments)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.spec.path}: an argument of {self.spec.name} cannot be sent to a process ({error}). Take it "
                "out of extra_info, or set reward.in_process=true."
            ) from error
        with self.lock:
            if self.loop is None:
                self.loop, thread = start_loop()
                self.end = weakref.finalize(self, end_all, self.loop, thread, self.processes)  # with this process, too
        return asyncio.run_coroutine_threadsafe(self._score(body, rows), self.loop)

    def close(self) -> None:
        """Ends all processes, with whatever they are doing."""
        if self.loop is not None:
            self.end()

    async def _score(self, body: bytes, rows: int) -> Any:
        for bucket, amount in self.limits:
            await bucket.acquire(amount)
        self.waiting += 1
        try:
            if self.growing is None or self.growing.done():
                self.growing = asyncio.create_task(self._grow())
            process = await self.free.get()
        finally:
            self.waiting -= 1
        try:
            return await process.score(body, rows)
        finally:
            self.done += 1
            self.free.put_nowait(process)

    async def _grow(self) -> None:
        """Adds processes while calls wait: first one, then, when waiting took as long as a start does and the function
        is not quick, as many as wait. So quick functions have one, and slow ones soon have all, or one a core."""
        if not self.processes:
            self._add(1)
        while self.waiting and len(self.processes) < self.most:
            known = [process.start_seconds for process in self.processes if process.start_seconds is not None]
            done, used, seconds = self.done, self._cpu_seconds(), max(known, default=0.05)
            await asyncio.sleep(seconds)
            is_quick = self.done - done > QUICK_RATE * len(known) * seconds
            computes = self._cpu_seconds() - used > COMPUTING * seconds * min(len(known), self.cores)
            most = min(self.most, self.cores) if computes else self.most
            if known and self.waiting and not is_quick and len(self.processes) < most:
                self._add(min(len(self.processes), most - len(self.processes), self.waiting))

    def _cpu_seconds(self) -> float:
        """Returns the seconds that the processes have computed, with what they started that has ended."""
        return sum(process.child.cpu_seconds() for process in self.processes)

    def _add(self, count: int) -> None:
        for _ in range(count):
            process = ScorerProcess(self.spec, self.seconds, self.grace)
            self.processes.append(process)
            for _ in range(self.places):
                self.free.put_nowait(process)


def results_of(futures: list[Future]) -> list[Any]:
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:  # those that wait, if one has failed
            future.cancel()


def end_all(loop: asyncio.AbstractEventLoop, thread: threading.Thread, processes: Iterable[ScorerProcess]) -> None:
    for process in processes:
        process.child.end()
    stop_loop(loop, thread)


def one_line(error: dict[str, Any]) -> str:
    """Returns one line for an exception of a process: its message, and the user's line."""
    return error["message"] + (f" (at {error['line']})" if error["line"] else "")


class AsyncTokenBucket:
    """Grants `rate_limit` tokens a second, of which up to `max_tokens` (None: a second's) pile up; it starts full.

    Who takes more than there is owes the rest, and waits for it: nobody goes before those who asked earlier.
    """

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        self.rate_limit, self.max_tokens = rate_limit, max_tokens or rate_limit
        self.tokens = self.max_tokens
        self.last_update: float | None = None  # of the loop's clock; None: nobody has asked yet

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Waits until so many tokens are granted."""
        now = time.monotonic()
        if self.last_update is not None:
            self.tokens = min(self.max_tokens, self.tokens + (now - self.last_update) * self.rate_limit)
        self.last_update = now
        self.tokens -= num_tokens
        if self.tokens < 0:
            await asyncio.sleep(-self.tokens / self.rate_limit)
