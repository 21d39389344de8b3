"""From scores to advantages: what the driver computes between the rollout and the update (pure tensors on the CPU)."""

import inspect
from typing import Any

import torch

from configs.schema import AlgorithmConfig
from data.protocol import DataProto
from training.core_algos import (
    AdaptiveKLController,
    FixedKLController,
    get_adv_estimator_fn,
    kl_penalty,
)
from training.torch_functional import masked_mean


def apply_kl_penalty(
    batch: DataProto, kl_ctrl: AdaptiveKLController | FixedKLController, kind: str
) -> dict[str, float]:
    """token_level_rewards := token_level_scores − β·KL(old ‖ ref) per token, with β from before this step."""
    mask = batch.batch["response_mask"]
    kl = kl_penalty(batch.batch["old_log_probs"], batch.batch["ref_log_prob"], kind) * mask
    beta = kl_ctrl.value
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] - beta * kl
    current_kl = masked_mean(kl, mask, axis=-1).mean().item()
    kl_ctrl.update(current_kl=current_kl, n_steps=len(batch))
    return {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(batch: DataProto, config: AlgorithmConfig) -> DataProto:
    """`batch` with the columns advantages and returns, by the estimator that `config.adv_estimator` names.

    The estimator is given exactly what it names among `estimator_arguments`; one with **kwargs is given all of it.

    Raises:
        ValueError: it needs something that this run does not have, or returns other shapes than two [B, R].
    """
    name = config.adv_estimator
    estimator = get_adv_estimator_fn(name)
    present = estimator_arguments(batch, config)
    parameters = inspect.signature(estimator).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        wanted = present
    else:
        wanted = {parameter.name: present[parameter.name] for parameter in parameters if parameter.name in present}
    missing = [p.name for p in parameters if p.default is p.empty and p.kind in (0, 1, 3) and p.name not in present]
    if missing:
        raise ValueError(
            f"algorithm.adv_estimator={name} needs {missing}, which this run does not have. It can have: "
            f"{sorted(present)} (values with critic.enable=true, reference log-probs with a KL term)."
        )
    advantages, returns = estimator(**wanted)
    shape = batch.batch["response_mask"].shape
    if advantages.shape != shape or returns.shape != shape:
        raise ValueError(
            f"algorithm.adv_estimator={name} returned {tuple(advantages.shape)} and {tuple(returns.shape)}; "
            f"advantages and returns must both be {tuple(shape)}."
        )
    batch.batch["advantages"], batch.batch["returns"] = advantages, returns
    return batch


def estimator_arguments(batch: DataProto, config: AlgorithmConfig) -> dict[str, Any]:
    """Everything an estimator may ask for, under every name it is known by."""
    rewards, mask = batch.batch["token_level_rewards"], batch.batch["response_mask"]
    arguments = {
        "token_level_rewards": rewards,
        "rewards": rewards,
        "response_mask": mask,
        "dones": last_token(mask),
        "index": batch.non_tensor_batch["uid"],
        "gamma": config.gamma,
        "lam": config.lam,
        "gae_lambda": config.lam,
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
        "config": config,
    }
    optional = ["values", "old_log_probs", "ref_log_prob", "rollout_log_probs", "rollout_is_weights"]
    return arguments | {name: batch.batch[name] for name in optional if name in batch.batch}


def last_token(mask: torch.Tensor) -> torch.Tensor:
    """1.0 on each row's last policy token: where the episode is done. [B, R] float32."""
    return ((mask.flip(1).cumsum(1).flip(1) == 1) & mask.bool()).float()
