"""Hands out answers piece by piece, as the engine draws their tokens."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.types import Completion, Request, SamplingParams
from workers.engine_pump import AsyncEngine, Step


@dataclass(frozen=True)
class Piece:
    """New tokens of a response; `finish_reason` is that of its completion, or None if it goes on."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str | None


@dataclass
class Stream:
    """Tokens of a request that its client reads as they come: `seen` of them are in `pieces` already."""

    seen: int = 0
    pieces: asyncio.Queue[Piece | asyncio.Task[Completion]] = field(default_factory=asyncio.Queue)


@dataclass
class StreamingStep(Step):
    """Results of a step, and what the requests that are read piece by piece have beyond what was seen."""

    running: dict[int, tuple[list[int], list[float]]]


class StreamingEngine(AsyncEngine):
    """Steps an engine, and hands out the tokens of some requests while they run."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.streams: dict[int, Stream] = {}  # by request id

    async def answer(
        self, prompt_ids: list[int], sampling: SamplingParams, seed: int, piecewise: bool
    ) -> AsyncIterator[Piece]:
        """Yields the response to a prompt, in pieces as its tokens come, or in one; leaving early ends the request.
        Raises as `complete` does."""
        request, stream = Request(next(self.numbers), prompt_ids, sampling, seed, piecewise), Stream()
        if piecewise:
            self.streams[request.id] = stream
        working = asyncio.create_task(self._serve(request))
        working.add_done_callback(stream.pieces.put_nowait)
        try:
            while isinstance(piece := await stream.pieces.get(), Piece):
                yield piece
            done = working.result()
            yield Piece(done.token_ids[stream.seen :], done.log_probs[stream.seen :], done.finish_reason)
        finally:
            self.streams.pop(request.id, None)
            working.cancel()

    def _step(self, joining: Sequence[Request], leaving: Sequence[int], ended: Sequence[int]) -> Step:
        step = super()._step(joining, leaving, ended)
        seen = {number: stream.seen for number, stream in self.streams.copy().items()}
        return StreamingStep(step.refused, step.finished, self.engine.tokens_so_far(seen))

    def _deliver(self, step: StreamingStep) -> None:
        super()._deliver(step)
        for number, (token_ids, log_probs) in step.running.items():
            if token_ids and (stream := self.streams.get(number)):
                stream.seen += len(token_ids)
                stream.pieces.put_nowait(Piece(token_ids, log_probs, None))
