"""Base of engines that answer each request by a coroutine: a server's client, SGLang."""

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from data.types import Completion, Request
from workers.rollout import Rollout, check_request

STEP_SECONDS = 0.05  # max wait per step, so that new requests can join


class AsyncRollout(Rollout):
    """Steps over coroutines: `answer` gives the completion of a request, and `run` runs the event loop.

    The loop runs while somebody is in `run`, and at no other time; the engine itself goes on meanwhile.

    Attributes:
        counts_filters: whether its log-probs are those after top-k, top-p and min-p, and not after temperature alone.
    """

    counts_filters: bool = True

    @abstractmethod
    async def answer(self, request: Request) -> Completion:
        """Returns the completion of `request`."""

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result of `work`; all other tasks go on while it is waited for."""

    def add(self, request: Request) -> None:
        check_request(request, self.vocab_size, self.longest, "the engine's max_model_len")
        sampling = request.sampling
        filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        if sampling.do_sample and filtered and not self.counts_filters:
            filters = f"top_k={sampling.top_k}, top_p={sampling.top_p} and min_p={sampling.min_p}"
            raise ValueError(
                f"request {request.id} asks for {filters}, which the engine's log-probs leave out: set -1, 1 and 0."
            )
        super().add(request)

    def step(self) -> list[Completion]:
        """Sends what waits, and is back at once; or, if nothing waits, when answers have come, or none for a while."""
        return self.run(self._step()) if self.has_unfinished_requests() else []

    async def _step(self) -> list[Completion]:
        if self.waiting:
            for request in self.waiting.values():
                self.running[request.id] = asyncio.create_task(self.answer(request))
            self.waiting.clear()
            await asyncio.sleep(0)
        else:
            await asyncio.wait(self.running.values(), timeout=STEP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        done = [request_id for request_id, task in self.running.items() if task.done()]
        return [self.running.pop(request_id).result() for request_id in done]

    def _abort_running(self, ids: Sequence[int]) -> None:
        self.run(self.drop({request_id: self.running.pop(request_id) for request_id in ids}))

    async def drop(self, tasks: dict[int, asyncio.Task[Completion]]) -> None:
        """Ends `tasks`, by request id; whatever has become of them is of no interest."""
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
