"""Answers the calls of a driver that goes on meanwhile, in threads of a worker, by weights that change under them."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from data.concurrency import start_loop
from data.padding import collate
from data.protocol import DataProto
from data.seeding import derive_seed
from data.types import Completion, Request, SamplingParams
from extras.overlap.reloading import ReloadingEngine
from workers.agents.episode import Policy
from workers.collectives import rank
from workers.model_worker import ModelWorker
from workers.rollout import check_completions, sample_of

LOOK_SECONDS = 0.02  # for which a call that asks for rows waits for them


@dataclass(frozen=True)
class NamedPolicy(Policy):
    """The policy as row `number` of a call asks it; among those of all calls the row has a name."""

    number: int = 0

    async def answer(
        self, prompt_ids: list[int], max_tokens: int, turn: int, sampling: SamplingParams | None = None
    ) -> Completion:
        sampling = replace(sampling or self.sampling, max_tokens=max_tokens)
        seed = derive_seed(self.seed, "row", self.number, "turn", turn)
        return await self.pump.complete(prompt_ids, sampling, seed, self.row, self.goes_on)


class Generator:
    """Generates beside what else this worker is asked for."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker, self.config = worker, worker.config
        self.calls: dict[int, Future] = {}
        self.contexts = ExitStack()  # in which the engine computes, between two changes of weights
        self.is_open = False

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        return start_loop()[0]

    @cached_property
    def pump(self) -> ReloadingEngine:
        """Starts to serve, in one thread."""
        folder, replay = Path(self.config.trainer.default_local_dir), self.config.trainer.replay
        file = f"engine_steps_{rank()}.jsonl"
        files = {"record": folder / file, "replay": replay and Path(replay) / file}
        self.rollout = self.worker.roles["rollout"]
        return ReloadingEngine(self.rollout.engine, self.precision, ThreadPoolExecutor(1), **files)

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
            self.contexts.enter_context(policy.at_work())
            self.contexts.enter_context(policy.parallel.whole(policy.module))
        self.rollout.sync.check_gathered()
        self.rollout.engine.wake_up()
        self.is_open = True

    def begin(
        self, call: int, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int, episodes: bool
    ) -> None:
        """Begins to answer `prompts`, as ColocatedRollout.generate_sequences does; returns at once."""
        answer = self.play if episodes and len(prompts) else self.complete
        coroutine = answer(self.pump, prompts, sampling, seed, range(first_row, first_row + len(prompts)))
        self.calls[call] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def play(
        self, pump: ReloadingEngine, prompts: DataProto, sampling: SamplingParams, seed: int, numbers: range
    ) -> DataProto:
        """Plays the episodes that rows begin."""
        agents, names = self.rollout.agent_loop, [f"{seed}-{number}" for number in numbers]
        goes_on = not agents.turns_apart
        policies = [
            NamedPolicy(pump, sampling, seed, name, goes_on, number)
            for name, number in zip(names, numbers, strict=True)
        ]
        return agents.columns(prompts, await agents.play_all(prompts, policies), names)

    async def complete(
        self, pump: ReloadingEngine, prompts: DataProto, sampling: SamplingParams, seed: int, numbers: range
    ) -> DataProto:
        """Answers each row once, by the draws of Rollout.generate_sequences."""
        requests = [
            Request(number, list(ids), sampling, derive_seed(seed, "row", number))
            for number, ids in zip(numbers, prompts.raw_prompt_ids, strict=True)
        ]
        done = await asyncio.gather(
            *(pump.complete(each.prompt_ids, sampling, each.seed, f"{seed}-{each.id}", False) for each in requests)
        )
        done = [replace(answer, id=request.id) for request, answer in zip(requests, done, strict=True)]
        engine = self.rollout.engine
        check_completions(engine, requests, done)
        samples = [sample_of(request, answer) for request, answer in zip(requests, done, strict=True)]
        lengths = engine.config.prompt_length, engine.config.response_length
        rollouts = collate(samples, *lengths, engine.pad_token_id)
        return rollouts.union(prompts.select([name for name in prompts.tensors if name not in rollouts]))

    def take(self, call: int) -> DataProto | None:
        """Returns the rows of a call, once, when all are there; None if they are not yet, or were taken."""
        if call not in self.calls or wait([self.calls[call]], LOOK_SECONDS).not_done:
            return None
        return self.calls.pop(call).result()

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


def build_generator(worker: ModelWorker) -> Generator:
    return Generator(worker)
