"""Serves many clients by one engine: requests join and leave while a single thread steps it."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from data.types import Completion, Request, SamplingParams
from workers.deadlines import beat
from workers.rollout import Rollout

logger = logging.getLogger(__name__)
WAIT_SHARE = 1 / 4  # of a step's time: so long the next step waits for new turns, as few large steps cost less


class EngineError(RuntimeError):
    """The engine raised: the requests in flight are lost; later ones are tried."""


@dataclass
class Client:
    """A client that waits for the completion of its request, a turn of `episode`."""

    request: Request
    future: asyncio.Future[Completion]
    episode: Hashable | None = None


@dataclass
class Step:
    """Results of a step: requests that the engine refused, and those that it finished."""

    refused: list[tuple[int, ValueError]]
    finished: list[Completion]


class CallingThread(Executor):
    """Runs submitted calls one after the other, in the thread that calls `run_until`."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future[Any] = Future()
        self.calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def run_until(self, awaited: Future) -> Any:
        """Runs submitted calls until `awaited` is done, and returns its result; an error of a call ends the wait."""
        awaited.add_done_callback(lambda _: self.calls.put(None))
        while (call := self.calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                future.set_result(function())
        return awaited.result()


class AsyncEngine:
    """Steps `engine` in the thread of `thread`, within `precision()`, while there are requests. All other methods run
    in one event loop."""

    def __init__(
        self, engine: Rollout, precision: Callable[[], AbstractContextManager[None]], thread: Executor
    ) -> None:
        self.engine, self.precision, self.thread = engine, precision, thread
        self.numbers = itertools.count()
        self.clients: dict[int, Client] = {}  # by request id
        self.joining: list[Request] = []  # added in the next step
        self.leaving: list[int] = []  # ids of requests, aborted in the next step
        self.ended: list[int] = []  # episodes, forgotten in the next step
        self.between_turns: set[int] = set()  # episodes whose last turn is answered; the next may come soon
        self.all_back = asyncio.Event()  # set while `between_turns` is empty
        self.all_back.set()
        self.pumping: asyncio.Task | None = None

    async def complete(
        self, prompt_ids: list[int], sampling: SamplingParams, seed: int, episode: Hashable, goes_on: bool
    ) -> Completion:
        """Returns the response to a prompt, a turn of `episode`. `goes_on`: the next turn's prompt will probably begin
        with this prompt and response.

        Raises:
            ValueError: the engine cannot answer it.
            EngineError: the engine failed.
        """
        request = Request(next(self.numbers), prompt_ids, sampling, seed, episode=episode if goes_on else None)
        self._is_back(episode)
        return await self._serve(request, episode)

    async def _serve(self, request: Request, episode: Hashable | None = None) -> Completion:
        client = Client(request, asyncio.get_running_loop().create_future(), episode)
        self.clients[request.id] = client
        self.joining.append(request)
        self._wake()
        try:
            return await client.future
        finally:
            if self.clients.pop(request.id, None):  # it is still in the engine, or on its way there
                self.leaving.append(request.id)
                self._wake()

    def forget(self, episode: Hashable) -> None:
        """Tells the engine that this episode is over."""
        self.ended.append(episode)
        self._is_back(episode)
        self._wake()

    def _is_back(self, episode: Hashable) -> None:
        self.between_turns.discard(episode)
        if not self.between_turns:
            self.all_back.set()

    def _wake(self) -> None:
        if self.pumping is None:
            self.pumping = asyncio.get_running_loop().create_task(self._pump())
            self.pumping.add_done_callback(self._on_pump_end)

    async def _pump(self) -> None:
        """Steps the engine while there is work; after each step it waits a little for turns that may come."""
        loop = asyncio.get_running_loop()
        while self._has_work():
            joining, leaving, ended = await self._take()
            began = loop.time()
            step = await loop.run_in_executor(self.thread, self._step, joining, leaving, ended)
            self._deliver(step)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.all_back.wait(), WAIT_SHARE * (loop.time() - began))

    def _has_work(self) -> bool:
        return bool(self.joining or self.leaving or self.ended or self.clients)

    async def _take(self) -> tuple[list[Request], list[int], list[int]]:
        """Takes the input of the next step: requests that join, ids of those that leave, and episodes that are over."""
        inputs = self.joining, self.leaving, self.ended
        self.joining, self.leaving, self.ended = [], [], []
        return inputs

    def _step(self, joining: Sequence[Request], leaving: Sequence[int], ended: Sequence[int]) -> Step:
        """Runs one step, in the engine's thread."""
        refused = []
        with self.precision():
            for request in joining:
                try:
                    self.engine.add(request)
                except ValueError as error:
                    refused.append((request.id, error))
            self.engine.abort(leaving)
            self.engine.forget(ended)
            finished = self.engine.step() if self.engine.has_unfinished_requests() else []
            beat()
            for completion in finished:
                if client := self.clients.get(completion.id):
                    self.engine.check_completion(client.request, completion)
            return Step(refused, finished)

    def _deliver(self, step: Step) -> None:
        """Answers the clients of a step's results; those that have left get nothing."""
        for number, error in step.refused:
            if client := self._pop_waiting(number):
                client.future.set_exception(error)
        for completion in step.finished:
            if client := self._pop_waiting(completion.id):
                if client.episode is not None:
                    self.between_turns.add(client.episode)
                    self.all_back.clear()
                client.future.set_result(completion)

    def _pop_waiting(self, number: int) -> Client | None:
        client = self.clients.pop(number, None)
        return None if client is None or client.future.done() else client  # it may just have been cancelled

    def _on_pump_end(self, pumping: asyncio.Task) -> None:
        """Restarts if requests came meanwhile; if the engine raised, fails all clients and aborts their requests."""
        self.pumping = None
        if pumping.cancelled():
            return
        if (error := pumping.exception()) is None:
            if self._has_work():  # a request came after the last check
                self._wake()
            return
        logger.error("the engine raised; the requests in flight are lost", exc_info=error)
        self.leaving += self.clients
        self.joining = []
        for client in filter(None, map(self._pop_waiting, [*self.clients])):
            client.future.set_exception(EngineError(f"the engine raised {type(error).__name__}: {error}"))
