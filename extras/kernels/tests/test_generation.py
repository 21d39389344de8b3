"""Generation by the kernels: prompts that are read once, turns that are kept, and what the core promises of rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedTokenizerBase

from data.seeding import derive_seed
from data.types import Request
from extras.kernels.generation import PromptCache, SharedPrompts
from tests import test_rollout as core
from tests.engines import drain, plans, play
from tests.test_rollout import FAMILIES, GREEDY, PROMPTS, P, R, assert_same, make_rollout, mixed_requests, sampling
from workers.hf_rollout import HFRollout

FORWARDS = ("packed", "padded")


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of prompts that go through the model, of each time that requests join."""
    counts, new_tokens = [], SharedPrompts._new_tokens

    def counted(*args: Any) -> list[int]:
        new = new_tokens(*args)
        counts.append(sum(new))
        return new

    monkeypatch.setattr(SharedPrompts, "_new_tokens", counted)
    return counts


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_whole_forwards_without_cache(tokenizer, family: str, forward: str, monkeypatch: pytest.MonkeyPatch):
    core.test_equals_whole_forwards_without_cache_whoever_shares_the_batch(tokenizer, family, forward, monkeypatch)


@pytest.mark.parametrize(
    ("family", "forward"),
    [("Llama, 2 query heads a key head", "padded"), ("Mistral, a window shorter than the sequences", "packed")],
)
def test_a_row_depends_on_nothing_else(tokenizer, family: str, forward: str):
    core.test_a_row_depends_on_neither_its_company_nor_its_pass_nor_the_time_it_joined(tokenizer, family, forward)


@pytest.mark.parametrize("forward", FORWARDS)
def test_passes_and_traces_are_the_cores(tokenizer, forward: str, monkeypatch: pytest.MonkeyPatch):
    core.test_a_pass_over_prompts_holds_no_more_tokens_than_it_may(tokenizer, forward)
    core.test_generation_leaves_no_trace_on_the_model(tokenizer, monkeypatch, forward)


@pytest.mark.parametrize("budget", [8192, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_next_turns_are_answered_as_if_nothing_were_kept(tokenizer, prefilled: list[int], family: str, budget: int):
    """Answers are those of an engine that keeps nothing, however passes are cut; episodes leave no trace in it."""
    samplings = [replace(GREEDY, max_tokens=1), replace(GREEDY, max_tokens=4), sampling(3), sampling(4, 0.7)]
    rollout = make_rollout(core.random_model(family, "packed"), tokenizer, (40,), max_num_batched_tokens=budget)
    episodes = plans(1, samplings, 300)
    prefilled.clear()  # of the engine's trial
    wanted = play(rollout, episodes, keeps=False)
    before = sum(prefilled)
    found = play(rollout, episodes, keeps=True)
    assert_same([done for _, done in found.values()], {done.id: done for _, done in wanted.values()})
    assert sum(prefilled) - before < before / 2
    assert rollout.batch is None and rollout.module.training


def keep(rollout: HFRollout, episode: int, prompt: list[int], max_tokens: int = 3) -> list[int]:
    """The prompt and the response of a turn that is kept."""
    request = Request(episode, prompt, replace(GREEDY, max_tokens=max_tokens), 0, episode=episode)
    return prompt + rollout.generate([request])[0].token_ids


def test_only_what_is_new_of_a_turn_is_prefilled(tokenizer: PreTrainedTokenizerBase, prefilled: list[int]):
    """Prefills a group's first prompt once; then, in each turn, the token that was drawn last and what the episode was
    told; a past that has changed, from the change on; and all tokens once nothing is kept any more."""
    rollout = make_rollout(core.random_model("Llama, untied", "packed"), tokenizer)
    told, counts = {7: [11, 12], 8: [13], 9: [*range(14, 20)]}, []

    def answer(prompts: dict[int, list[int]]) -> dict[int, list[int]]:
        prefilled.clear()
        requests = [Request(e, ids, sampling(3, 1.0), derive_seed(e), episode=e) for e, ids in prompts.items()]
        done = rollout.generate(requests)
        counts.append(sum(prefilled))
        return {e: prompts[e] + one.token_ids for e, one in zip(prompts, done, strict=True)}

    texts = answer(dict.fromkeys(told, PROMPTS[2]))
    for _ in range(4):
        texts = answer({e: ids + told[e] for e, ids in texts.items()})
    assert counts == [len(PROMPTS[2]), *[sum(1 + len(ids) for ids in told.values())] * 4]
    changed = [*texts[9][:20], 21 + texts[9][20] % 2, *texts[9][21:]]
    answer({9: changed, 8: texts[8]})
    assert counts[-1] == len(changed) - 20 + 1
    rollout.forget([7, 8])
    answer({8: [*texts[8], 5], 9: [*changed, 5]})
    assert counts[-1] == len(texts[8]) + 1 + 1
    rollout.sleep()
    answer({9: changed})
    assert counts[-1] == len(changed)


@pytest.mark.parametrize(
    "drop", [lambda rollout: rollout.load_weights([], 1), HFRollout.sleep, HFRollout.close, lambda r: r.forget([1, 2])]
)
def test_what_is_kept_goes_with_the_weights_or_the_episodes(tokenizer, prefilled: list[int], drop: Callable):
    """Turns that come one by one do not set the model up each time: it stays as it decodes while any is kept."""
    model = core.random_model("Llama, untied", "packed").train()
    rollout = make_rollout(model, tokenizer)
    keep(rollout, 1, PROMPTS[0])
    keep(rollout, 2, PROMPTS[1])
    assert not rollout.has_unfinished_requests() and not model.training and rollout.batch.turns.turns.keys() == {1, 2}
    drop(rollout)
    assert model.training and rollout.batch is None
    prefilled.clear()
    text = keep(rollout, 1, PROMPTS[0])
    assert sum(prefilled) == len(PROMPTS[0])
    rollout.forget([1])
    assert text[:3] == PROMPTS[0] and model.training


def test_no_more_is_kept_than_the_rows_side_by_side_would_have(tokenizer: PreTrainedTokenizerBase):
    """Keeps at most three sequences of 21 tokens, the newest; what runs is not counted, what is aborted not kept."""
    rollout = make_rollout(core.random_model("Llama, untied", "packed"), tokenizer, max_num_seqs=3)
    texts = {episode: keep(rollout, episode, [7] * 18) for episode in (1, 2, 3)}
    assert rollout.batch.turns.tokens == 60 and [*rollout.batch.turns.turns] == [1, 2, 3]
    texts[1] = keep(rollout, 1, texts[1])
    assert rollout.batch.turns.tokens == 40 + 23 and [*rollout.batch.turns.turns] == [2, 3, 1]
    keep(rollout, 4, [8, 9])
    assert rollout.batch.turns.tokens == 20 + 23 + 4 and [*rollout.batch.turns.turns] == [3, 1, 4]
    rollout.add(Request(1, texts[1], GREEDY, 0, episode=1))
    rollout.step()
    assert [*rollout.batch.turns.turns] == [3, 4]
    rollout.abort([1])
    assert [*rollout.batch.turns.turns] == [3, 4] and not rollout.has_unfinished_requests()
    rollout.add(Request(3, texts[3], GREEDY, 0, episode=3))
    rollout.step()
    rollout.forget([3])
    drain(rollout)
    assert [*rollout.batch.turns.turns] == [4], "3 was forgotten while it ran"
    rollout.forget([1, 2])
    assert rollout.batch is not None and not rollout.module.training, "episode 4 may go on"
    rollout.forget([4])
    assert rollout.batch is None and rollout.module.training


def test_memory_is_that_of_the_rows_that_run_side_by_side(tokenizer: PreTrainedTokenizerBase):
    """A cache is no larger than the running rows need, however many have come and gone since the engine was idle."""
    rollout = make_rollout(core.random_model("Llama, untied", "packed"), tokenizer, max_num_seqs=8)
    columns, row = [], 0
    for _ in range(60):
        while len(rollout.waiting) < 4:
            rollout.add(Request(row, PROMPTS[row % 5], sampling(max_tokens=2 + row % R), row))
            row += 1
        rollout.step()
        columns.append(rollout.batch.cache.columns)
    assert row > 60 and max(columns) <= 1 + R and len(rollout.batch) <= rollout.batch.cache.places <= 8
    drain(rollout)
    assert rollout.batch is None


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_are_kept_in_bfloat16_where_that_multiplies_them(tokenizer, family, monkeypatch):
    """Keys and values take half the bytes under autocast, as the memory that is announced counts them; tokens and
    log-probs of each turn are to the bit those of a cache in float32."""
    runs, model = [], core.random_model(family, "packed")
    for kept in (PromptCache.update, DynamicCache.update):
        monkeypatch.setattr(PromptCache, "update", kept)
        with torch.autocast("cpu", torch.bfloat16):
            rollout, done, sizes = make_rollout(model, tokenizer, (7, 40, 80), max_num_seqs=5), {}, []
            for request in mixed_requests(12):
                rollout.add(replace(request, episode=request.id))
            while rollout.has_unfinished_requests():
                for one in rollout.step():
                    done[one.id] = one
                    if one.id < 12:
                        longer = (PROMPTS[one.id % 5] + one.token_ids)[:P]
                        rollout.add(Request(one.id + 12, longer, sampling(4), one.id, episode=one.id))
                cache = rollout.batch.cache
                memory = [layer.values for layer in cache.layers] + [layer.prompt_keys for layer in cache.layers]
                sizes.append(sum(tensor.nbytes for tensor in memory))
            rollout.sleep()
        runs.append((rollout.batch_class, done, sizes))
    (way, found, halved), (same_way, wanted, sizes) = runs
    assert way is same_way is SharedPrompts and found == wanted and len(found) == 24
    width = 1 if family == "GPT-2" else 2  # only rotations leave float32
    assert [width * size for size in halved] == sizes
