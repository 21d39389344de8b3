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
from training.torch_functional import masked_mean, zero_masked


def apply_kl_penalty(
    batch: DataProto, kl_ctrl: AdaptiveKLController | FixedKLController, kind: str
) -> dict[str, float]:
    """token_level_rewards := token_level_scores − β·KL(old ‖ ref) per token, with β from before this step.

    The controller then sees the mean over the rows that did not fail of each row's mean KL, in nats a token.
    """
    mask = batch.batch["response_mask"]
    kl = zero_masked(kl_penalty(batch.batch["old_log_probs"], batch.batch["ref_log_prob"], kind), mask)
    beta = kl_ctrl.value
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] - beta * kl
    current_kl = masked_mean(masked_mean(kl, mask, axis=-1), mask.any(1)).item()
    kl_ctrl.update(current_kl=current_kl, n_steps=len(batch))
    return {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(batch: DataProto, config: AlgorithmConfig) -> DataProto:
    """`batch` with the columns advantages and returns, by the estimator that `config.adv_estimator` names.

    The estimator is given exactly what it names among `estimator_arguments`; one with **kwargs is given all of it.

    Raises:
        ValueError: it needs something that this run does not have, or returns anything but two [B, R] tensors.
    """
    name = config.adv_estimator
    estimator = get_adv_estimator_fn(name)
    present = estimator_arguments(batch, config)
    parameters = inspect.signature(estimator).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    missing = [p.name for p in named if p.default is p.empty and p.name not in present]
    if missing:
        raise ValueError(
            f"algorithm.adv_estimator={name} needs {missing}, which this run does not have. It can have: "
            f"{sorted(present)} (values with critic.enable=true, reference log-probs with a KL term)."
        )
    result = estimator(**(present if takes_all else {p.name: present[p.name] for p in named if p.name in present}))
    shape = batch.batch["response_mask"].shape
    pair = result if isinstance(result, tuple | list) else (result,)
    found = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in pair]
    if found != [tuple(shape)] * 2:
        raise ValueError(
            f"algorithm.adv_estimator={name} returned {found}; it must return advantages and returns, both tensors of "
            f"shape {tuple(shape)}."
        )
    batch.batch["advantages"], batch.batch["returns"] = pair
    return batch


def estimator_arguments(batch: DataProto, config: AlgorithmConfig) -> dict[str, Any]:
    """Everything an estimator may ask for: each column of the batch, and the names that the field knows them by."""
    rewards, mask = batch.batch["token_level_rewards"].clone(), batch.batch["response_mask"]
    return {
        **batch.non_tensor_batch,
        **batch.tensors,
        "token_level_rewards": rewards,  # a copy: the batch's may be the very scores that are logged
        "rewards": rewards,
        "dones": last_token(mask),
        "index": batch.non_tensor_batch["uid"],
        "gamma": config.gamma,
        "lam": config.lam,
        "gae_lambda": config.lam,
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
        "non_tensor_batch": batch.non_tensor_batch,
        "config": config,
    }


def last_token(mask: torch.Tensor) -> torch.Tensor:
    """1.0 on each row's last policy token: where the episode is done. [B, R] float32."""
    return ((mask.flip(1).cumsum(1).flip(1) == 1) & mask.bool()).float()
