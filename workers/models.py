"""Loading the policy and the critic from a Hugging Face directory."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from configs.schema import ModelConfig
from data.model_config import load_model_config
from data.seeding import derive_seed
from workers.scoring_model import scoring_model

CPU = torch.device("cpu")
LONGEST = 1 << 20  # tokens, where nobody says: no sequence of any run is longer

logging.disable_progress_bar()


def training_device(n_gpus: int | None) -> torch.device:
    """The GPU if there is one and it is not declined with 0, else the CPU."""
    return torch.device("cuda" if n_gpus != 0 and torch.cuda.is_available() else "cpu")


def load_causal_lm(
    model: ModelConfig, device: torch.device = CPU, dtype: torch.dtype = torch.float32, longest: int = LONGEST
) -> PreTrainedModel:
    """The policy at `model.path`, float32, dropout off, as `scoring_model` has it."""
    loaded = _load(AutoModelForCausalLM, model, model.path, "actor_rollout_ref.model.path")
    return scoring_model(loaded, model, device, dtype, longest)


def load_value_model(
    model: ModelConfig,
    path: str,
    seed: int,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    longest: int = LONGEST,
) -> PreTrainedModel:
    """The model at `path` with a head of one output per token; the head's start is derived from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "value_head"))
        loaded = _load(AutoModelForTokenClassification, model, path, "critic.model.path", num_labels=1)
    return scoring_model(loaded, model, device, dtype, longest)


def _load(auto_class: type, model: ModelConfig, path: str | None, key: str, **overrides) -> PreTrainedModel:
    config = load_model_config(model, path, key)
    config.update({**no_dropout(config), **model.override_config, **overrides})
    loaded = auto_class.from_pretrained(
        str(Path(path).expanduser()), config=config, dtype=torch.float32, trust_remote_code=model.trust_remote_code
    )
    if model.enable_gradient_checkpointing:
        loaded.gradient_checkpointing_enable()
    return loaded


def no_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Every dropout rate of a config set to 0: dropout would make the ratio of the first update differ from 1."""
    rates = {name: 0.0 for name in config.to_dict() if name.endswith(("dropout", "drop", "dropout_prob"))}
    return {"classifier_dropout": 0.0, **rates}
