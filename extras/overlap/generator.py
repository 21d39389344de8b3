"""Answers the calls of a driver that goes on meanwhile, in threads of a worker, by weights that change under them.

What the steps of an engine begin with is written down: requests that join, and weights. By that record a run can be
played again, whatever the clock does.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from data.concurrency import start_loop
from data.padding import PromptIds, collate, media_of
from data.protocol import DataProto
from data.seeding import derive_seed
from data.types import Completion, Request, SamplingParams
from extras.overlap.record import ENGINE_STEPS, REMEDY, Record, last_step, read_lives
from workers.agents.episode import Policy
from workers.collectives import rank
from workers.engine_pump import AsyncEngine, EngineError, Step
from workers.model_worker import ModelWorker
from workers.rollout import check_completions, sample_of

TAKE_SECONDS = 0.02  # for which a call that asks for rows waits for them
LOOK_SECONDS = 0.002  # between two looks whether what a replayed step begins with has come


class ReloadingEngine(AsyncEngine):
    """Serves requests by weights that change meanwhile.

    Requests in flight are aborted between two steps, and continued by the new weights from their prompts and tokens so
    far. So the log-prob of each token is that of the weights that it is marked with; where weights change under the
    keys and values, as elsewhere, no policy at all has drawn the tokens that follow.

    Args:
        record: gets an entry for each step that something joins: steps before it, seeds of requests, episodes that are
            over, versions of weights.
        plan: such entries, by which the steps of this engine go.

    Attributes:
        awaited: the version of the weights for which the plan has the engine wait; 0: none.
        has_failed: whether the engine has raised.
        in_engine: requests in flight, by id, as they came.
        drawn: by request, what earlier weights have drawn of its answer: (token ids, log-probs, version) of each.
    """

    def __init__(self, *args: Any, record: Record | None = None, plan: Sequence[dict] = ()) -> None:
        super().__init__(*args)
        self.record, self.plan = record, [*reversed(plan)]
        self.steps, self.awaited, self.has_failed = 0, 0, False
        self.in_engine: dict[int, Request] = {}
        self.drawn: dict[int, list[tuple[list[int], list[float], int]]] = {}
        self.reloads: list[tuple[int, Callable[[], Any], Future]] = []
        self.loading: list[tuple[int, Callable[[], Any], Future]] = []  # in the step that comes

    async def reload(self, version: int, load: Callable[[], Any], done: Future) -> None:
        """Has `load` change the weights before the next step; `done` gets what it returns."""
        self.reloads.append((version, load, done))
        self._wake()

    def expects(self, version: int) -> bool:
        """Says whether weights called `version` come next: always, unless a plan has something else before them."""
        if not self.plan or self.has_failed or self.awaited == version:
            return True
        planned = self.plan[-1]
        return self.pumping is None and not planned["joining"] and not planned["ended"]

    async def answer_once(self, request: Request, episode: str) -> Completion:
        """Answers a request as `complete` does, after which no step waits for a further turn of its episode."""
        done = await self.complete(request.prompt_ids, request.sampling, request.seed, episode, False)
        self._is_back(episode)
        return replace(done, id=request.id)

    def _has_work(self) -> bool:
        return super()._has_work() or bool(self.reloads)

    async def _take(self) -> tuple[list[Request], list[int], list[int]]:
        if not self.plan:
            self.loading, self.reloads = self.reloads, []
            return await super()._take()
        (leaving, self.leaving), planned = (self.leaving, []), {"joining": [], "ended": [], "weights": []}
        if is_next := self.plan[-1]["step"] == self.steps:
            planned = self.plan[-1]
        elif not self.in_engine:  # so it gets no further
            raise EngineError(f"trainer.replay: the engine has nothing to do after step {self.steps} of it. {REMEDY}")
        joining = [await self._come("joining", lambda request: request.seed, seed) for seed in planned["joining"]]
        ended = [await self._come("ended", lambda episode: episode, episode) for episode in planned["ended"]]
        for self.awaited in planned["weights"]:
            self.loading.append(await self._come("reloads", lambda each: each[0], self.awaited))
        self.awaited = 0
        if is_next:
            self.plan.pop()
        return joining, leaving, ended

    async def _come(self, queue: str, key_of: Callable[[Any], Any], key: Any) -> Any:
        """Takes that with this key out of a queue, once it is there."""
        while True:
            for index, each in enumerate(vars(self)[queue]):
                if key_of(each) == key:
                    return vars(self)[queue].pop(index)
            await asyncio.sleep(LOOK_SECONDS)

    def _step(self, joining: list[Request], leaving: list[int], ended: list[int]) -> Step:
        if self.record and (joining or ended or self.loading):
            seeds, versions = [request.seed for request in joining], [version for version, *_ in self.loading]
            self.record.write({"step": self.steps, "joining": seeds, "ended": ended, "weights": versions})
        while self.loading:
            self._reload(*self.loading.pop(0)[1:])
        for number in leaving:
            self.in_engine.pop(number, None)
        self.in_engine |= {request.id: request for request in joining}
        step = super()._step([replace(request, piecewise=True) for request in joining], leaving, ended)
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
        try:
            done.set_result(load())
        except BaseException as error:  # raised here, and where the load is waited for
            done.set_exception(error)
            raise
        for number, request in self.in_engine.items():
            if number in so_far and so_far[number][0]:
                self.drawn.setdefault(number, []).append((*so_far[number], version))
            engine.add(self._rest(request))

    def _on_pump_end(self, pumping: asyncio.Task) -> None:
        """Ends every wait for a change of weights, too, if the engine raised."""
        if pumping.cancelled() or pumping.exception():
            self.has_failed = True
            for version, _, done in (*self.loading, *self.reloads):
                done.set_exception(EngineError(f"the engine ended before it took the weights of step {version}"))
            self.loading, self.reloads = [], []
        super()._on_pump_end(pumping)

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
        token_ids, log_probs = ([value for part in parts for value in part[index]] for index in (0, 1))
        versions = [version for ids, _, version in parts for _ in ids]
        return replace(done, token_ids=token_ids, log_probs=log_probs, weight_version=versions)


class Generator:
    """Generates beside what else this worker is asked for.

    Attributes:
        calls: the rows that answer each call, and with what the names of its episodes begin.
        record, plan: of the engine; without `start`, as in a dry run, there are none.
    """

    record: Record | None = None
    plan: Sequence[dict] = ()

    def __init__(self, worker: ModelWorker) -> None:
        self.worker, self.config = worker, worker.config
        self.calls: dict[int, tuple[Future, str]] = {}
        self.contexts = ExitStack()  # in which the engine computes, between two changes of weights
        self.is_open = False

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        return start_loop()[0]

    @cached_property
    def pump(self) -> ReloadingEngine:
        """Starts to serve, in one thread."""
        self.rollout, thread = self.worker.roles["rollout"], ThreadPoolExecutor(1)
        return ReloadingEngine(self.rollout.engine, self.precision, thread, record=self.record, plan=self.plan)

    def start(self, step: int) -> set[int]:
        """Begins the record of a training that goes on after `step`, before all else; returns the steps after which the
        run that is played again went on, and raises ConfigError if `step` is none of them."""
        trainer, name = self.config.trainer, ENGINE_STEPS.format(rank())
        lives = read_lives(Path(trainer.replay) / name) if trainer.replay else {step: []}
        if step not in lives:
            raise ConfigError(
                f"trainer.replay={trainer.replay}: that run did not go on after step {step}, as this one does: set "
                "trainer.resume_mode=disable."
            )
        self.plan = lives[step]
        self.record = Record(Path(trainer.default_local_dir) / name, step, last_step)
        return {*lives}

    @contextmanager
    def precision(self) -> Iterator[None]:
        if not self.is_open:
            self.open()
        with self.rollout.policy.autocast():
            yield

    def open(self) -> None:
        """Has the engine see all weights, and be awake."""
        policy = self.rollout.policy
        if not self.rollout.engine.own_weights:
            self.contexts.enter_context(policy.on_device())
            self.contexts.enter_context(policy.parallel.full_weights(policy.module))
        self.rollout.sync.check_gathered()
        self.rollout.engine.wake_up()
        self.is_open = True

    def begin(
        self, call: int, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int, episodes: bool
    ) -> None:
        """Begins to answer `prompts`, as ColocatedRollout.generate_sequences does; returns at once."""
        answer = self.play if episodes and len(prompts) else self.complete
        coroutine = answer(self.pump, prompts, sampling, seed, range(first_row, first_row + len(prompts)))
        self.calls[call] = asyncio.run_coroutine_threadsafe(coroutine, self.loop), f"{seed}-"

    async def play(
        self, pump: ReloadingEngine, prompts: DataProto, sampling: SamplingParams, seed: int, numbers: range
    ) -> DataProto:
        """Plays the episodes that rows begin."""
        agents, names = self.rollout.agent_loop, [f"{seed}-{number}" for number in numbers]
        rows = zip(numbers, names, strict=True)
        policies = [Policy(pump, sampling, seed, number, not agents.turns_apart, name) for number, name in rows]
        return agents.columns(prompts, await agents.play_all(prompts, policies), names)

    async def complete(
        self, pump: ReloadingEngine, prompts: DataProto, sampling: SamplingParams, seed: int, numbers: range
    ) -> DataProto:
        """Answers each row once, by the draws of Rollout.generate_sequences."""
        requests = [
            Request(number, PromptIds(ids, media_of(ids)), sampling, derive_seed(seed, "row", number))
            for number, ids in zip(numbers, prompts.raw_prompt_ids, strict=True)
        ]
        done = await asyncio.gather(*(pump.answer_once(each, f"{seed}-{each.id}") for each in requests))
        engine = self.rollout.engine
        check_completions(engine, requests, done)
        lengths = engine.config.prompt_length, engine.config.response_length
        rollouts = collate([*map(sample_of, requests, done)], *lengths, engine.pad_token_id)
        return rollouts.union(prompts.select([name for name in prompts.tensors if name not in rollouts]))

    def take(self, calls: Sequence[int], step: int) -> dict[int, DataProto]:
        """Returns the rows of those of `calls` that are answered, once, in the order in which they were. Raises
        EngineError if a replay waits for weights that never come: `step` is not learnt without these answers."""
        futures = {call: self.calls[call][0] for call in calls if call in self.calls}
        wait(futures.values(), TAKE_SECONDS, FIRST_COMPLETED)
        if futures and (version := self.pump.awaited) >= step:
            names = tuple(self.calls[call][1] for call in futures)
            if any(str(client.episode).startswith(names) for client in self.pump.clients.copy().values()):
                raise EngineError(f"trainer.replay: weights {version} come after answers that wait for them. {REMEDY}")
        return {call: self.calls.pop(call)[0].result() for call, future in futures.items() if future.done()}

    def expects(self, version: int) -> bool:
        """Says whether `reload` may be called; waits a moment if not. It keeps this worker from other calls until the
        weights have come, so what a replay has join before them must be here."""
        if not (is_next := self.pump.expects(version)):
            time.sleep(TAKE_SECONDS)
        return is_next

    def reload(self, version: int) -> tuple[int, dict[str, float]]:
        """Takes the weights that the trainer sends, called `version`, between two steps of the engine; returns the sum
        of their bits, and the certificate."""
        done: Future = Future()
        asyncio.run_coroutine_threadsafe(self.pump.reload(version, partial(self.load, version), done), self.loop)
        return done.result()

    def load(self, version: int) -> Any:
        self.contexts.close()
        self.is_open = False
        bits, _ = self.worker.roles["receiver"].move()
        certificate = self.rollout.update_weights(version)
        self.open()
        return bits, certificate
