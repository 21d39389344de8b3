"""What every engine promises, held against three: the shipped one, one that only steps, and one that only generates."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.schema import ModelConfig, RolloutConfig
from data.protocol import DataProto, object_array
from data.types import Completion, Request, SamplingParams
from tests.engines import drain
from workers.hf.rollout import HFRollout
from workers.load_rollout import build_rollout, generate_batch
from workers.models import load_causal_lm
from workers.rollout import Rollout

GREEDY = SamplingParams(False, 1.0, -1, 1.0, 5)
PROMPTS = [[9], [5, 0, 6], [7, 8], [9], [11, 12]]


def requests(*ids: int, sampling: SamplingParams = GREEDY) -> list[Request]:
    return [Request(i, PROMPTS[i % len(PROMPTS)], sampling, seed=i) for i in ids]


def answer(request: Request, version: int) -> Completion:
    """The first ids of 70, 71, 72, as many as the prompt has; it stops unless that is three."""
    count = len(request.prompt_ids)
    reason = "stop" if count < 3 else "length"
    return Completion(request.id, [70, 71, 72][:count], [-0.5, -0.25, -0.125][:count], reason, version)


class GeneratingRollout(Rollout):
    def generate(self, requests: list[Request]) -> list[Completion]:
        return [answer(request, self.weight_version) for request in requests]


class SteppingRollout(Rollout):
    """Answers one waiting request a step, the last first."""

    def step(self) -> list[Completion]:
        return [answer(self.waiting.popitem()[1], self.weight_version)] if self.waiting else []


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(params=["hf", "generate alone", "step alone"])
def engine(request: pytest.FixtureRequest, tiny_model: Path, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    config = RolloutConfig(prompt_length=4, response_length=5, max_num_seqs=3)
    if request.param == "hf":
        return HFRollout(config, tokenizer, load_causal_lm(ModelConfig(path=str(tiny_model))))
    return {"generate alone": GeneratingRollout, "step alone": SteppingRollout}[request.param](config, tokenizer, None)


def test_completions_come_in_the_order_of_the_requests(engine: Rollout):
    alone = {i: engine.generate(requests(i))[0] for i in range(5)}
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], []):
        found = engine.generate(requests(*order))
        assert [(done.id, done.token_ids) for done in found] == [(i, alone[i].token_ids) for i in order]
        assert all(len(done.token_ids) == len(done.log_probs) for done in found)
    assert not engine.has_unfinished_requests() and engine.step() == []


def test_requests_join_at_any_time_and_come_out_once(engine: Rollout):
    expected = {done.id: done.token_ids for done in engine.generate(requests(*range(5)))}
    found: dict[int, Completion] = {}
    for request in requests(*range(5)):
        engine.add(request)
        for done in engine.step():
            found[done.id] = done
    found |= drain(engine)
    assert {i: done.token_ids for i, done in found.items()} == expected


def test_an_aborted_request_never_comes_out_and_others_go_on(engine: Rollout):
    expected = {done.id: done.token_ids for done in engine.generate(requests(*range(5)))}
    for request in requests(*range(5)):
        engine.add(request)
    engine.abort([1, 3, 17])
    assert {i: done.token_ids for i, done in drain(engine).items()} == {i: expected[i] for i in (0, 2, 4)}
    for request in requests(0, 1):
        engine.add(request)
    engine.abort([0, 1])
    assert not engine.has_unfinished_requests() and engine.step() == []


def test_a_request_in_flight_is_not_added_again(engine: Rollout):
    engine.add(requests(2)[0])
    with pytest.raises(AssertionError, match="request 2 is waiting already"):
        engine.add(requests(2)[0])
    if type(engine).generate is Rollout.generate:  # else it knows of no others
        with pytest.raises(AssertionError, match="in flight, whose completions would be lost"):
            engine.generate(requests(3))
    assert list(drain(engine)) == [2]


def test_weights_are_loaded_between_requests_and_completions_carry_their_version(engine: Rollout):
    weights = iter([("name", torch.zeros(1))])
    engine.load_weights(weights, 4)
    assert [done.weight_version for done in engine.generate(requests(0, 1))] == [4, 4]
    engine.add(requests(0)[0])
    with pytest.raises(AssertionError, match="requests in flight: abort them first"):
        engine.load_weights(weights, 5)
    engine.abort([0])
    engine.load_weights(weights, 5)
    assert engine.generate(requests(0))[0].weight_version == 5
    assert len(list(weights)) == 1, "these engines need none of them"
    engine.sleep()
    engine.wake_up()
    assert engine.generate(requests(0))[0].weight_version == 5


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
    }
    for engine_class in (GeneratingRollout, SteppingRollout):
        rollout = engine_class(RolloutConfig(prompt_length=4, response_length=3), tokenizer, None)
        batch = rollout.generate_sequences(prompts, GREEDY, seed=3)
        assert {name: batch.batch[name].tolist() for name in wanted} == wanted
        assert {batch.batch[name].dtype for name in wanted} == {torch.int64}
        assert batch.batch["rollout_log_probs"].tolist() == [[-0.5, 0, 0], [-0.5, -0.25, -0.125]]
        assert batch.batch["rollout_log_probs"].dtype == torch.float32
        assert set(batch.batch.keys()) == {*wanted, "rollout_log_probs"}
        assert batch.end_reason.tolist() == ["terminated", "max_tokens"]
        assert batch.uid.tolist() == ["a", "b"] and batch.meta_info == {"validate": True}
        assert prompts.batch is None, "the prompts are the caller's"


def test_a_prompt_wider_than_the_columns_is_refused(tokenizer: PreTrainedTokenizerBase):
    rollout = GeneratingRollout(RolloutConfig(prompt_length=2, response_length=3), tokenizer, None)
    with pytest.raises(AssertionError, match=r"3 tokens of prompt.*wider than 2, 3"):
        rollout.generate_sequences(DataProto.from_single_dict({"raw_prompt_ids": [[5, 6, 7]]}), GREEDY, seed=3)


def test_seeds_of_rows_depend_on_their_place_in_the_whole(tokenizer: PreTrainedTokenizerBase):
    """So that the draws of a batch are the same over any number of workers."""
    asked: list[Request] = []

    class Recording(GeneratingRollout):
        def generate(self, requests: list[Request]) -> list[Completion]:
            asked.extend(requests)
            return super().generate(requests)

    rollout = Recording(RolloutConfig(prompt_length=4, response_length=3), tokenizer, None)
    prompts = DataProto.from_single_dict({"raw_prompt_ids": PROMPTS})
    rollout.generate_sequences(prompts, GREEDY, 3)
    rollout.generate_sequences(prompts[:2], GREEDY, 3)
    rollout.generate_sequences(prompts[2:], GREEDY, 3, first_row=2)
    seeds = [request.seed for request in asked]
    assert seeds[:5] == seeds[5:] and len(set(seeds)) == 5
    assert [request.prompt_ids for request in asked[:5]] == PROMPTS


def test_nothing_is_learnt_from_what_was_aborted(tokenizer: PreTrainedTokenizerBase):
    class Aborting(GeneratingRollout):
        def generate(self, requests: list[Request]) -> list[Completion]:
            return [replace(done, finish_reason="aborted") for done in super().generate(requests)]

    rollout = Aborting(RolloutConfig(prompt_length=4, response_length=3), tokenizer, None)
    batch = rollout.generate_sequences(DataProto.from_single_dict({"raw_prompt_ids": PROMPTS[1:3]}), GREEDY, seed=3)
    assert not batch.batch["response_mask"].any() and set(batch.end_reason) == {"aborted"}
    assert batch.batch["responses"].tolist() == [[70, 71, 72], [70, 71, 0]]


def test_an_engine_that_can_neither_generate_nor_step_is_refused_with_both_ways():
    with pytest.raises(TypeError, match=r"Idle cannot generate: .*generate\(requests\).*or step\(\)"):
        type("Idle", (Rollout,), {"add": lambda self, request: None})


def lost(self: Rollout) -> list[Completion]:
    self.waiting.clear()
    return []


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("step", lost, r"Broken ran dry without completions of the requests \[0, 1\]"),
        ("generate", lambda self, requests: Rollout.generate(self, requests), "Broken defines generate"),
        (
            "generate",
            lambda self, requests: [answer(one, 0) for one in requests[::-1]],
            "of request 1 where .* 0 belongs",
        ),
        (
            "generate",
            lambda self, requests: [answer(requests[0], 0)],
            "returned 1 completions for 2 requests: generate",
        ),
        (
            "generate",
            lambda self, requests: None,
            "returned NoneType: generate must return a list of",
        ),
        ("generate", lambda self, requests: [[7], [8]], "returned list: generate must return a list of one"),
        ("generate", lambda self, requests: [Completion(0, [7, 8], [-1.0], "stop", 0)] * 2, "2 token_ids and 1 log_pr"),
        ("generate", lambda self, requests: [Completion(0, [7] * 6, [-1.0] * 6, "stop", 0)] * 2, "max_tokens=5 tokens"),
        ("generate", lambda self, requests: [Completion(0, [], [], "done", 0)], "finish_reason='done'.*stop, length"),
    ],
)
def test_what_an_engine_gets_wrong_is_named(
    tokenizer: PreTrainedTokenizerBase, name: str, method: Callable, message: str
):
    rollout = type("Broken", (Rollout,), {name: method})(
        RolloutConfig(prompt_length=4, response_length=3), tokenizer, None
    )
    prompts = DataProto.from_single_dict({"raw_prompt_ids": PROMPTS[:2]})
    with pytest.raises((AssertionError, ValueError), match=message):
        rollout.generate_sequences(prompts, GREEDY, seed=3)
    assert not rollout.has_unfinished_requests()


def answers(prompts: DataProto, **columns: list) -> DataProto:
    """What an engine that answers whole batches returns."""
    return DataProto.from_dict({name: torch.tensor(values) for name, values in columns.items()})


IDS, MASK = [[70, 71, 0], [72, 0, 0]], [[1, 1, 0], [1, 0, 0]]


def test_a_batch_of_an_engine_of_the_users_by_hand(tokenizer: PreTrainedTokenizerBase):
    """Its columns are narrower than P = 4, R = 5; row 0 has an observation, and row 1 stops."""
    stop = tokenizer.eos_token_id
    given = {
        "responses": [[70, 71, 73], [72, stop, 0]],
        "attention_mask": [[1, 1, 1, 1], [0, 1, 1, 0]],
        "response_mask": [[1, 0, 1], [1, 1, 0]],
        "rollout_log_probs": [[-1.0, 9.0, -3.0], [-4.0, -5.0, 9.0]],
        "own": [[1], [2]],
    }
    engine_class = type("Mine", (Rollout,), {"generate_sequences": lambda self, prompts: answers(prompts, **given)})
    engine = build_rollout(engine_class, RolloutConfig(prompt_length=4, response_length=5), tokenizer, None)
    prompts = DataProto.from_single_dict({"raw_prompt_ids": PROMPTS[:2], "size": torch.tensor([[1.0], [3.0]])})
    batch = generate_batch(engine, prompts, GREEDY, seed=3, first_row=0)
    wanted = {
        "prompts": [[0, 0, 0, 9], [0, 5, 0, 6]],
        "responses": [[70, 71, 73, 0, 0], [72, stop, 0, 0, 0]],
        "attention_mask": [[0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 0, 0, 0, 1, 2, 3, 3, 3], [0, 0, 1, 2, 3, 4, 4, 4, 4]],
        "response_mask": [[1, 0, 1, 0, 0], [1, 1, 0, 0, 0]],
        "rollout_log_probs": [[-1, 9, -3, 0, 0], [-4, -5, 0, 0, 0]],
        "own": [[1], [2]],
        "size": [[1], [3]],
    }
    assert {name: batch.batch[name].tolist() for name in wanted} == wanted
    assert batch.end_reason.tolist() == ["max_tokens", "terminated"]
    assert generate_batch(engine, prompts[:0], GREEDY, 3, 0).batch["responses"].shape == (0, 5), "it is not asked"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda prompts: None, "returned None: generate_sequences must return a DataProto"),
        (lambda prompts: answers(prompts, responses=IDS[:1], response_mask=MASK[:1]), "returned 1 rows for 2 prompts"),
        (lambda prompts: answers(prompts, responses=IDS), r"returned the tensors {'responses': \[2, 3\]}"),
        (lambda prompts: answers(prompts, response_mask=MASK), r"returned the tensors {'response_mask': \[2, 3\]}"),
        (lambda prompts: answers(prompts, responses=[7, 8], response_mask=[1, 1]), r"{'responses': \[2\], 'resp"),
        (lambda prompts: answers(prompts, responses=[[0.5], [1]], response_mask=[[1], [1]]), "the tensors {'responses"),
        (
            lambda prompts: answers(prompts, responses=IDS, response_mask=[[1, 1]] * 2),
            r"\[2, 3\] and response_mask \[2, 2\]",
        ),
        (
            lambda prompts: answers(prompts, responses=[[7] * 6] * 2, response_mask=[[1] * 6] * 2),
            "6 tokens: at most .*=5",
        ),
        (
            lambda prompts: answers(
                prompts,
                responses=IDS,
                input_ids=[[0, 0, 0, 9, *IDS[0]], [0, 5, 6, 0, *IDS[1]]],
                attention_mask=[[0, 0, 0, 1, *MASK[0]], [0, 1, 1, 1, *MASK[1]]],
            ),
            "another prompt in row 1 of input_ids",
        ),
    ],
)
def test_what_an_engine_of_whole_batches_gets_wrong_is_named(tokenizer: PreTrainedTokenizerBase, result, words):
    class Mine(Rollout):
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            return result(prompts)

    engine = build_rollout(Mine, RolloutConfig(prompt_length=4, response_length=5), tokenizer, None)
    prompts = DataProto.from_single_dict({"raw_prompt_ids": PROMPTS[:2]})
    with pytest.raises(ValueError, match=rf"the engine .*Mine \({__file__}\) .*{words}"):
        generate_batch(engine, prompts, GREEDY, seed=3, first_row=0)
