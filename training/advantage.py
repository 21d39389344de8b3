"""From scores to advantages: what the driver computes between the rollout and the update (pure tensors on the CPU)."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from configs.rollout_correction import RolloutCorrectionConfig
from configs.schema import AlgorithmConfig, Config, RewardKwargsConfig
from data.padding import last_token
from data.protocol import DataProto
from training.core_algos import (
    AdaptiveKLController,
    FixedKLController,
    get_adv_estimator_fn,
    kl_penalty,
)
from training.rollout_correction import compute_rollout_correction_and_add_to_batch, compute_rollout_probs_diff
from training.torch_functional import masked_mean, zero_masked

OF_LOG_PROB_PASS = {"old_log_probs", "entropys", "sum_pi_squared"}  # columns of Actor.compute_log_prob


def set_rewards(
    batch: DataProto, config: Config, kl_ctrl: AdaptiveKLController | FixedKLController
) -> dict[str, float]:
    """Column token_level_rewards: the scores, less the KL to the reference and the overlong penalty if asked for."""
    metrics: dict[str, float] = {}
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    if config.algorithm.use_kl_in_reward:
        metrics |= apply_kl_penalty(batch, kl_ctrl, config.algorithm.kl_penalty)
    if config.reward.reward_kwargs.overlong_buffer_cfg.enable:
        metrics |= apply_overlong_penalty(batch, config.reward.reward_kwargs)
    return metrics


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


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer: int, factor: float) -> torch.Tensor:
    """DAPO's soft punishment (arXiv:2503.14476, section 3.4) of responses of `lengths` [B] tokens: [B], at most 0.

    It falls from 0 at `max_length` - `buffer` to -`factor` at `max_length`, and on beyond. No buffer, no penalty.
    """
    if buffer == 0:
        return torch.zeros(lengths.shape)
    return -factor * ((lengths - (max_length - buffer)) / buffer).clamp(min=0)


def apply_overlong_penalty(batch: DataProto, config: RewardKwargsConfig) -> dict[str, float]:
    """token_level_rewards less `overlong_penalty`, on each row's last policy token; failed rows have none.

    A response's length is that of its attention mask, so that what an environment said counts as well.
    """
    settings, mask = config.overlong_buffer_cfg, batch.batch["response_mask"]
    lengths = batch.batch["attention_mask"][:, -mask.shape[1] :].sum(1)
    buffer = config.max_resp_len // 5 if settings.len is None else settings.len  # a fifth: the paper's 4096 of 20480
    penalty = overlong_penalty(lengths, config.max_resp_len, buffer, settings.penalty_factor)
    batch.batch["token_level_rewards"] = batch.batch["token_level_rewards"] + penalty[:, None] * last_token(mask)
    valid = mask.any(1)
    return {
        "reward/overlong_reward/mean": masked_mean(penalty, valid).item(),
        "reward/overlong/mean": masked_mean((penalty < 0).float(), valid).item(),
    }


def correct_rollout(batch: DataProto, config: RolloutCorrectionConfig) -> tuple[torch.Tensor, dict[str, float]]:
    """(the response_mask of what is learnt from, metrics); adds rollout_is_weights to `batch` if they are asked for.

    Needs old_log_probs beside rollout_log_probs: without, or in bypass mode, where the loss corrects, it does nothing.
    The batch keeps its own mask: a rejected token is not learnt from, but what it led to was measured, so it stays in
    the group's statistics, and an outcome that was paid on it is not lost.
    """
    columns = batch.batch
    mask = columns["response_mask"]
    if config.bypass_mode or "old_log_probs" not in columns:
        return mask, {}
    drift = compute_rollout_probs_diff(columns["old_log_probs"], columns["rollout_log_probs"], mask)
    batch, metrics = compute_rollout_correction_and_add_to_batch(batch, config)
    kept, columns["response_mask"] = columns["response_mask"], mask
    return kept, metrics | drift


def estimator_needs(name: str) -> set[str]:
    """The arguments that an estimator cannot do without, by which a run knows what it has to compute for it."""
    parameters = inspect.signature(get_adv_estimator_fn(name)).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in parameters if p.default is p.empty and p.kind not in variadic}


def takes(function: Callable, argument: str) -> bool:
    """Whether `function` can be given `argument` by name."""
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def compute_advantage(batch: DataProto, config: AlgorithmConfig) -> DataProto:
    """`batch` with the columns advantages and returns, by the estimator that `config.adv_estimator` names.

    The estimator is given exactly what it names among `estimator_arguments`; one with **kwargs is given all of it.

    Raises:
        ValueError: it needs something that this run does not have, or returns anything but two [B, R] tensors.
    """
    name = config.adv_estimator
    estimator = get_adv_estimator_fn(name)
    present = estimator_arguments(batch, config) | config.adv_estimator_kwargs
    if missing := estimator_needs(name) - present.keys():
        raise ValueError(
            f"algorithm.adv_estimator={name} needs {sorted(missing)}, which this run does not have. It has: "
            f"{sorted(present)}. Columns come from the data set and from what the reward returns beside the score; "
            "settings of an estimator of yours from algorithm.adv_estimator_kwargs."
        )
    result = estimator(**{argument: value for argument, value in present.items() if takes(estimator, argument)})
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
