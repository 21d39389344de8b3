"""Loading the policy and the critic from a Hugging Face directory."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from configs.loader import notice
from configs.schema import ModelConfig
from data.seeding import derive_seed
from data.tokenizer import check_model_path
from workers import prefix_attention
from workers.cpu import use_onednn
from workers.micro_batches import MicroBatch, token_scores, token_values
from workers.rms_norm import use_fast_norms
from workers.siblings import join_siblings

PACKING_TOLERANCE = 1e-3  # log-probs and values of float32 weights agree far better, and a wrong forward far worse

logging.disable_progress_bar()


def training_device(n_gpus: int | None) -> torch.device:
    """The GPU if there is one and it is not declined with 0, else the CPU."""
    return torch.device("cuda" if n_gpus != 0 and torch.cuda.is_available() else "cpu")


def load_causal_lm(model: ModelConfig) -> PreTrainedModel:
    """The policy, float32, dropout off; packed where it can be."""
    module = _load(AutoModelForCausalLM, model, check_model_path(model.path, "actor_rollout_ref.model.path"))
    return pack(module, log_probs) if model.use_remove_padding else module


def load_value_model(model: ModelConfig, path: str, seed: int) -> PreTrainedModel:
    """The model at `path` with a head of one output per token; the head's start is derived from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "value_head"))
        path = check_model_path(path, "critic.model.path")
        module = _load(AutoModelForTokenClassification, model, path, num_labels=1)
    return pack(module, token_values) if model.use_remove_padding else module


def _load(auto_class: type, model: ModelConfig, path: str, **overrides) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    config.update({**no_dropout(config), **model.override_config, **overrides})
    module = auto_class.from_pretrained(
        path, config=config, dtype=torch.float32, trust_remote_code=model.trust_remote_code, attn_implementation="sdpa"
    )
    use_onednn(module)
    use_fast_norms(module)
    join_siblings(module)
    if model.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable()
    return module


@torch.no_grad()
def pack(module: PreTrainedModel, forward: Callable[[PreTrainedModel, MicroBatch], Tensor]) -> PreTrainedModel:
    """`module` set to take its batches packed, if a small one then comes out of `forward` as it does padded.

    It is tried, not looked up in a list: a model may attend in a way of its own, or do something to its logits.
    """
    micro = probe(module)
    padded = forward(module, micro)
    try:
        module.set_attn_implementation(prefix_attention.NAME)
        found = forward(module, micro)
        differs = (found - padded)[micro.is_real].abs().max().item()
        problem = f"log-probs or values then differ by {differs:.1g}" if not differs < PACKING_TOLERANCE else None
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        module.set_attn_implementation("sdpa")
        notice(f"{type(module).__name__} takes its batches padded, as it does not work on packed ones ({problem}).")
    return module


def log_probs(module: PreTrainedModel, micro: MicroBatch) -> Tensor:
    return token_scores(module, micro, temperature=1.0, with_entropy=False).log_probs


def probe(module: PreTrainedModel) -> MicroBatch:
    """Three rows of two prompts, all ragged."""
    ids = torch.arange(3 * 9).view(3, 9) * 7 % module.get_input_embeddings().num_embeddings
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0]])
    ids[1, 2:5] = ids[0, 2:5]
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    columns = {name: column.to(module.device) for name, column in columns.items()}
    return MicroBatch(torch.arange(3), columns | {"responses": columns["input_ids"][:, 5:]}, response_width=4)


def no_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Every dropout rate of a config set to 0: dropout would make the ratio of the first update differ from 1."""
    rates = {name: 0.0 for name in config.to_dict() if name.endswith(("dropout", "pdrop", "dropout_prob"))}
    return {"classifier_dropout": 0.0, **rates}
