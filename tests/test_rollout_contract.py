"""The columns that a rollout has, by hand, and the refusals of engines that break their contract."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from configs.schema import Config, RolloutConfig
from data.protocol import DataProto, object_array
from data.types import Completion, Request, SamplingParams
from tests.engines import Generating, Stepping, answer
from training.roles import ROLES
from workers.adapter import NoAdapter
from workers.engine_pump import AsyncEngine, EngineError
from workers.group import Done, RolloutRole
from workers.model_worker import ColocatedRollout
from workers.parallel import Replicas
from workers.rollout import Rollout

GREEDY = SamplingParams(False, 1.0, -1, 1.0, 5)
PROMPTS = [[9], [5, 0, 6], [7, 8], [9], [11, 12]]


def made(engine_class: type[Rollout], tokenizer: PreTrainedTokenizerBase) -> Rollout:
    return engine_class(RolloutConfig(prompt_length=4, response_length=3), tokenizer, None)


def test_the_columns_of_a_rollout_by_hand(tokenizer: PreTrainedTokenizerBase):
    """Prompts left-padded to P = 4, responses right-padded to R = 3; pad id 0."""
    prompts = DataProto.from_dict(None, {"raw_prompt_ids": object_array([[9], [5, 0, 6]])}, {"validate": True})
    prompts.non_tensor_batch["uid"] = object_array(["a", "b"])
    wanted = {
        "prompts": [[0, 0, 0, 9], [0, 5, 0, 6]],
        "responses": [[70, 0, 0], [70, 71, 72]],
        "input_ids": [[0, 0, 0, 9, 70, 0, 0], [0, 5, 0, 6, 70, 71, 72]],
        "attention_mask": [[0, 0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]],
        "position_ids": [[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 3, 4, 5]],
        "response_mask": [[1, 0, 0], [1, 1, 1]],
        "weight_versions": [[0, -1, -1], [0, 0, 0]],
    }
    for engine_class in (Generating, Stepping):
        batch = made(engine_class, tokenizer).generate_sequences(prompts, GREEDY, seed=3)
        assert {name: batch.batch[name].tolist() for name in wanted} == wanted
        assert {batch.batch[name].dtype for name in wanted} == {torch.int64}
        assert batch.batch["rollout_log_probs"].tolist() == [[-0.5, 0, 0], [-0.5, -0.25, -0.125]]
        assert batch.batch["rollout_log_probs"].dtype == torch.float32
        assert set(batch.batch.keys()) == {*wanted, "rollout_log_probs"}
        assert batch.end_reason.tolist() == ["terminated", "max_tokens"]
        assert batch.uid.tolist() == ["a", "b"] and batch.meta_info == {"validate": True}
        assert prompts.batch is None, "the prompts are the caller's"


@pytest.mark.parametrize("engine_class", [Generating, Stepping])
def test_texts_messages_and_ids_are_answered_without_a_run(tokenizer: PreTrainedTokenizerBase, engine_class):
    engine, prompts = made(engine_class, tokenizer), [[9], "12", [{"role": "user", "content": "1"}]]
    assert [done.token_ids for done in engine.batch_generation(prompts)] == [[70], [70, 71], [70, 71, 72]]
    texts = [tokenizer.decode([70, 71, 72][:count]) for count in (1, 2, 3)]
    assert engine.inference(prompts) == texts and engine.inference("12") == texts[1:2]


def test_seeds_of_rows_depend_on_their_place_in_the_whole(tokenizer: PreTrainedTokenizerBase):
    """Equal seeds make the draws of a batch the same over any number of workers."""
    asked: list[Request] = []

    class Recording(Generating):
        def generate(self, requests: list[Request]) -> list[Completion]:
            asked.extend(requests)
            return super().generate(requests)

    rollout = made(Recording, tokenizer)
    prompts = DataProto.from_single_dict({"raw_prompt_ids": PROMPTS})
    rollout.generate_sequences(prompts, GREEDY, 3)
    rollout.generate_sequences(prompts[:2], GREEDY, 3)
    rollout.generate_sequences(prompts[2:], GREEDY, 3, first_row=2)
    seeds = [request.seed for request in asked]
    assert seeds[:5] == seeds[5:] and len(set(seeds)) == 5
    assert [request.prompt_ids for request in asked[:5]] == PROMPTS


def test_an_engine_that_draws_from_the_global_generators_draws_otherwise_on_each_worker(tokenizer):
    """Two workers answer one prompt with four different samples, and with the same four in an equal call."""

    class Drawing(Generating):
        def generate(self, requests: list[Request]) -> list[Completion]:
            return [Completion(one.id, torch.randint(50, (3,)).tolist(), [0.0] * 3, "length", 0) for one in requests]

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            torch.rand(1)

    of_weights = {"weights": list, "parallel": Replicas(), "adapter": NoAdapter()}
    policy = SimpleNamespace(module=torch.nn.Linear(1, 1), on_device=nullcontext, autocast=nullcontext, **of_weights)
    engine, prompts = made(Drawing, tokenizer), {"raw_prompt_ids": [[9]] * 4}
    worker = ColocatedRollout(Config(), tokenizer, engine, policy)
    role = RolloutRole(Mock(size=2), ROLES["rollout"])
    role.group.submit = lambda _, name, shares: Done([getattr(worker, name)(*one) for one in shares])
    drawn = [role.generate_sequences(DataProto.from_single_dict(prompts), GREEDY, 3).responses for _ in range(2)]
    assert len({*map(tuple, drawn[0].tolist())}) == 4 and torch.equal(*drawn)
    before = torch.get_rng_state()
    worker.update_weights(1)
    assert torch.equal(torch.get_rng_state(), before), "a resumed run takes its weights up once more"


def test_nothing_is_learnt_from_what_was_aborted(tokenizer: PreTrainedTokenizerBase):
    class Aborting(Generating):
        def generate(self, requests: list[Request]) -> list[Completion]:
            return [replace(done, finish_reason="aborted") for done in super().generate(requests)]

    prompts = DataProto.from_single_dict({"raw_prompt_ids": PROMPTS[1:3]})
    batch = made(Aborting, tokenizer).generate_sequences(prompts, GREEDY, seed=3)
    assert not batch.batch["response_mask"].any() and set(batch.end_reason) == {"aborted"}
    assert batch.batch["responses"].tolist() == [[70, 71, 72], [70, 71, 0]]


def test_an_engine_that_can_neither_generate_nor_step_is_refused_with_both_ways():
    with pytest.raises(TypeError, match=r"Idle cannot generate: .*generate\(requests\).*or step\(\)"):
        type("Idle", (Rollout,), {"add": lambda self, request: None})


def refused(tokenizer: PreTrainedTokenizerBase, message: str, **methods: Callable) -> None:
    """An engine with these methods is refused when it is asked to answer two prompts."""
    rollout = made(type("Broken", (Rollout,), {"vocab_size": 100, **methods}), tokenizer)
    prompts = DataProto.from_single_dict({"raw_prompt_ids": PROMPTS[:2]})
    with pytest.raises((AssertionError, ValueError), match=message):
        rollout.generate_sequences(prompts, GREEDY, seed=3)
    assert not rollout.has_unfinished_requests()


def test_an_engine_that_loses_requests_or_calls_itself_is_named(tokenizer: PreTrainedTokenizerBase):
    def lose(self: Rollout) -> list[Completion]:
        self.waiting.clear()
        return []

    refused(tokenizer, r"Broken ran dry without completions of the requests \[0, 1\]", step=lose)
    refused(tokenizer, "Broken defines generate", generate=lambda self, requests: Rollout.generate(self, requests))


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (lambda requests: [answer(one, 0) for one in requests[::-1]], "of request 1 where 0 belongs"),
        (lambda requests: [answer(requests[0], 0)], "returned 1 completions for 2 requests: generate"),
        (lambda requests: None, "returned NoneType: generate must return a list of"),
        (lambda requests: [[7], [8]], "returned list: generate must return a list of one"),
        (lambda requests: [Completion(0, [7, 8], [-1.0], "stop", 0)] * 2, "2 token_ids and 1 log_pr"),
        (lambda requests: [Completion(0, [7] * 6, [-1.0] * 6, "stop", 0)] * 2, "max_tokens=5 tokens"),
        (lambda requests: [told(one, [1.5]) for one in requests], "the token id 1.5 for request 0: they are integers"),
        (lambda requests: [told(one, [True]) for one in requests], "the token id True for request 0"),
        (lambda requests: [told(one, [-3]) for one in requests], "the token id -3 for request 0"),
        (lambda requests: [told(one, [10**9]) for one in requests], "the token id 1000000000 .* from 0 to 99"),
        (lambda requests: [told(one, [7], [3.0]) for one in requests], "log-prob 3.0 for request 0: they are numbers"),
        (lambda requests: [told(one, [7], [None]) for one in requests], "the log-prob None for request 0"),
        (lambda requests: [told(one, [7], [True]) for one in requests], "the log-prob True for request 0"),
        (lambda requests: [Completion(0, [], [], "done", 0)], "finish_reason='done'.*stop, length"),
    ],
)
def test_what_an_engine_gets_wrong_is_named(tokenizer: PreTrainedTokenizerBase, generate: Callable, message: str):
    refused(tokenizer, message, generate=lambda self, requests: generate(requests))


def test_what_a_stepping_engine_gets_wrong_is_named_where_episodes_are_played(tokenizer: PreTrainedTokenizerBase):
    class Broken(Rollout):
        def step(self) -> list[Completion]:
            return [told(self.waiting.popitem()[1], [np.int64(7), 10**9])]

    async def ask() -> Completion:
        engine = made(Broken, tokenizer)
        engine.vocab_size = 100
        return await AsyncEngine(engine, nullcontext, ThreadPoolExecutor(1)).complete([9], GREEDY, 3, 0, False)

    with pytest.raises(EngineError, match=r"the engine .*Broken .* returned the token id 1000000000 for request 0"):
        asyncio.run(ask())


def test_a_step_waits_for_the_next_turn_of_an_episode(tokenizer: PreTrainedTokenizerBase, monkeypatch):
    """The engine answers the request that came last: each turn of the second episode joins before the next step."""
    monkeypatch.setattr("workers.engine_pump.WAIT_SHARE", 1e9)  # however fast a step is
    answered: list[str] = []

    async def play(pump: AsyncEngine, name: str, turns: int) -> None:
        for turn in range(turns):
            await pump.complete([9], GREEDY, turn, name, False)
            answered.append(name)
            await asyncio.sleep(0.01)  # the environment's step
        pump.forget(name)

    async def run() -> None:
        pump = AsyncEngine(made(Stepping, tokenizer), nullcontext, ThreadPoolExecutor(1))
        await asyncio.gather(play(pump, "first", 1), play(pump, "second", 3))

    asyncio.run(run())
    assert answered == ["second"] * 3 + ["first"]


def told(request: Request, ids: list, log_probs: list | None = None) -> Completion:
    return Completion(request.id, ids, log_probs or [-1.0] * len(ids), "length", 0)
