"""The engine `hf`: its sampling loop against whole forwards and plain softmax arithmetic, and the memory it keeps."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from configs.schema import ModelConfig, RolloutConfig
from data.seeding import derive_seed
from data.types import Completion, Request, SamplingParams
from tests.engines import drain
from workers import hf_rollout
from workers.hf_rollout import HFRollout, NoCacheBatch, sample, sample_rows
from workers.rollout import Rollout, stop_token_ids
from workers.scoring_model import scoring_model, with_hooks

P, R = 9, 12
PROMPTS = [[20, 30, 40], [7], [50, 51, 52, 53, 54, 55, 56, 57, 58], [60, 61], [33, 34, 35, 36, 37]]
GREEDY = SamplingParams(False, 1.0, -1, 1.0, R)


def sampling(max_tokens: int = R, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> SamplingParams:
    return SamplingParams(True, temperature, top_k, top_p, max_tokens)


def make_rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stops: tuple[int, ...] = (),
    max_num_seqs: int = 1024,
    max_num_batched_tokens: int = 8192,
) -> HFRollout:
    model.generation_config.eos_token_id = list(stops) or None
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    config = RolloutConfig(prompt_length=P, response_length=R, **sizes)
    return HFRollout(config, tokenizer, model)


def generate(rollout: Rollout, prompts: list[list[int]], params: SamplingParams, seed: int = 0) -> list[Completion]:
    return rollout.generate([Request(i, ids, params, derive_seed(seed, i)) for i, ids in enumerate(prompts)])


def ids(completions: list[Completion]) -> list[list[int]]:
    return [done.token_ids for done in completions]


FAMILIES = {
    "Llama, 2 query heads a key head": LlamaConfig(num_key_value_heads=2),
    "Llama, untied": LlamaConfig(num_key_value_heads=4, tie_word_embeddings=False),
    "Qwen2, biases": Qwen2Config(num_key_value_heads=2),
    "GPT-2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "Mistral, a window shorter than the sequences": MistralConfig(num_key_value_heads=2, sliding_window=6),
}
EXTREMES = (0.0, 5e-324, 0.5, 1 - 2**-53)  # of the uniform numbers in [0, 1)
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


OFF = "kernels off"
FORWARDS = {OFF: ModelConfig(kernels="off"), "padded": ModelConfig(use_remove_padding=False), "packed": ModelConfig()}


def random_model(family: str, forward: str, layers: int = 2) -> PreTrainedModel:
    config = copy.deepcopy(FAMILIES[family])
    shape = {} if isinstance(config, GPT2Config) else SHAPE | {"num_hidden_layers": layers}
    config.update({**shape, "vocab_size": 300, "eos_token_id": None, "bos_token_id": None})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            matrix.mul_(8)
    model = scoring_model(with_hooks(model), FORWARDS[forward], torch.device("cpu"), torch.float32, longest=P + R)
    assert model.shares_prompts == (forward == "packed")
    return model


def naive_rollout(
    model: PreTrainedModel, prompt: list[int], uniforms: np.ndarray, params: SamplingParams
) -> Completion:
    """The whole sequence forwarded for every token, no cache, no batch; tokens by the inverse of the cumulative sum."""
    tokens, log_probs = [], []
    for uniform in uniforms:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1].double() / params.temperature
        cumulative = logits.softmax(-1).cumsum(-1)
        token = int((cumulative <= uniform).sum()) if params.do_sample else int(logits.argmax())
        tokens.append(token)
        log_probs.append(logits.log_softmax(-1)[token].item())
    return Completion(0, tokens, log_probs, "length", 0)


PLACES = (0, 0, 1, 2, 2, 2, 3, 4, 1, 2, 0, 0, 4, 3, 2)


@cache
def naive_rollouts(family: str, params: SamplingParams) -> list[Completion]:
    """Completes the prompts at `PLACES`, each by its row's uniform numbers; every forward is held against the same."""
    model = random_model(family, OFF).eval()
    uniforms = [np.random.default_rng(derive_seed(5, row)).random(R) for row in range(len(PLACES))]
    return [naive_rollout(model, PROMPTS[PLACES[row]], numbers, params) for row, numbers in enumerate(uniforms)]


def stopped(done: Completion, stops: set[int]) -> Completion:
    """Cuts a completion behind the first of the `stops` in it."""
    size = next((size for size, token in enumerate(done.token_ids, start=1) if token in stops), None)
    if size is None:
        return done
    return replace(done, token_ids=done.token_ids[:size], log_probs=done.log_probs[:size], finish_reason="stop")


@pytest.mark.parametrize("forward", [OFF])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_whole_forwards_without_cache_whoever_shares_the_batch(tokenizer, family, forward, monkeypatch):
    """Prompts are ragged and equal, end at several steps, and share three places or have one each; fresh memory is NaN,
    which no mask keeps out of a sum."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: self.new_full(shape, torch.nan))
    model = random_model(family, forward).eval()
    prompts = [PROMPTS[place] for place in PLACES]
    for params in (replace(GREEDY, temperature=1.0), sampling(temperature=0.8)):
        free = naive_rollouts(family, params)
        stops = (free[0].token_ids[4], free[3].token_ids[2])
        ended = {*stops, tokenizer.eos_token_id}
        wanted = [stopped(done, ended) for done in free]
        assert len({len(done.token_ids) for done in wanted}) > 1
        for places in (1024, 3):
            found = generate(make_rollout(model, tokenizer, stops, places), prompts, params, seed=5)
            assert ids(found) == ids(wanted)
            assert [done.finish_reason for done in found] == [done.finish_reason for done in wanted]
            for one, other in zip(found, wanted, strict=True):
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        model.eval()


def mixed_requests(count: int) -> list[Request]:
    """Rows of all prompts, each with one of several samplings and limits."""
    samplings = [
        sampling(),
        sampling(max_tokens=3, temperature=0.7),
        replace(GREEDY, max_tokens=7),
        sampling(max_tokens=20, top_k=20),
        sampling(max_tokens=1),
        sampling(temperature=1.3, top_p=0.8),
    ]
    return [
        Request(row, PROMPTS[row % len(PROMPTS)], samplings[row % len(samplings)], derive_seed(9, row))
        for row in range(count)
    ]


def assert_same(found: list[Completion], wanted: dict[int, Completion]) -> None:
    """Each row's tokens and end, in any order of rows, and log-probs to rounding."""
    assert sorted(done.id for done in found) == sorted(wanted)
    for done in found:
        assert done.token_ids == wanted[done.id].token_ids
        assert done.finish_reason == wanted[done.id].finish_reason
        assert done.log_probs == pytest.approx(wanted[done.id].log_probs, abs=1e-4)


@pytest.mark.parametrize("forward", [OFF])
@pytest.mark.parametrize("family", ["Llama, 2 query heads a key head", "Mistral, a window shorter than the sequences"])
def test_a_row_depends_on_neither_its_company_nor_its_pass_nor_the_time_it_joined(tokenizer, family, forward):
    """Rows get places for all or for few; they come all at once, or some every few steps, while others run."""
    model, rows = random_model(family, forward), mixed_requests(17)
    alone = {row.id: make_rollout(model, tokenizer, (7, 40, 80)).generate([row])[0] for row in rows}
    assert {done.finish_reason for done in alone.values()} == {"stop", "length"}
    for budget, places in ((1, 3), (19, 3), (8192, 1024)):
        rollout = make_rollout(model, tokenizer, (7, 40, 80), places, budget)
        assert_same(rollout.generate(rows), alone)
        rng = np.random.default_rng(places + budget)
        waiting, found = [rows[place] for place in rng.permutation(len(rows))], []
        while waiting:
            for _ in range(rng.integers(1, 6)):
                if waiting:
                    rollout.add(waiting.pop())
            for _ in range(rng.integers(0, 5)):
                found += rollout.step()
        assert_same([*found, *drain(rollout).values()], alone)


@pytest.mark.parametrize("forward", [OFF])
def test_a_pass_over_prompts_holds_no_more_tokens_than_it_may(tokenizer: PreTrainedTokenizerBase, forward: str):
    """Prompts of 4 tokens, 31 of them, are neither padded to one of 60 tokens nor taken all at once."""
    model, passes = random_model("Llama, untied", forward), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append([*kwargs["input_ids"].shape]), with_kwargs=True
    )
    prompts = [[5, 6, 7, row] for row in range(31)]
    prompts.insert(9, [8] * 60)
    rollout = make_rollout(model, tokenizer, max_num_batched_tokens=32)
    passes.clear()  # of the engine's trial
    generate(rollout, [ids for ids in prompts for _ in range(3)], replace(GREEDY, max_tokens=2))
    prefills = [shape for shape in passes if shape[1] > 1]
    assert prefills == [[1, 60], [8, 4], [8, 4], [8, 4], [7, 4]]


def test_generation_leaves_no_trace_on_the_model(tokenizer, monkeypatch: pytest.MonkeyPatch, forward: str = OFF):
    """A model has its attention, weights and mode back once nothing is left to do, also by an abort or a failure."""
    model = random_model("Llama, untied", forward).train()
    rollout, attention = make_rollout(model, tokenizer), model.config._attn_implementation

    def is_as_before() -> bool:
        stand_ins = any("stand_in" in vars(layer) for layer in model.modules())
        return model.training and model.config._attn_implementation == attention and not stand_ins

    def add_all() -> None:
        for row, ids in enumerate(PROMPTS):
            rollout.add(Request(row, ids, GREEDY, row))

    generate(rollout, PROMPTS, GREEDY)
    assert is_as_before()
    add_all()
    assert is_as_before()
    rollout.step()
    assert not model.training and not is_as_before()
    drain(rollout)
    assert is_as_before()
    add_all()
    rollout.step()
    assert not is_as_before()
    rollout.abort(range(5))
    assert is_as_before() and rollout.step() == []
    monkeypatch.setattr(hf_rollout, "sample_rows", fail_at_call(3))
    with pytest.raises(RuntimeError, match="call 3"):
        generate(rollout, PROMPTS, GREEDY)
    assert is_as_before() and not rollout.has_unfinished_requests()
    add_all()
    monkeypatch.setattr(hf_rollout, "sample_rows", fail_at_call(1))
    with pytest.raises(RuntimeError, match="call 1"):
        rollout.step()
    assert is_as_before() and not rollout.has_unfinished_requests()


def fail_at_call(number: int) -> Callable:
    """`sample_rows` that raises at its number-th call."""
    calls = itertools.count(1)

    def failing(*args: Any) -> tuple[Tensor, Tensor]:
        if next(calls) == number:
            raise RuntimeError(f"call {number}")
        return sample_rows(*args)

    return failing


def test_what_nothing_is_kept_of_is_forwarded_whole_for_every_token(tokenizer: PreTrainedTokenizerBase):
    """An engine without a cache is slow, and answers the same, whoever joins and leaves."""
    model = random_model("Llama, untied", OFF)
    rollout, rows = make_rollout(model, tokenizer, stops=(7, 40, 80), max_num_seqs=4), mixed_requests(12)
    wanted = {done.id: done for done in rollout.generate(rows)}
    rollout.batch_class, widths = NoCacheBatch, []
    model.base_model.register_forward_pre_hook(
        lambda _, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    assert_same(rollout.generate(rows), wanted)
    assert max(widths) > P + 5  # with a cache, the longest prompt is the widest


def test_a_model_that_samples_otherwise_than_it_trains_is_refused(tokenizer: PreTrainedTokenizerBase):
    model = random_model("Llama, untied", OFF)
    model.register_forward_hook(sharper)  # the trainer does not call, it enters by `token_scores`
    with pytest.raises(ValueError, match="LlamaForCausalLM samples with other log-probs than it is trained with"):
        make_rollout(model, tokenizer)


def sharper(_: PreTrainedModel, args: tuple, output: Any) -> Any:
    output.logits = 2 * output.logits
    return output


@pytest.mark.parametrize("width", [1, 5, 128, 129, 1000])
def test_no_uniform_number_leads_to_a_token_of_probability_zero(width: int):
    generator = torch.Generator().manual_seed(width)
    for place in {0, width // 2, width - 1}:
        logits = torch.full((len(EXTREMES), width), -torch.inf)
        logits[:, place] = torch.randn(1, generator=generator)
        chosen, log_probs = sample(logits, sampling(), torch.tensor(EXTREMES, dtype=torch.float64))
        assert chosen.tolist() == [place] * len(chosen)
        assert log_probs.tolist() == [0] * len(chosen)


@pytest.mark.parametrize("width", [7, 128, 1000])
def test_a_token_is_drawn_by_exactly_its_share_of_the_uniform_numbers(width: int):
    """Evenly spaced numbers hit each token in proportion to its probability, to within one of them."""
    count = 20_000
    logits = 2 * torch.randn(1, width, generator=torch.Generator().manual_seed(0))
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen, log_probs = sample(logits.expand(count, -1), sampling(temperature=1.3), uniforms)
    wanted = (logits[0].double() / 1.3).log_softmax(-1)
    hits = chosen.bincount(minlength=width)
    assert (hits - count * wanted.exp()).abs().max() < 1.1
    assert (chosen.diff() >= 0).all()
    assert (log_probs - wanted[chosen]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("declared", "template", "wanted"),
    [
        (None, None, {"<|end|>"}),
        ("<|user|>", None, {"<|end|>", "<|user|>"}),
        (["<|user|>", "<|pad|>"], None, {"<|end|>", "<|user|>", "<|pad|>"}),
        (None, "{{ messages[1].content + '<|system|>' }}", {"<|end|>", "<|system|>"}),
        ("<|user|>", "{{ messages[1].content + '<|system|>x' }}", {"<|end|>", "<|user|>", "<|system|>"}),
        (None, "{{ messages[1].content + 'x<|system|>' }}", {"<|end|>"}),  # the answer is not what it ends
        (None, "{{ '<|user|>' + messages[0].content + '<|system|>' }}", {"<|end|>"}),  # renders no answer
    ],
)
def test_the_stop_set_is_generation_config_and_tokenizer_and_template(tokenizer, declared, template, wanted):
    own = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    own.chat_template = template
    config = GenerationConfig(eos_token_id=own.convert_tokens_to_ids(declared)) if declared else None
    assert stop_token_ids(own, config) == set(own.convert_tokens_to_ids(sorted(wanted)))


def test_nothing_but_stop_ids_is_inherited_from_generation_config(tokenizer: PreTrainedTokenizerBase):
    model = random_model("Llama, untied", OFF)
    plain = ids(generate(make_rollout(model, tokenizer), PROMPTS, sampling(), seed=1))
    model.generation_config.update(temperature=0.01, top_k=1, top_p=0.1, repetition_penalty=5.0, max_new_tokens=2)
    assert ids(generate(make_rollout(model, tokenizer), PROMPTS, sampling(), seed=1)) == plain
    assert np.mean([len(tokens) for tokens in plain]) > 2
