"""The contract of every engine of the table, one suite run over all that can run here, held against the trainer and
plain arithmetic. One that asks a server has a fixture NAME_kwargs, its engine_kwargs.

Tests with `every_engine` run over two scripted ones besides, which define `step` or `generate` alone. An engine of
one's own passes here too, if its name is added to ENGINES. Columns and refusals: tests/test_rollout_contract.py.
"""

import copy
import gc
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from configs.errors import ConfigError, MayPass
from configs.extras import present
from configs.schema import ActorConfig, ModelConfig, OptimConfig, RolloutConfig
from data.protocol import DataProto, object_array
from data.seeding import derive_seed
from data.types import Completion, Request, SamplingParams
from tests.engines import CopyOf, Generating, Stepping, drain, plans, play, probe_distance
from workers.dp_actor import DataParallelPPOActor
from workers.engine import TrainEngine
from workers.micro_batches import MicroBatchSize
from workers.models import load_causal_lm
from workers.rollout import Rollout, build_rollout, load_rollout_class
from workers.weight_sync import WeightSync

P, R = 40, 12
CPU = torch.device("cpu")
SCRIPTED = {"generate alone": Generating, "step alone": Stepping}
ENGINES = [*present("engine")]  # each, as far as it can run here
CONFIG = {"prompt_length": P, "response_length": R, "max_num_seqs": 64}
PROMPTS = [[20, 30, 40], [7], [50, 51, 52, 53, 54, 55, 56, 57, 58], [60, 61], [*range(10, 46)]]
GREEDY = SamplingParams(False, 1.0, -1, 1.0, R)
# As ENGINES, and then the scripted ones: pytest groups tests by the places of parameters, so each engine starts once.
every_engine = pytest.mark.parametrize("built", [*ENGINES, *SCRIPTED], indirect=True)


def sampling(
    max_tokens: int = R, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingParams:
    return SamplingParams(True, temperature, top_k, top_p, max_tokens, min_p)


@dataclass
class Bench:
    """An engine, and the policy whose weights it samples by."""

    engine: Rollout
    policy: TrainEngine
    version: int = 0

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.module

    @property
    def many(self) -> int:
        """Says how many requests are many and still quick: a server takes some milliseconds for each."""
        return 100 if self.engine.elsewhere else 1000

    def sync(self) -> None:
        self.version += 1
        self.engine.load_weights(self.policy.weights(), self.version)

    def generate(self, prompts: list[list[int]], params: SamplingParams, seed: int = 0) -> list[Completion]:
        return self.engine.generate(
            [Request(row, ids, params, derive_seed(seed, row)) for row, ids in enumerate(prompts)]
        )


@pytest.fixture(scope="module")
def tokenizer(wide_headed_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(wide_headed_model)


def load_policy(wide_headed_model: Path) -> TrainEngine:
    """Loads the tied model for P + R positions, matrices doubled: a random one is nearly uniform in any context."""
    model = load_causal_lm(ModelConfig(path=str(wide_headed_model), override_config={"max_position_embeddings": P + R}))
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            matrix.mul_(2)
    return TrainEngine(model, OptimConfig(), 10, CPU, torch.float32)


@pytest.fixture(scope="module", params=ENGINES)
def built(
    request: pytest.FixtureRequest, wide_headed_model: Path, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Bench]:
    policy, name, own = load_policy(wide_headed_model), request.param, {}
    kind = SCRIPTED.get(name) or load_rollout_class(name)
    if kind.elsewhere:
        own = {name: request.getfixturevalue(f"{name}_kwargs")}
    config = RolloutConfig(name=name, engine_kwargs=own, **CONFIG)
    try:
        kind.check(config, workers=1, gpus=0)
    except ConfigError as error:
        pytest.skip(str(error))
    engine = build_rollout(kind, config, tokenizer, policy.module)
    yield Bench(engine, policy)
    engine.close()


@pytest.fixture
def bench(built: Bench) -> Iterator[Bench]:
    """Gives each test the engine with its first weights and without stop ids."""
    weights = {name: tensor.clone() for name, tensor in built.model.state_dict().items()}
    built.engine.stop_ids = set()
    built.sync()
    yield built
    built.engine.abort(range(2000))
    built.model.load_state_dict(weights)


def change_weights(model: PreTrainedModel, lr: float | None = None) -> None:
    """Adds noise to all weights; with `lr`, moves each up or down by `lr`, as AdamW's first step does."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            size = lr or 0.2 * (parameter.std() if parameter.ndim == 2 else 1)
            parameter.add_(size * (noise.sign() if lr else noise))


def ids(completions: list[Completion]) -> list[list[int]]:
    return [done.token_ids for done in completions]


def batch_of(prompts: list[list[int]]) -> DataProto:
    return DataProto.from_dict(None, {"raw_prompt_ids": object_array(prompts)})


def distances(bench: Bench, batch: DataProto, temperature: float) -> torch.Tensor:
    """Returns |Δ log-prob| to the trainer for every token drawn."""
    size = MicroBatchSize(5, 0)
    actor = DataParallelPPOActor(ActorConfig(), bench.policy, size, size)
    scored = actor.compute_log_prob(batch, temperature, ["old_log_probs"])
    mask = batch.batch["response_mask"].bool()
    return (scored.old_log_probs - batch.batch["rollout_log_probs"])[mask].abs()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_the_trainer_gives_sampled_tokens_the_log_prob_they_were_drawn_with(bench: Bench, temperature: float):
    """Log-probs agree before and after a change of weights, tied head included; one prompt fills a vLLM cache block."""
    bench.engine.stop_ids = {*ids(bench.generate(PROMPTS, GREEDY))[0][4:5]}
    before = None
    for _ in range(2):
        batch = bench.engine.generate_sequences(batch_of(PROMPTS * 4), sampling(temperature=temperature), seed=3)
        found = distances(bench, batch, temperature)
        assert found.max() < 1e-4 and found.mean() < 1e-5
        assert distances(bench, batch, temperature + 0.05).max() > 1e-2, "temperatures must be told apart"
        if before is not None:
            assert distances(bench, before, temperature).max() > 1e-1, "the change must be seen"
        before = batch
        change_weights(bench.model)
        bench.sync()


def processed(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Token -> probability: temperature, min-p, top-k, then the nucleus, each renormalised, in plain Python."""
    powers = {token: math.exp(logit / params.temperature) for token, logit in enumerate(logits)}
    powers = {token: power for token, power in powers.items() if power >= params.min_p * max(powers.values())}
    ranked = sorted(powers, key=lambda token: -powers[token])[: params.top_k if params.top_k > 0 else None]
    total, mass, nucleus = sum(powers[token] for token in ranked), 0.0, []
    for token in ranked:
        if mass >= params.top_p:
            break
        nucleus.append(token)
        mass += powers[token] / total
    kept = sum(powers[token] for token in nucleus)
    return {token: powers[token] / kept for token in nucleus}


SAMPLINGS = [
    *(sampling(1), sampling(1, temperature=0.6), sampling(1, temperature=1.5, top_k=7), sampling(1, top_p=0.6)),
    *(sampling(1, min_p=0.2), sampling(1, temperature=1.3, top_k=20, top_p=0.8, min_p=0.05)),
]


@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
def test_tokens_are_drawn_from_the_processed_distribution(bench: Bench, params: SamplingParams):
    """Many draws have a χ² within 5 of its standard deviations, no token outside, and log-probs as computed by hand."""
    draws = 2 * bench.many
    with torch.no_grad():
        wanted = processed(bench.model(torch.tensor([PROMPTS[0]])).logits[0, -1].tolist(), params)
    completions = bench.generate([PROMPTS[0]] * draws, params)
    counts = Counter(done.token_ids[0] for done in completions)
    assert counts.keys() <= wanted.keys()
    for done in completions:
        assert done.log_probs == pytest.approx([math.log(wanted[done.token_ids[0]])], abs=1e-4)
    frequent = [token for token in wanted if wanted[token] * draws >= 5]
    pairs = [(counts[token], wanted[token] * draws) for token in frequent]
    rest = draws - sum(expected for _, expected in pairs)
    if rest >= 5:
        pairs.append((draws - sum(count for count, _ in pairs), rest))
    chi_square, freedom = sum((count - expected) ** 2 / expected for count, expected in pairs), len(pairs) - 1
    assert freedom >= 2
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_greedy_takes_the_likeliest_token_every_time(bench: Bench):
    """The likeliest token is that of a whole forward without a cache; prompts go together, again, and alone."""
    wanted = []
    for prompt in PROMPTS:
        tokens: list[int] = []
        for _ in range(R):
            with torch.no_grad():
                tokens.append(int(bench.model(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
        wanted.append(tokens)
    assert ids(bench.generate(PROMPTS, GREEDY)) == wanted
    assert ids(bench.generate(PROMPTS, GREEDY, seed=1)) == wanted
    assert [ids(bench.generate([prompt], GREEDY))[0] for prompt in PROMPTS] == wanted


def test_the_seed_of_a_row_alone_decides_its_draws(bench: Bench):
    """A row's draws depend on no company, place, request id, time of joining, or global generator."""
    rows = [Request(row, PROMPTS[row % 5], sampling(max_tokens=3 + row % 9), derive_seed(9, row)) for row in range(20)]
    together = {done.id: done for done in bench.engine.generate(rows)}
    torch.manual_seed(123)
    expected_draw = torch.rand(3)
    torch.manual_seed(123)
    alone = [bench.engine.generate([replace(row, id=7)])[0] for row in rows]
    assert torch.equal(torch.rand(3), expected_draw), "whoever draws globally must not feel it"
    assert ids(alone) == [together[row.id].token_ids for row in rows]
    for row in rows:
        assert alone[row.id].log_probs == pytest.approx(together[row.id].log_probs, abs=1e-4)
    rng, waiting, found = np.random.default_rng(0), [*rows], {}
    while waiting:
        for _ in range(rng.integers(1, 5)):
            if waiting:
                bench.engine.add(waiting.pop())
        for _ in range(rng.integers(0, 4)):
            found |= {done.id: done for done in bench.engine.step()}
    found |= drain(bench.engine)
    assert {i: done.token_ids for i, done in found.items()} == {i: done.token_ids for i, done in together.items()}


def test_samples_of_one_prompt_differ_and_equal_seeds_agree(bench: Bench):
    samples = ids(bench.generate([PROMPTS[4]] * 16, sampling()))
    assert len(set(map(tuple, samples))) > 12
    equal = bench.engine.generate([Request(row, PROMPTS[4], sampling(), seed=2**63 - 1) for row in range(4)])
    assert len(set(map(tuple, ids(equal)))) == 1


def test_every_stop_id_ends_a_response_with_mask_1_even_if_it_is_the_pad_id(bench: Bench):
    """The stop ids are two that are drawn, one of them the pad id, and two beyond the vocabulary."""
    first, second, *_ = ids(bench.generate(PROMPTS, GREEDY))
    stops, pad = (first[5], second[2]), bench.engine.pad_token_id
    bench.engine.stop_ids = {*stops, bench.model.config.vocab_size, 10**6}
    bench.engine.pad_token_id = stops[0]
    try:
        batch = bench.engine.generate_sequences(batch_of(PROMPTS * 20), sampling(), seed=3)
    finally:
        bench.engine.pad_token_id = pad
    ended_by = Counter()
    for row, length in enumerate(batch.batch["response_mask"].sum(1).tolist()):
        tokens = batch.batch["responses"][row].tolist()
        assert set(tokens[: length - 1]).isdisjoint(stops)
        assert set(tokens[length:]) <= {stops[0]}
        assert (batch.batch["rollout_log_probs"][row, :length] < 0).all()
        stopped = tokens[length - 1] in stops
        assert batch.end_reason[row] == ("terminated" if stopped else "max_tokens")
        assert stopped or length == R
        ended_by[tokens[length - 1]] += stopped
    assert ended_by[stops[0]] and ended_by[stops[1]]


def test_stop_ids_of_a_request_end_that_request_alone(bench: Bench):
    """Each request ends at its own stop ids or the engine's; ids beyond the vocabulary end nothing."""
    prompts = [*PROMPTS, PROMPTS[1]]  # the last without stop ids of its own
    whole = ids(bench.generate(prompts, GREEDY))
    everyones = whole[0][8]
    beyond = (bench.model.config.vocab_size, 10**6)
    asked = [(), (whole[1][3], *beyond), (whole[2][0],), (whole[3][5], whole[3][2]), (), ()]
    rows = [Request(i, prompts[i], replace(GREEDY, stop_token_ids=asked[i]), seed=0) for i in range(len(prompts))]
    bench.engine.stop_ids = {everyones}
    lengths = []
    for done, tokens, own in zip(bench.engine.generate(rows), whole, asked, strict=True):
        stops = {everyones, *own}
        length = next((place for place, token in enumerate(tokens, start=1) if token in stops), R)
        assert done.token_ids == tokens[:length]
        assert done.finish_reason == ("stop" if tokens[length - 1] in stops else "length")
        lengths.append(length)
    assert lengths[0] <= 9 and lengths[1] <= 4 and lengths[2] == 1 and lengths[3] <= 3 and lengths[5] > lengths[1]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 5, "request 3 has an empty prompt"),
        ([5], 0, "asks for max_tokens=0: it must be 1 or more"),
        ([5, 10**6], 5, "token ids from 5 to 1000000"),
        ([-1], 5, "token ids from -1 to -1"),
        ([5] * (P + 1), R, rf"{P + 1} tokens of prompt and max_tokens={R} are more than {P + R}.*lower"),
        ([5] * (P + R), 1, "are more than"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name_and_others_go_on(bench: Bench, prompt, max_tokens, message):
    bench.engine.add(Request(0, PROMPTS[0], GREEDY, 0))
    with pytest.raises(ValueError, match=message):
        bench.engine.add(Request(3, prompt, sampling(max_tokens), seed=0))
    assert list(drain(bench.engine)) == [0]
    with pytest.raises(ValueError, match=message):  # with a good one before it, which must not linger
        bench.engine.generate([Request(1, PROMPTS[0], GREEDY, 0), Request(3, prompt, sampling(max_tokens), 0)])
    assert not bench.engine.has_unfinished_requests()


def test_prompts_up_to_the_limit_of_the_context_are_answered(bench: Bench):
    long, short = bench.generate([[5] * P, [5]], GREEDY)
    assert len(long.token_ids) == len(short.token_ids) == R
    [last] = bench.generate([[5] * (P + R - 1)], replace(GREEDY, max_tokens=1))
    assert len(last.token_ids) == 1


@every_engine
def test_completions_come_in_the_order_of_the_requests(bench: Bench):
    rows = [Request(row, prompt, GREEDY, seed=row) for row, prompt in enumerate(PROMPTS)]
    alone = [bench.engine.generate([row])[0].token_ids for row in rows]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], []):
        found = bench.engine.generate([rows[row] for row in order])
        assert [(done.id, done.token_ids) for done in found] == [(row, alone[row]) for row in order]
        assert all(len(done.token_ids) == len(done.log_probs) for done in found)
    assert not bench.engine.has_unfinished_requests() and bench.engine.step() == []
    texts = bench.engine.inference(PROMPTS)
    assert texts == bench.engine.inference(PROMPTS) and len(texts) == len(PROMPTS) and all(texts)


@every_engine
def test_waiting_and_running_requests_are_aborted_while_others_go_on(bench: Bench):
    rows = [Request(row, PROMPTS[row % 5], sampling(), derive_seed(1, row)) for row in range(100)]  # places: 64
    wanted = {done.id: done.token_ids for done in bench.engine.generate(rows)}
    for row in rows:
        bench.engine.add(row)
    found = {done.id: done for done in bench.engine.step() + bench.engine.step()}
    dropped = {3, 99} - found.keys()  # a server may have answered some already
    bench.engine.abort([0, 3, 99, 1000])
    bench.engine.add(replace(rows[3], id=200))  # in a place that is free again
    bench.engine.add(rows[0])  # under an id that is free again
    found |= drain(bench.engine)
    assert {i: done.token_ids for i, done in found.items()} == {
        **{i: tokens for i, tokens in wanted.items() if i not in dropped}, 200: wanted[3],
    }  # fmt: skip
    for row in rows:
        bench.engine.add(row)
    bench.engine.step()
    bench.engine.abort(range(100))
    assert not bench.engine.has_unfinished_requests() and bench.engine.step() == []


def test_tokens_so_far_are_the_completion_piece_by_piece(bench: Bench):
    """Requests that ask get each token once, whatever else runs, and nothing after an end or an abort."""
    if type(bench.engine).tokens_so_far is Rollout.tokens_so_far:
        pytest.skip("all comes with the completion")
    for i, prompt in enumerate(PROMPTS):
        bench.engine.add(Request(i, prompt, sampling(R - i), seed=i, piecewise=i in (0, 2, 3)))
    pieces: dict[int, tuple[list[int], list[float]]] = {0: ([], []), 2: ([], []), 3: ([], [])}
    done: dict[int, Completion] = {}
    while bench.engine.has_unfinished_requests():
        done |= {one.id: one for one in bench.engine.step()}
        if len(pieces[3][0]) >= 4:
            bench.engine.abort([3])
        found = bench.engine.tokens_so_far({number: len(ids) for number, (ids, _) in pieces.items()})
        assert found.keys() <= pieces.keys() - done.keys()
        assert 3 not in found or len(pieces[3][0]) < 4
        for number, (token_ids, log_probs) in found.items():
            assert token_ids, "a step draws a token of each, and it is there at once"
            pieces[number][0].extend(token_ids)
            pieces[number][1].extend(log_probs)
    assert done.keys() == {0, 1, 2, 4} and len(pieces[3][0]) >= 4
    for number in (0, 2):
        token_ids, log_probs = pieces[number]
        assert token_ids == done[number].token_ids[:-1] and log_probs == done[number].log_probs[:-1]
    assert bench.engine.tokens_so_far({0: 0}) == {}


def test_an_episodes_next_turn_is_answered_as_if_nothing_were_kept(bench: Bench):
    """Ragged episodes of 1 to 5 turns pause between their turns; the past of one changes under way."""
    most = [1, 2, 3, 4]
    samplings = [replace(GREEDY, max_tokens=size) for size in most] + [sampling(size, top_k=20) for size in most]
    episodes = plans(0, samplings, bench.model.config.vocab_size)
    wanted = play(bench.engine, episodes, keeps=False)
    found = play(bench.engine, episodes, keeps=True)
    assert len(found) == 30 and found.keys() == wanted.keys()
    for key, (prompt, done) in wanted.items():
        assert found[key][0] == prompt and found[key][1].token_ids == done.token_ids, key
        assert found[key][1].log_probs == pytest.approx(done.log_probs, abs=1e-4), key
    bench.engine.forget([100, 12345])  # of which nothing is kept


@every_engine
def test_a_request_in_flight_is_not_added_again(bench: Bench):
    request = Request(2, PROMPTS[0], GREEDY, 0)
    bench.engine.add(request)
    with pytest.raises(AssertionError, match="request 2 is waiting already"):
        bench.engine.add(request)
    if not isinstance(bench.engine, Generating):  # it knows of no others
        with pytest.raises(AssertionError, match="in flight, whose completions would be lost"):
            bench.engine.generate([replace(request, id=3)])
    if not isinstance(bench.engine, (*SCRIPTED.values(),)):  # a step ends what it begins
        bench.engine.step()
        with pytest.raises(AssertionError, match="request 2 is running already"):
            bench.engine.add(request)
    assert list(drain(bench.engine)) == [2]


@every_engine
def test_completions_carry_the_version_of_their_weights(bench: Bench):
    bench.engine.load_weights(bench.policy.weights(), 41)
    assert {done.weight_version for done in bench.generate(PROMPTS, GREEDY)} == {41}
    bench.engine.add(Request(0, PROMPTS[0], GREEDY, 0))
    with pytest.raises(AssertionError, match="requests in flight: abort them first"):
        bench.engine.load_weights(bench.policy.weights(), 42)
    drain(bench.engine)
    bench.engine.sleep()
    bench.engine.wake_up()
    assert bench.generate(PROMPTS[:1], GREEDY)[0].weight_version == 41


def test_a_policy_that_has_diverged_is_said_to_be(bench: Bench):
    with torch.no_grad():
        bench.model.model.norm.weight[0] = torch.nan  # the last: a server's cache of keys and values stays finite
    bench.engine.load_weights(bench.policy.weights(), 3)
    with pytest.raises(FloatingPointError, match="NaN or infinite after 3 updates of its weights"):
        bench.generate(PROMPTS, sampling())
    assert not bench.engine.has_unfinished_requests()


def test_an_engine_with_other_weights_than_the_trainer_is_caught(bench: Bench, monkeypatch):
    """The first sync catches stale weights by nothing but the log-probs of a probe."""
    assert probe_distance(bench.engine, bench.policy) < 1e-5
    if not bench.engine.own_weights:
        pytest.skip("it samples from the trainer's own module")
    stale = {name: tensor.clone() for name, tensor in bench.policy.weights()}
    with torch.no_grad():
        bench.model.model.embed_tokens.weight.mul_(1.1)
    monkeypatch.setattr(bench.policy, "weights", lambda merged: stale.items())
    with pytest.raises(RuntimeError, match=r"of a probe differ from the trainer's by up to .*\d tensors of .* MB were"):
        WeightSync(bench.engine, bench.policy).update(9)


def test_a_weight_that_is_never_handed_over_is_caught_at_once(bench: Bench, monkeypatch):
    """The sync compares names: after a step at lr=1e-6, log-probs cannot show that a weight is missing."""
    policy, module = bench.policy, bench.engine.module
    engine = bench.engine if bench.engine.own_weights else CopyOf(bench.engine, copy.deepcopy(module))
    sync = WeightSync(engine, policy)
    assert sync.update(100)["rollout/sync_max_logprob_diff"] < 1e-5
    change_weights(bench.model, 1e-6)
    sent = dict(policy.weights())
    del sent["model.layers.1.mlp.down_proj.weight"]
    monkeypatch.setattr(policy, "weights", lambda merged: iter(sent.items()))
    with pytest.raises(RuntimeError, match=r"never handed model\.layers\.1\.mlp\.down_proj\.weight.*\d+ tensors of"):
        sync.update(101)
    bench.engine.module = module


def test_a_sync_that_brings_nothing_or_what_has_no_place_is_refused(bench: Bench):
    if not bench.engine.own_weights:
        pytest.skip("it samples from the trainer's own module")
    with pytest.raises(ValueError, match="was given no weights for version 9"):
        bench.engine.load_weights([], 9)
    with pytest.raises((ValueError, MayPass), match=r"no module or parameter named .nowhere"):  # a 500 may
        bench.engine.load_weights([("model.nowhere.weight", torch.zeros(3))], 9)


def test_an_engine_leaves_the_process_as_it_is(bench: Bench):
    """Threads, variables, garbage collector, precision and hooks are those from before the engine's start."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert not [name for name in os.environ if name.startswith("VLLM_")]
    assert gc.get_freeze_count() == 0
    assert torch.get_float32_matmul_precision() == "highest"
    assert sys.excepthook.__module__ != "torch.distributed.distributed_c10d"
    if (maps := Path("/proc/self/numa_maps")).is_file():
        assert " bind:" not in maps.read_text(), "memory of this process would be that of one NUMA node's"
