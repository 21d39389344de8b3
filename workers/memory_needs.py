"""Tells before models are loaded whether a GPU has room for their weights, gradients and AdamW's moments.

Activations, keys and values come on top; sizes of micro-batches decide about them.
"""

from collections.abc import Mapping

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from configs.errors import ConfigError
from configs.schema import Config, PretrainedModelConfig
from data.pretrained import load_model_config
from training.roles import needed_roles
from workers.parallel import Replicas

GIB = 1 << 30


def memory_report(config: Config, layouts: Mapping[str, Replicas], card: int) -> str:
    """Says in a line what the models of a run take of each GPU, which has `card` bytes.

    Raises:
        ConfigError: they do not fit, or not beside the engine's share; names the keys to turn.
    """
    held, rollout = model_bytes(config, layouts), config.actor_rollout_ref.rollout
    share = int(rollout.gpu_memory_utilization * card) if rollout.name == "vllm" else 0
    parts = " + ".join(f"{role} {size / GIB:.1f}" for role, size in held.items())
    if sum(held.values()) + share > card:
        engine = f" beside the {share / GIB:.1f} of rollout.gpu_memory_utilization" if share else ""
        raise ConfigError(
            f"actor_rollout_ref.model.path: models take {parts} GiB{engine}, and the GPU has {card / GIB:.1f}. More "
            "GPUs, fsdp_config.optimizer_offload=true or a smaller model need less."
        )
    return f"models take {parts} of the GPU's {card / GIB:.1f} GiB, activations come on top."


def model_bytes(config: Config, layouts: Mapping[str, Replicas]) -> dict[str, int]:
    """Counts the bytes of a GPU that the models of each role take."""
    policy, roles = config.actor_rollout_ref, needed_roles(config)
    size = parameter_count(policy.model, policy.model.path, "actor_rollout_ref.model.path", AutoModelForCausalLM)
    trains_all = policy.model.adapter == "none"
    held = {"actor": layouts["policy"].bytes_held(size, policy.actor.optim if trains_all else None)}
    if "ref" in roles and trains_all:
        held["ref"] = layouts["ref"].bytes_held(size, None)
    if "critic" in roles:
        path, kind = config.critic.model.path, AutoModelForTokenClassification
        size = parameter_count(policy.model, path, "critic.model.path", kind)
        held["critic"] = layouts["policy"].bytes_held(size, config.critic.optim)
    if "rm" in roles:
        judge = config.reward.reward_model.model
        size = parameter_count(judge, judge.path, "reward.reward_model.model.path", AutoModelForSequenceClassification)
        held["rm"] = layouts["rm"].bytes_held(size, None)
    return held


def parameter_count(settings: PretrainedModelConfig, path: str | None, key: str, auto_class: type) -> int:
    """Counts a model's numbers, without its weights in memory; shared ones count once."""
    config = load_model_config(settings, path, key)
    with torch.device("meta"):
        model = auto_class.from_config(config, trust_remote_code=settings.trust_remote_code)
    return sum(weight.numel() for weight in model.parameters())
