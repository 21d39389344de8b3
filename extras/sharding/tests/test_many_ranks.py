"""Ranks that are not there, as benchmarks/ranks.py plays them, do what real ones do, and what docs/sharding.md says."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.ranks import ACTOR, PPO, Watch, config_of, first_difference, play, play_ranks, rows_of_a_rank
from tests.ranks import Ranks
from tests.test_replicas import save_two_layers

SMALL = ["data.max_prompt_length=8", "data.max_response_length=6", f"{ACTOR}.ppo_max_token_len_per_gpu=56"]
SMALL += [f"{ACTOR}.fsdp_config.dtype=float32"]
SPLIT, IN_8 = f"{ACTOR}.tensor_parallel_size=2", f"{ACTOR}.fsdp_config.fsdp_size=8"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_layers(tmp_path_factory.mktemp("models") / "two_layers")


@pytest.mark.parametrize(("size", "keys"), [(2, [SPLIT, PPO]), (3, [PPO])])
def test_a_rank_that_is_not_there_does_what_a_real_one_does(model: Path, size: int, keys: list[str]):
    ranks, config = Ranks(size), config_of(model, size, SMALL + keys)
    played = ranks.run(play, config, rows_of_a_rank(config, 2), Watch()) + play_ranks(config, 2, [0, size - 1])
    ranks.pool.shutdown()
    assert first_difference(played) is None and len(played[0].calls) > 40


@pytest.mark.parametrize(("ranks", "shards", "keys"), [(8, 8, []), (64, 8, [IN_8])])
def test_an_update_brings_what_the_page_says(model: Path, ranks: int, shards: int, keys: list[str]):
    first, last = play_ranks(config_of(model, ranks, SMALL + keys), 2, [0, ranks - 1])
    assert first_difference([first, last]) is None
    module, others, groups = AutoModelForCausalLM.from_pretrained(model), (shards - 1) / shards, ranks // shards
    padded = {weight: -(-len(weight) // shards) * shards * weight[0].numel() for weight in module.parameters()}
    total, layered = sum(padded.values()), sum(padded[weight] for weight in module.model.layers.parameters())
    sent = {"allgather": (total + layered) * others, "reducescatter": total * others}
    sent["allreduce"] = 2 * total / shards * (groups - 1) / groups  # of 2 micro-batches, in 4 bytes
    calls = [call for call in last.calls if call.phase == "actor learns" and call.bytes != 4 * len(padded)]  # norms
    for kind, numbers in sent.items():
        assert sum(call.received for call in calls if call.kind == kind) == 2 * 4 * numbers
    assert last.held <= 12 * total // shards + 4 * len(padded), "weights, moments and AdamW's counts"
    left_out = last.calls.pop()  # as by a branch that one rank does not take
    assert f"rank 0 has {left_out}, rank {ranks - 1} has None" in first_difference([first, last])


def test_parts_of_a_layer_sum_activations_three_times_and_gradients_twice(model: Path):
    [rank] = play_ranks(config_of(model, 2, [*SMALL, SPLIT]), 2, [0])
    sums = [call.bytes for call in rank.calls if call.phase == "actor learns" and call.kind == "allreduce"]
    assert sums.count(max(sums)) == 2 * 2 * (3 + 2), "2 micro-batches of 2 layers"
