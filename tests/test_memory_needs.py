"""The arithmetic of a GPU's memory, by hand and against what a forward really keeps."""

import re
from dataclasses import fields, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2Config

from configs.errors import ConfigError
from configs.schema import RolloutConfig
from tests.runs import compose
from tests.shapes import COUNTED
from workers.memory_needs import GIB, HEAD, LOGITS, ModelSize, check_memory, memory_needs, memory_report

SHAPE = Qwen2Config(**COUNTED)
LAYER = (32 * 32 + 32) + 2 * (32 * 16 + 16) + 32 * 32 + 3 * 32 * 56 + 2 * 32
PARAMETERS = 96 * 32 + 3 * LAYER + 32
SIZE = ModelSize(
    parameters=PARAMETERS,
    layers=3,
    hidden=32,
    matrices=3 * (64 + 48 + 48 + 64 + 3 * 88),
    norms=7 * 32,
    cached=2 * 3 * 2 * 8,
    vocabulary=96,
)
SETTINGS = (
    "trainer.n_gpus_per_node=1",
    "data.train_batch_size=8",
    "data.max_prompt_length=10",
    "data.max_response_length=6",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
    "algorithm.adv_estimator=grpo",
)


def needs_of(*overrides: str, critic: ModelSize | None = None, width: int = 2):
    return memory_needs(compose(*SETTINGS, *overrides, name="ppo_trainer"), SIZE, critic, None, width, card=80 * GIB)


def test_a_models_size_is_read_off_its_shape_without_weights():
    assert ModelSize.of(SHAPE) == SIZE
    with_head = ModelSize.of(SHAPE, AutoModelForTokenClassification)
    assert with_head.parameters > PARAMETERS and with_head.matrices == SIZE.matrices


def test_the_parts_by_hand():
    needs = needs_of("actor_rollout_ref.actor.use_kl_loss=true")
    policys = {"weights": 4 * PARAMETERS, "AdamW": 8 * PARAMETERS, "reference": 4 * PARAMETERS}
    assert needs.held == policys | {"critic": 0, "reward model": 0}
    tokens = 32 * 6 + 8 * 10  # 32 responses, and each of 8 prompts once
    assert needs.generation == {"keys and values": tokens * 96 * 2}
    activations = 100 * (SIZE.matrices * 2 + 2 * SIZE.norms * 4)
    gradients, copies = 4 * PARAMETERS, 2 * PARAMETERS
    assert needs.update == {
        "gradients": gradients, "copies of weights": copies, "activations": activations, "logits": HEAD
    }  # fmt: skip
    assert needs.least == 20 * PARAMETERS
    assert needs.peak == 16 * PARAMETERS + gradients + copies + activations + HEAD


def test_what_each_setting_changes():
    plain = needs_of()
    assert plain.held["reference"] == 0
    assert needs_of(width=4).update["copies of weights"] == 0
    whole = needs_of("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10000").update["activations"]
    assert whole == plain.update["activations"] / 100 * 4 * 4 * 16  # no more than the mini-batch has
    by_rows = needs_of("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2").update["activations"]
    assert by_rows == plain.update["activations"] / 100 * 2 * 16
    checkpointed = needs_of("actor_rollout_ref.model.enable_gradient_checkpointing=true").update["activations"]
    assert checkpointed == 100 * (3 * 32 * 4 + (SIZE.matrices * 2 + 2 * SIZE.norms * 4) // 3)
    assert needs_of("actor_rollout_ref.model.kernels=off").update["logits"] == LOGITS * 96 * 100
    few = needs_of("actor_rollout_ref.rollout.max_num_seqs=8").generation["keys and values"]
    assert few == (8 * 6 + 2 * 10) * 96 * 2
    four = needs_of("trainer.n_gpus_per_node=4")
    assert four.generation["keys and values"] == (8 * 6 + 2 * 10) * 96 * 2 and four.held == plain.held


def test_a_critic_is_held_and_the_larger_of_the_two_updates_counts():
    large = replace(SIZE, parameters=10 * PARAMETERS)
    needs = needs_of("algorithm.adv_estimator=gae", critic=large)
    assert needs.held["critic"] == 120 * PARAMETERS and needs.update["gradients"] == 40 * PARAMETERS
    needs = needs_of("algorithm.adv_estimator=gae", critic=replace(SIZE, parameters=1, matrices=1, norms=1))
    assert needs.update["gradients"] == 4 * PARAMETERS


@pytest.mark.skipif(
    "gpu_memory_utilization" not in {item.name for item in fields(RolloutConfig)}, reason="the vllm engine is not here"
)
def test_vllm_takes_the_share_that_it_is_told_and_gives_it_back_if_it_sleeps():
    share = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.25"]
    asleep = needs_of(*share, "actor_rollout_ref.rollout.free_cache_engine=true")
    awake = needs_of(*share, "actor_rollout_ref.rollout.free_cache_engine=false")
    assert asleep.generation == awake.generation == {"vLLM": 20 * GIB}
    assert awake.peak == asleep.peak + 20 * GIB - max(0, 20 * GIB - sum(asleep.update.values()))


def kept_by_a_forward(tokens: int) -> int:
    """Bytes of all that autograd keeps of a forward through the layers, weights left out."""
    model = AutoModelForCausalLM.from_config(SHAPE).base_model
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            alive.append(tensor)
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    alive: list[torch.Tensor] = []  # so that no storage takes the place of another
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(kept.values())


def test_a_forward_keeps_about_what_is_counted():
    a_token = (kept_by_a_forward(96) - kept_by_a_forward(32)) / 64
    assert SIZE.activations(4, checkpointed=False) == pytest.approx(a_token, rel=0.35)


def test_what_clearly_does_not_fit_is_refused_and_what_may_not_is_said(capsys):
    needs = needs_of("actor_rollout_ref.actor.use_kl_loss=true")
    check_memory(needs, needs.peak)
    assert capsys.readouterr().err == ""
    check_memory(needs, needs.peak - 1)
    said = capsys.readouterr().err
    assert said.startswith("notice: this may not fit: about 1.0 GiB") and "ppo_max_token_len_per_gpu" in said
    with pytest.raises(ConfigError, match=r"need 0\.0 GiB of a GPU, .*use_kl_loss=false"):
        check_memory(needs, needs.least - 1)


def test_it_is_one_line_and_none_without_a_gpu():
    line = str(needs_of())
    assert re.fullmatch(
        r"a GPU's memory in GiB, about: held weights .* \+ AdamW .*; generating keys and values .*; updating gradients "
        r".* \+ logits 1\.0; at most 1\.0 at once",
        line,
    )
    assert memory_report(compose(*SETTINGS, "trainer.n_gpus_per_node=0", name="ppo_trainer")) is None


def test_seven_billion_parameters_on_an_h200():
    seven = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    size = ModelSize.of(seven)
    assert size.parameters == 7_615_616_512  # Qwen2.5-7B's
    config = compose(*SETTINGS, "actor_rollout_ref.model.enable_gradient_checkpointing=true", name="ppo_trainer")
    needs = memory_needs(config, size, None, None, 2, card=140 * GIB)
    assert needs.least / GIB == pytest.approx(113.5, abs=0.1)
    check_memory(needs, 140 * GIB)
    with pytest.raises(ConfigError):
        check_memory(needs, 80 * GIB)
