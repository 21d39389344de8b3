"""Ranks that are not there, as benchmarks/ranks.py plays them, do what real ones do, and what docs/sharding.md says."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.ranks import (
    ACTOR,
    HANDED_OVER,
    PPO,
    Call,
    Watch,
    config_of,
    first_difference,
    play,
    play_ranks,
    rows_of_a_rank,
    untried,
)
from configs.schema import Config
from custom.tiny_model import build_tokenizer
from tests.ranks import Ranks
from workers import models

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # as in extras/sharding/fsdp2.py
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
PROMPTS = 2  # of a rank: two micro-batches of the policy
SMALL = [
    *("data.max_prompt_length=8", "data.max_response_length=6", "actor_rollout_ref.rollout.n=2"),
    *(f"{ACTOR}.ppo_max_token_len_per_gpu=20", f"{ACTOR}.fsdp_config.dtype=float32"),
]
PLANTED = """
import torch.distributed as dist
from training.core_algos import agg_loss, register_policy_loss

@register_policy_loss("planted")
def planted(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, **_):
    loss = agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **config.global_batch_info)
    if dist.get_rank() != 1:
        dist.all_reduce(loss.detach().clone())
    return loss, {}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "two_layers"
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(params=[2, 3])
def real(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.pool.shutdown()


def play_for_real(config: Config) -> Any:
    """…without the trial of a model's forward, which takes longer than the step."""
    with patch.object(models, "scoring_model", untried):
        return play(config, rows_of_a_rank(config, PROMPTS), Watch())


def test_a_rank_that_is_not_there_does_what_a_real_one_does(real: Ranks, model: Path):
    """…in the same order, to the byte: sharded, with a critic beside the policy, and split in two."""
    split = [PPO, f"{ACTOR}.tensor_parallel_size=2"]
    for keys in ([], split) if real.size == 2 else ([PPO],):
        config = config_of(model, real.size, [*SMALL, *keys])
        found = real.run(play_for_real, config)
        assert first_difference([*found, *play_ranks(config, PROMPTS, [0, real.size - 1])]) is None
    assert {call.phase for call in found[0].calls} == {"critic scores", "critic learns", "actor learns", HANDED_OVER}


@pytest.mark.parametrize(("ranks", "replicas"), [(8, 1), (64, 8)])
def test_a_step_brings_what_the_page_says(model: Path, ranks: int, replicas: int):
    """…of each of two micro-batches."""
    shards, keys = ranks // replicas, [f"{ACTOR}.fsdp_config.fsdp_size={ranks // replicas}"]
    [last] = play_ranks(config_of(model, ranks, [*SMALL, *keys]), PROMPTS, [ranks - 1])
    received: Counter[str] = Counter()
    weights = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    norms = 4 * len([*weights.parameters()])  # bytes, of all weights together
    for call in (call for call in last.calls if call.phase == "actor learns" and call.bytes != norms):
        received[call.kind] += call.received
    layered = sum(weight.numel() for weight in weights.model.layers.parameters())
    sent = 2 * 4 * weights.num_parameters() * (shards - 1) / shards
    assert received["allgather"] == sent + 2 * 4 * layered * (shards - 1) / shards
    assert received["reducescatter"] == sent
    summed = 2 * 2 * 4 * weights.num_parameters() / shards * (replicas - 1) / replicas
    assert received["allreduce"] == summed, "between replicas"
    assert last.held == 12 * weights.num_parameters() // shards + norms, "which AdamW's counts of steps are as large as"


def test_ranks_that_compute_layers_together_have_the_same_order(model: Path):
    keys = [f"{ACTOR}.tensor_parallel_size=2", f"{ACTOR}.fsdp_config.fsdp_size=2"]
    played = play_ranks(config_of(model, 8, [*SMALL, *keys]), PROMPTS, [0, 7])
    assert first_difference(played) is None and played[0].layout == "2 replicas × 2 shards × 2 parts"
    assert {(call.size, call.stride) for call in played[0].calls} >= {(2, 1), (2, 2), (2, 4), (8, 1)}


def test_a_branch_that_one_rank_takes_is_found(model: Path, tmp_path: Path):
    (tmp_path / "planted.py").write_text(PLANTED)
    keys = [f"{ACTOR}.policy_loss.loss_mode=planted", f"actor_rollout_ref.model.external_lib={tmp_path}/planted.py"]
    difference = first_difference(play_ranks(config_of(model, 3, [*SMALL, *keys]), PROMPTS, [0, 1]))
    extra = Call("actor learns", "allreduce", 3, 1, 4)
    assert f"rank 0 has {extra}, rank 1 has Call(phase='actor learns', kind='allgather'" in difference
