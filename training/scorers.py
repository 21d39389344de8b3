"""The user's reward function in processes that can be killed: started when needed, reused, replaced when they end.

A call that is not done by its deadline ends its process, with all that it started and whatever it is stuck in; so it
needs no signal, and works in any thread of any process. All bookkeeping is done in one event loop, in a thread of its
own; whoever submits waits for a future.
"""

import asyncio
import itertools
import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from configs.schema import ScoringConfig
from data.children import kill_group, start_child
from training.async_reward import start_loop, stop_loop
from training.rate_limit import RateLimits
from training.scorer_process import HEAD, READY, Errand, frame

START_SECONDS = 300.0  # for a process to load the user's file
GRACE_SECONDS = 0.5  # for async calls to end themselves at their deadline, so that those beside them go on
MOST_ANSWER = 1 << 26  # bytes of an answer
POLL_SECONDS = 0.005  # between two looks whether a killed process is gone
QUICK_RATE = 500  # calls a second of one process, above which sending them is what takes the time
MOST_SHOWN = 2000  # bytes that a call may print; more is read and dropped


@dataclass(frozen=True)
class NotScored:
    """A manager's result for a row that could not be scored: `outcome` is timeout or error, `said` why."""

    outcome: str
    said: str
    trace: str = ""


class Ended(Exception):
    """A process ended while it was asked; `aside`: because of another call."""

    def __init__(self, text: str, aside: bool) -> None:
        super().__init__(text)
        self.aside = aside


class Life:
    """One process, from its start to its end."""

    def __init__(self, errand: Errand) -> None:
        self.answers: dict[int, asyncio.Future] = {READY: asyncio.get_running_loop().create_future()}
        self.numbers, self.may_show, self.killed = itertools.count(), MOST_SHOWN, False
        self.socket, theirs = socket.socketpair()
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with theirs:
            self.process = start_child(
                "training.scorer_process", "serve", theirs.fileno(), start_new_session=True, **pipes
            )
        self.tasks = [asyncio.create_task(self._listen(pickle.dumps(errand))), asyncio.create_task(self._show())]

    async def ask(self, body: bytes) -> list[Any]:
        """The answer, [outcome, value], to pickled arguments. Raises Ended."""
        number = next(self.numbers)
        self.answers[number] = asyncio.get_running_loop().create_future()
        self.may_show = MOST_SHOWN
        self.writer.write(frame(number, body))
        try:
            return await self.answers[number]
        finally:
            self.answers.pop(number, None)

    async def ready(self) -> list[Any]:
        """What the process says once it has loaded the function, or failed to. Raises Ended."""
        return await self.answers[READY]

    def is_over(self) -> bool:
        return all(task.done() for task in self.tasks)

    def kill(self) -> None:
        self.killed = True
        kill_group(self.process)

    async def _listen(self, errand: bytes) -> None:
        """Hands out the answers until there are no more, and then ends the process and all calls."""
        reader, self.writer = await asyncio.open_connection(sock=self.socket)
        try:
            self.writer.write(frame(READY, errand))
            with suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):  # the last: it sent garbage
                while True:
                    number, size = HEAD.unpack(await reader.readexactly(HEAD.size))
                    if size > MOST_ANSWER:
                        break
                    answer = json.loads(await reader.readexactly(size))
                    if number in self.answers and not self.answers[number].done():
                        self.answers[number].set_result(answer)
        finally:
            self.writer.close()
            kill_group(self.process)
        while (code := self.process.poll()) is None:
            await asyncio.sleep(POLL_SECONDS)
        ended = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        for future in self.answers.values():
            if not future.done():
                future.set_exception(Ended(f"its process ended {ended}", self.killed))

    async def _show(self) -> None:
        """Passes on what the process prints, as far as may be, and reads it all: nobody waits for a full pipe."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self.process.stdout)
        try:
            while piece := await reader.read(1 << 16):
                shown, self.may_show = piece[: self.may_show], max(0, self.may_show - len(piece))
                if shown:
                    sys.stdout.write(shown.decode("utf-8", "replace"))
        finally:
            pipe.close()


class ScorerProcess:
    """A process that is started when it is first asked, and anew after it has ended.

    `seconds`: for a row; None: any. `grace`: that a call may take longer.
    """

    def __init__(self, errand: Errand, seconds: float | None, grace: float) -> None:
        self.errand, self.seconds, self.grace = errand, seconds, grace
        self.lives: list[Life] = []  # the last, and those before it that have not quite ended: nobody else holds them
        self.starting = asyncio.Lock()
        self.start_seconds: float | None = None  # that a start took; None: it has not started yet

    async def score(self, body: bytes, rows: int) -> Any:
        """What the function returns for pickled arguments of so many rows, as JSON has it, or NotScored.

        Raises:
            RuntimeError: the function cannot be loaded.
        """
        while True:
            life = await self._started()
            seconds = None if self.seconds is None else self.seconds * rows
            try:
                async with asyncio.timeout(None if seconds is None else seconds + self.grace):
                    outcome, value = await life.ask(body)
            except Ended as ended:
                if ended.aside:
                    continue
                return NotScored("error", str(ended))
            except TimeoutError:
                life.kill()
                outcome = "timeout"
            except asyncio.CancelledError:
                life.kill()  # it is busy with what nobody waits for
                raise
            if outcome == "timeout":
                of = f" for each of {rows} responses" if rows > 1 else ""
                return NotScored("timeout", f"it was not done after reward.timeout={self.seconds:g} seconds{of}")
            return value if outcome == "ok" else NotScored("error", located(value), value["trace"])

    async def _started(self) -> Life:
        async with self.starting:
            if self.lives and not self.lives[-1].killed and not self.lives[-1].is_over():
                return self.lives[-1]
            began, life = time.monotonic(), Life(self.errand)
            self.lives = [*(old for old in self.lives if not old.is_over()), life]
            try:
                async with asyncio.timeout(START_SECONDS):
                    outcome, value = await life.ready()
            except (TimeoutError, Ended) as error:
                life.kill()
                raise RuntimeError(f"{self.errand.path} cannot be loaded in a process of its own: {error}") from error
            if outcome == "error":
                error = RuntimeError(
                    f"{self.errand.path} cannot be loaded in a process of its own, as it is in this one: "
                    f"{located(value)}. reward.in_process=true calls its functions here."
                )
                error.add_note(value["trace"])
                raise error
            self.start_seconds = time.monotonic() - began
            return life

    def close(self) -> None:
        """Ends it, and waits until it is gone."""
        for life in self.lives:
            life.kill()
            life.process.wait()


class Scorers:
    """Processes that call one function of the user's.

    A plain function is called by up to `num_workers` of them, one call each; another is started when calls wait for
    longer than a start takes. An async one is in one process, with up to `max_concurrent` calls under way.
    """

    def __init__(self, path: str, name: str, reward_kwargs: dict, asynchronous: bool, config: ScoringConfig) -> None:
        soft = config.timeout if asynchronous else None
        self.errand = Errand(path, name, reward_kwargs, config.memory_limit_mb, soft)
        self.seconds, self.grace = config.timeout, GRACE_SECONDS if asynchronous else 0.0
        self.most, self.places = (1, config.max_concurrent) if asynchronous else (config.num_workers, 1)
        self.processes: list[ScorerProcess] = []
        self.free: asyncio.LifoQueue[ScorerProcess] = asyncio.LifoQueue()
        self.waiting, self.done = 0, 0  # calls
        self.limits = RateLimits(config)
        self.growing: asyncio.Task | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.lock = threading.Lock()

    def submit(self, arguments: dict[str, Any], rows: int = 1) -> Future:
        """Calls the function with `arguments`, of so many rows; the future has what it returned, or NotScored.

        Raises:
            ValueError: an argument cannot be sent to a process.
        """
        try:
            body = pickle.dumps(arguments)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.errand.path}: {self.errand.name} is called in a process of its own, and an argument cannot be "
                f"sent there ({error}). Take it out of extra_info, or set reward.in_process=true."
            ) from error
        with self.lock:
            if self.loop is None:
                self._open()
        return asyncio.run_coroutine_threadsafe(self._score(body, rows), self.loop)

    def close(self) -> None:
        """Ends all processes, with whatever they are doing."""
        if self.loop is not None:
            self.end()

    def _open(self) -> None:
        self.loop, thread = start_loop()
        self.end = weakref.finalize(self, end_all, self.loop, thread, self.processes)  # when this process ends, too

    async def _score(self, body: bytes, rows: int) -> Any:
        await self.limits.acquire()
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
        """Adds processes while calls wait, as many as there are: first one, then when waiting took as long as a start
        does and the function is not quick. So quick functions have one, and slow ones soon have all."""
        if not self.processes:
            self._add(1)
        while self.waiting and len(self.processes) < self.most:
            known = [process.start_seconds for process in self.processes if process.start_seconds is not None]
            done, seconds = self.done, max(known, default=0.05)
            await asyncio.sleep(seconds)
            is_quick = self.done - done > QUICK_RATE * len(known) * seconds
            if known and self.waiting and not is_quick:
                self._add(min(len(self.processes), self.most - len(self.processes), self.waiting))

    def _add(self, count: int) -> None:
        for _ in range(count):
            process = ScorerProcess(self.errand, self.seconds, self.grace)
            self.processes.append(process)
            for _ in range(self.places):
                self.free.put_nowait(process)


def end_all(loop: asyncio.AbstractEventLoop, thread: threading.Thread, processes: Iterable[ScorerProcess]) -> None:
    for process in processes:
        process.close()
    stop_loop(loop, thread)


def located(told: dict[str, Any]) -> str:
    """One line of an exception in a process: what it said, and the user's line."""
    return told["said"] + (f" (at {told['place']})" if told["place"] else "")
