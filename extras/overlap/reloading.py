"""Changes the weights of an engine under requests in flight: these are aborted between two steps, and continued by the
new weights from their prompts and tokens so far. So the log-prob of each token is that of the weights that it is marked
with; where weights change under the keys and values, as elsewhere, no policy at all has drawn the tokens that follow.

What a step begins with is written down: requests that join, and weights. By that record a run can be played again,
whatever the clock does.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.seeding import derive_seed
from data.types import Completion, Request
from workers.engine_pump import AsyncEngine, Step

LOOK_SECONDS = 0.002  # between two looks whether what a replayed step begins with has come


class ReloadingEngine(AsyncEngine):
    """Serves requests by weights that change meanwhile.

    Args:
        record: a file that gets a line for each step that something joins: steps before it, seeds of requests, episodes
            that are over, versions of weights.
        replay: such a file, by which the steps of this engine go.

    Attributes:
        in_engine: requests in flight, by id, as they came.
        drawn: by request, what earlier weights have drawn of its answer: (token ids, log-probs, version) of each.
    """

    def __init__(self, *args: Any, record: Path, replay: Path | None = None) -> None:
        super().__init__(*args)
        self.record = record.open("w", buffering=1)
        self.plan = [json.loads(line) for line in replay.read_text().splitlines()][::-1] if replay else []
        self.steps = 0
        self.in_engine: dict[int, Request] = {}
        self.drawn: dict[int, list[tuple[list[int], list[float], int]]] = {}
        self.reloads: list[tuple[int, Callable[[], Any], Future]] = []
        self.loading: list[tuple[int, Callable[[], Any], Future]] = []  # in the step that comes

    async def reload(self, version: int, load: Callable[[], Any], done: Future) -> None:
        """Has `load` change the weights before the next step; `done` gets what it returns."""
        self.reloads.append((version, load, done))
        self._wake()

    def _has_work(self) -> bool:
        return super()._has_work() or bool(self.reloads)

    async def _take(self) -> tuple[list[Request], list[int], list[int]]:
        if not self.plan:
            self.loading, self.reloads = self.reloads, []
            return await super()._take()
        (leaving, self.leaving), planned = (self.leaving, []), {"joining": [], "ended": [], "weights": []}
        if self.plan[-1]["step"] == self.steps:
            planned = self.plan.pop()
        joining = [await self._come("joining", lambda request: request.seed, seed) for seed in planned["joining"]]
        ended = [await self._come("ended", lambda episode: episode, episode) for episode in planned["ended"]]
        self.loading = [await self._come("reloads", lambda each: each[0], version) for version in planned["weights"]]
        return joining, leaving, ended

    async def _come(self, queue: str, key_of: Callable[[Any], Any], key: Any) -> Any:
        """Takes that with this key out of a queue, once it is there."""
        while True:
            for place, each in enumerate(vars(self)[queue]):
                if key_of(each) == key:
                    return vars(self)[queue].pop(place)
            await asyncio.sleep(LOOK_SECONDS)

    def _step(self, joining: list[Request], leaving: list[int], ended: list[int], seen: dict[int, int]) -> Step:
        loading, self.loading = self.loading, []
        if joining or ended or loading:
            seeds, versions = [request.seed for request in joining], [version for version, *_ in loading]
            entry = {"step": self.steps, "joining": seeds, "ended": ended, "weights": versions}
            self.record.write(json.dumps(entry) + "\n")
        for _, load, done in loading:
            self._reload(load, done)
        for number in leaving:
            self.in_engine.pop(number, None)
        self.in_engine |= {request.id: request for request in joining}
        step = super()._step([replace(request, piecewise=True) for request in joining], leaving, ended, seen)
        self.steps += bool(self.in_engine)
        for number, _ in step.refused:
            self.in_engine.pop(number)
        step.finished = [self._whole(done) for done in step.finished]
        return step

    def _reload(self, load: Callable[[], Any], done: Future) -> None:
        """Changes the weights; what is under way begins anew after the tokens so far."""
        engine, version = self.engine, self.engine.weight_version
        so_far = engine.tokens_so_far(dict.fromkeys(self.in_engine, 0))
        engine.abort(self.in_engine)
        engine.forget({request.episode for request in self.in_engine.values()} | self.between_turns)
        done.set_result(load())
        for number, request in self.in_engine.items():
            if number in so_far and so_far[number][0]:
                self.drawn.setdefault(number, []).append((*so_far[number], version))
            engine.add(self._rest(request))

    def _rest(self, request: Request) -> Request:
        """Returns the request for what is not drawn yet, by draws of its own."""
        parts = self.drawn.get(request.id, [])
        so_far = [token for ids, *_ in parts for token in ids]
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(so_far))
        seed = derive_seed(request.seed, "segment", len(parts)) if parts else request.seed
        prompt = [*request.prompt_ids, *so_far]
        return replace(request, prompt_ids=prompt, sampling=sampling, seed=seed, piecewise=True)

    def _whole(self, done: Completion) -> Completion:
        """Joins the end of an answer to what earlier weights have drawn."""
        self.in_engine.pop(done.id, None)
        parts = [*self.drawn.pop(done.id, []), (done.token_ids, done.log_probs, done.weight_version)]
        token_ids, log_probs = ([value for part in parts for value in part[place]] for place in (0, 1))
        versions = [version for ids, _, version in parts for _ in ids]
        return replace(done, token_ids=token_ids, log_probs=log_probs, weight_version=versions)
