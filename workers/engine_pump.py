"""Serves many clients by one engine: requests join and leave while a single thread steps it."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from data.types import Completion, Request, SamplingParams
from workers.deadlines import beat
from workers.rollout import Rollout

logger = logging.getLogger(__name__)
WAIT_SHARE = 1 / 4  # of a step's time, for which the next waits for new turns: few large steps cost less


class EngineError(RuntimeError):
    """The engine raised; all requests in flight are lost, later ones are tried."""


@dataclass(frozen=True)
class Piece:
    """New tokens of a response; `finish_reason` is that of its completion, or None if it goes on."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str | None
    weight_version: int | list[int] = 0  # of the weights that drew it


@dataclass
class Client:
    """A waiting client of a request: `seen` tokens are in `pieces` already. `episode`: of which it is a turn."""

    request: Request
    episode: Hashable | None = None
    seen: int = 0
    pieces: asyncio.Queue[Piece | Exception] = field(default_factory=asyncio.Queue)


@dataclass
class Step:
    """Results of a step: requests that the engine refused, that it finished, and what others have so far."""

    refused: list[tuple[int, ValueError]]
    finished: list[Completion]
    running: dict[int, tuple[list[int], list[float]]]


class CallingThread(Executor):
    """Runs what others submit in the thread that calls `run_until`, one after the other."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future[Any] = Future()
        self.calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def run_until(self, done: Future) -> Any:
        """Returns the result of `done`; what is submitted meanwhile is run, and what that raises ends the wait."""
        done.add_done_callback(lambda _: self.calls.put(None))
        while (call := self.calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                future.set_result(function())
        return done.result()


class AsyncEngine:
    """Steps `engine` in the one thread of `thread`, within `precision()`, whenever there are requests. For use within
    one event loop, which alone changes its state."""

    def __init__(
        self, engine: Rollout, precision: Callable[[], AbstractContextManager[None]], thread: Executor
    ) -> None:
        self.engine, self.precision, self.thread = engine, precision, thread
        self.numbers = itertools.count()
        self.clients: dict[int, Client] = {}  # by request id
        self.joining: list[Request] = []  # they are added in the next step
        self.leaving: list[int] = []  # requests that are aborted then
        self.ended: list[int] = []  # episodes that are forgotten then
        self.between_turns: set[int] = set()  # episodes whose last turn is answered, and whose next may come soon
        self.all_back = asyncio.Event()  # set while `between_turns` is empty
        self.all_back.set()
        self.pumping: asyncio.Task | None = None

    async def complete(
        self, prompt_ids: list[int], sampling: SamplingParams, seed: int, episode: Hashable, goes_on: bool
    ) -> Completion:
        """Returns the whole response to a prompt, a turn of `episode`; raises as `answer` does. `goes_on`: the prompt
        of its next turn begins with this one and the response, as far as is known."""
        request = Request(next(self.numbers), prompt_ids, sampling, seed, episode=episode if goes_on else None)
        self._is_back(episode)
        async with aclosing(self._pieces(Client(request, episode))) as pieces:
            [done] = [piece async for piece in pieces]
        return Completion(request.id, done.token_ids, done.log_probs, done.finish_reason, done.weight_version)

    async def answer(
        self, prompt_ids: list[int], sampling: SamplingParams, seed: int, piecewise: bool
    ) -> AsyncIterator[Piece]:
        """Yields the response to a prompt, in pieces as its tokens come, or in one; leaving early ends the request.
        Raises ValueError if the engine cannot answer it, EngineError if the engine raised."""
        request = Request(next(self.numbers), prompt_ids, sampling, seed, piecewise)
        async with aclosing(self._pieces(Client(request))) as pieces:
            async for piece in pieces:
                yield piece

    async def _pieces(self, client: Client) -> AsyncIterator[Piece]:
        number = client.request.id
        self.clients[number] = client
        self.joining.append(client.request)
        self._wake()
        try:
            while True:
                piece = await client.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            if self.clients.pop(number, None):  # it is still in the engine, or on its way there
                self.leaving.append(number)
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
            seen = {number: client.seen for number, client in self.clients.items() if client.request.piecewise}
            began = loop.time()
            step = await loop.run_in_executor(self.thread, self._step, joining, leaving, ended, seen)
            self._deliver(step)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.all_back.wait(), WAIT_SHARE * (loop.time() - began))

    def _has_work(self) -> bool:
        return bool(self.joining or self.leaving or self.ended or self.clients)

    async def _take(self) -> tuple[list[Request], list[int], list[int]]:
        """Takes what the next step begins with: requests that join, and that leave, and episodes that are over."""
        taken = self.joining, self.leaving, self.ended
        self.joining, self.leaving, self.ended = [], [], []
        return taken

    def _step(
        self, joining: Sequence[Request], leaving: Sequence[int], ended: Sequence[int], seen: dict[int, int]
    ) -> Step:
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
            for done in finished:
                if client := self.clients.get(done.id):
                    self.engine.check_completion(client.request, done)
            return Step(refused, finished, self.engine.tokens_so_far(seen))

    def _deliver(self, step: Step) -> None:
        """Hands out what a step brought; those who have left meanwhile get nothing."""
        for number, error in step.refused:
            if client := self.clients.pop(number, None):
                client.pieces.put_nowait(error)
        for done in step.finished:
            if client := self.clients.pop(done.id, None):
                if client.episode is not None:
                    self.between_turns.add(client.episode)
                    self.all_back.clear()
                new = slice(client.seen, None)
                drawn = done.token_ids[new], done.log_probs[new]
                client.pieces.put_nowait(Piece(*drawn, done.finish_reason, done.weight_version))
        for number, (token_ids, log_probs) in step.running.items():
            if token_ids and (client := self.clients.get(number)):
                client.seen += len(token_ids)
                client.pieces.put_nowait(Piece(token_ids, log_probs, None))

    def _on_pump_end(self, pumping: asyncio.Task) -> None:
        """Starts again if requests came meanwhile; if the engine raised, tells every client, and has it forget them."""
        self.pumping = None
        if pumping.cancelled():
            return
        if (error := pumping.exception()) is None:
            if self.joining or self.leaving or self.ended:  # they came after the last check
                self._wake()
            return
        logger.error("the engine raised; the requests in flight are lost", exc_info=error)
        lost, self.clients, self.joining = self.clients, {}, []
        self.leaving += lost
        for client in lost.values():
            client.pieces.put_nowait(EngineError(f"the engine raised {type(error).__name__}: {error}"))
