"""Families of models, tiny and random: the trainer against transformers' eager attention, row by row; the packed
forward against the padded one; generation against the trainer. docs/models.md has the table of what each takes."""

import copy
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import ModelConfig, RolloutConfig
from data.padding import collate
from data.protocol import DataProto
from data.types import Request, SamplingParams
from tests.batches import CUTS, PROMPT_WIDTH, RESPONSE_WIDTH, TEMPERATURE, ragged_batch, unpadded
from tests.runs import ROOT
from workers.adapter import NoAdapter
from workers.forward_check import rope_changes
from workers.hf_rollout import HFRollout, NoCacheBatch, RunningBatch, SeparateRows
from workers.micro_batches import score
from workers.rollout import sample_of
from workers.scoring_model import padded_scores, scoring_model, set_forward, with_hooks

CLOSE = 1e-4
LONGEST = PROMPT_WIDTH + RESPONSE_WIDTH
WINDOW = 5  # tokens; most rows go past it
SHAPE = {
    "vocab_size": 102, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4}
LATENT |= {"num_key_value_heads": 4}
LAYERS = ["sliding_attention", "full_attention"]
PER_LAYER = {
    "num_hidden_layers": 4, "head_dim": 8, "layer_types": LAYERS * 2, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 102, "sliding_window": WINDOW,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5]}
LINEAR = {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
LINEAR |= {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "use_mamba_kernels": False}
PACKED, PADDED, EAGER = "packed", "padded", "padded, eager"
SHARED, OWN, WHOLE = "shared prompts", "a prompt a row", "whole sequences"


class Family(NamedTuple):
    model_type: str
    training: str
    generation: str
    settings: dict[str, Any]


def family(model_type: str, training: str = PACKED, generation: str = SHARED, **settings: Any) -> Family:
    return Family(model_type, training, generation, settings)


FAMILIES = {
    "Llama": family("llama"),
    "Mistral, with a window": family("mistral", sliding_window=WINDOW),
    "Mixtral, with router noise": family(
        "mixtral", num_local_experts=4, sliding_window=WINDOW, router_jitter_noise=0.1
    ),
    "Qwen2": family("qwen2"),
    "Qwen2, with a window": family("qwen2", use_sliding_window=True, sliding_window=WINDOW, layer_types=LAYERS),
    "Qwen2-MoE, with a window": family(
        "qwen2_moe", **EXPERTS, shared_expert_intermediate_size=16, use_sliding_window=True, sliding_window=WINDOW
    ),
    "Qwen3": family("qwen3", head_dim=8),
    "Qwen3-MoE": family("qwen3_moe", **EXPERTS, head_dim=8),
    "Qwen3-Next": family(
        *("qwen3_next", PADDED, OWN), **EXPERTS, **LINEAR, head_dim=8, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Gemma": family("gemma", head_dim=8),
    "Gemma 2": family(
        *("gemma2", EAGER, OWN), head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, attn_logit_softcapping=2.0
    ),
    "Gemma 3": family("gemma3_text", head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW),
    "Gemma 3n": family(
        *("gemma3n_text", PACKED, OWN), **PER_LAYER, laurel_rank=4, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "Gemma 4": family("gemma4_text", PACKED, OWN, **PER_LAYER, global_head_dim=8),
    "Phi": family("phi", num_key_value_heads=4),
    "Phi-3, longrope": family("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=8),
    "PhiMoE, with a window": family("phimoe", num_local_experts=4, sliding_window=WINDOW, router_jitter_noise=0.5),
    "DeepSeek-V2": family("deepseek_v2", PACKED, OWN, **LATENT, **ROUTED),
    "DeepSeek-V3": family(
        "deepseek_v3", PACKED, OWN, **LATENT, **ROUTED, n_group=2, topk_group=1, first_k_dense_replace=1
    ),
    "MiniCPM3": family("minicpm3", PADDED, OWN, **LATENT),
    "GPT-OSS": family(
        "gpt_oss", EAGER, OWN, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=WINDOW
    ),
    "GPT-2": family("gpt2"),
    "GPT-Neo": family(
        "gpt_neo", EAGER, OWN, num_layers=2, attention_types=[[["global", "local"], 1]], window_size=WINDOW
    ),
    "GPT-NeoX": family("gpt_neox"),
    "GPT-J": family("gptj", EAGER, OWN, rotary_dim=4),
    "CodeGen": family("codegen", EAGER, OWN, rotary_dim=4),
    "BLOOM": family("bloom", EAGER, OWN),
    "MPT": family("mpt", EAGER, OWN, max_seq_len=64),
    "OPT": family("opt", ffn_dim=48, word_embed_proj_dim=32),
    "Falcon": family("falcon", PADDED, OWN),
    "StarCoder2": family("starcoder2", sliding_window=WINDOW),
    "StableLM": family("stablelm", PADDED, OWN),
    "OLMo 2": family("olmo2"),
    "Granite": family("granite"),
    "Cohere 2": family("cohere2", PADDED, OWN, sliding_window=WINDOW, layer_types=LAYERS),
    "SmolLM3": family("smollm3"),
    "GLM-4": family("glm4", head_dim=8),
    "Llama 4": family(
        *("llama4_text", PADDED, OWN), head_dim=8, intermediate_size_mlp=48, num_local_experts=4,
        attention_chunk_size=WINDOW, layer_types=["chunked_attention", "full_attention"],
    ),
    "LFM2": family("lfm2", PADDED, OWN, layer_types=["conv", "full_attention"]),
    "Jamba": family("jamba", PADDED, OWN, **MAMBA, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
    "Mamba": family("mamba", EAGER, WHOLE, state_size=8),
}  # fmt: skip


def eager_model(name: str) -> PreTrainedModel:
    """Makes a random model with weights large enough to attend by: matrices as large as their inputs, in any layer."""
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **{**SHAPE, **family.settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def as_loaded(eager: PreTrainedModel, adapter: NoAdapter | None = None) -> PreTrainedModel:
    """Copies the weights into a model with the attention that transformers chooses for it."""
    config = copy.deepcopy(eager.config)
    config._attn_implementation = None
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(eager.state_dict())
    return with_hooks(model, adapter=adapter)


def log_probs(eager: PreTrainedModel, batch: DataProto) -> list[Tensor]:
    """Computes the log-probs of each row's response, the row alone and unpadded; 0 of what is not the policy's. Where a
    rope is to be that of the longest row, tokens follow that nothing sees."""
    found, changes = [], rope_changes(eager.config)
    for row in range(len(batch)):
        ids, prompt = unpadded(batch, row)
        behind = ids.new_zeros(LONGEST - len(ids) if changes else 0)
        with torch.no_grad():
            logits = eager(torch.cat([ids, behind]).unsqueeze(0)).logits[0, prompt - 1 : len(ids) - 1] / TEMPERATURE
        own = batch.batch["response_mask"][row, : len(ids) - prompt]
        found.append(logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0] * own)
    return found


def distance(found: Tensor, wanted: list[Tensor]) -> float:
    return max(float((row[: len(one)] - one).abs().max()) for row, one in zip(found, wanted, strict=True))


def generated(rollout: HFRollout, batch: DataProto) -> DataProto:
    """Generates two responses to each prompt of `batch`, some of which end early."""
    sampling = [SamplingParams(True, 1.0, -1, 1.0, 1 + row % RESPONSE_WIDTH) for row in range(2 * len(batch))]
    prompts = []
    for row in range(len(batch)):
        ids, prompt = unpadded(batch, row)
        prompts += [ids[:prompt].tolist()] * 2
    requests = [Request(row, ids, sampling[row], seed=row) for row, ids in enumerate(prompts)]
    samples = [sample_of(*pair) for pair in zip(requests, rollout.generate(requests), strict=True)]
    return collate(samples, PROMPT_WIDTH, RESPONSE_WIDTH, pad_token_id=0)


def training_of(model: PreTrainedModel) -> str:
    if model.shares_prompts:
        return PACKED
    return EAGER if model.config._attn_implementation == "eager" else PADDED


def ways_of(name: str, tokenizer: PreTrainedTokenizerBase, kernels: str) -> tuple[str, type[RunningBatch]]:
    """Says how a family is trained and generated from; its log-probs are those of eager attention row by row, in
    training and in generation, alone and together."""
    batch, eager = ragged_batch(), eager_model(name)
    wanted = log_probs(eager, batch)
    model = scoring_model(as_loaded(eager), ModelConfig(kernels=kernels), torch.device("cpu"), torch.float32, LONGEST)
    for training in (True, False):
        for cut in ("1 row", "all rows"):
            found = score(model.train(training), batch, CUTS[cut], TEMPERATURE).log_probs
            assert distance(found, wanted) < CLOSE
    rollout = HFRollout(RolloutConfig(prompt_length=PROMPT_WIDTH, response_length=RESPONSE_WIDTH), tokenizer, model)
    sampled = generated(rollout, batch)
    scored = score(model.train(), sampled, CUTS["3 rows"], 1.0).log_probs
    assert (sampled.batch["rollout_log_probs"] - scored).abs().max() < CLOSE
    ways = training_of(model), rollout.batch_class
    if model.shares_prompts:
        set_forward(model, padded_scores, shares_prompts=False)
        assert distance(score(model, batch, CUTS["all rows"], TEMPERATURE).log_probs, wanted) < CLOSE
    return ways


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_eager_attention_row_by_row(name: str, tokenizer: PreTrainedTokenizerBase):
    training, generation = ways_of(name, tokenizer, "off")
    assert training == (PADDED if FAMILIES[name].training == PACKED else FAMILIES[name].training)
    assert generation is (NoCacheBatch if FAMILIES[name].generation == WHOLE else SeparateRows)


def test_the_page_has_this_table():
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    assert rows[1:] == [(name, family.training, family.generation) for name, family in FAMILIES.items()]
