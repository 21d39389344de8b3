"""Computes advantages from scores on the driver, between the rollout and the updates (pure tensors on the CPU).

Each call of the stage reads a batch and returns new columns and metrics; `add_columns` puts the columns beside those
that are there. The batch keeps what was measured: what is learnt from is a column of its own (loss_mask).
"""

from typing import Any

import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.import_utils import bind, callable_name, is_setting, required_arguments
from configs.schema import AlgorithmConfig, Config, RewardKwargsConfig
from data.padding import last_token
from data.protocol import DataProto
from extras.rollout_correction.correction import compute_rollout_probs_diff, correct_log_probs, rollout_mismatch
from extras.rollout_correction.settings import RolloutCorrectionConfig
from training.core_algos import (
    AdaptiveKLController,
    FixedKLController,
    get_adv_estimator_fn,
    kl_penalty,
)
from training.episode_rows import EpisodeRows
from training.torch_functional import masked_mean, zero_masked

Columns = dict[str, Tensor]
Metrics = dict[str, float]


def add_columns(batch: DataProto, found: tuple[Columns, Metrics]) -> Metrics:
    """Adds the new columns to `batch`, and returns the metrics."""
    columns, metrics = found
    batch.batch.update(columns)
    return metrics


def token_level_rewards(
    batch: DataProto, config: Config, kl_ctrl: AdaptiveKLController | FixedKLController
) -> tuple[Columns, Metrics]:
    """Column token_level_rewards, [B, R]: the scores, less the KL to the reference and the overlong penalty if asked
    for."""
    rewards, metrics = batch.batch["token_level_scores"], {}
    if config.algorithm.use_kl_in_reward:
        penalty, found = kl_in_reward(batch, kl_ctrl, config.algorithm.kl_penalty)
        rewards, metrics = rewards - penalty, metrics | found
    if config.reward.reward_kwargs.overlong_buffer_cfg.enable:
        penalty, found = overlong_in_reward(batch, config.reward.reward_kwargs)
        rewards, metrics = rewards + penalty, metrics | found
    return {"token_level_rewards": rewards}, metrics


def kl_in_reward(
    batch: DataProto, kl_ctrl: AdaptiveKLController | FixedKLController, kind: str
) -> tuple[Tensor, Metrics]:
    """β·KL(old ‖ ref) of each token, [B, R], with β from before this step.

    The controller then sees the mean over the episodes that did not fail of each one's mean KL, in nats a token.
    """
    mask, episodes = batch.batch["response_mask"], EpisodeRows(batch)
    kl = zero_masked(kl_penalty(batch.batch["old_log_probs"], batch.batch["ref_log_prob"], kind), mask)
    beta = kl_ctrl.value
    mean_kl = episodes.total(kl.sum(1)) / episodes.total(mask.sum(1)).clamp(min=1)
    current_kl = masked_mean(mean_kl, episodes.is_complete()).item()
    kl_ctrl.update(current_kl=current_kl, n_steps=episodes.count)
    return beta * kl, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """DAPO's soft punishment (arXiv:2503.14476, section 3.4) of responses of `lengths` [B] tokens: [B], at most 0.

    It falls from 0 at `max_length` - `buffer` to -`factor` at `max_length`, and on beyond. No buffer, no penalty.
    """
    if buffer == 0:
        return torch.zeros(lengths.shape)
    return -factor * ((lengths - (max_length - buffer)) / buffer).clamp(min=0)


def overlong_in_reward(batch: DataProto, config: RewardKwargsConfig) -> tuple[Tensor, Metrics]:
    """`overlong_penalty` on each row's last policy token, [B, R]; failed rows have none.

    A response's length is that of its attention mask, so that what an environment said counts as well. A turn that is a
    row of its own has the whole length for itself, and its own penalty.
    """
    settings, mask = config.overlong_buffer_cfg, batch.batch["response_mask"]
    lengths = batch.batch["attention_mask"][:, -mask.shape[1] :].sum(1)
    buffer = config.max_resp_len // 5 if settings.len is None else settings.len  # a fifth: the paper's 4096 of 20480
    penalty = overlong_penalty(lengths, config.max_resp_len, buffer, settings.penalty_factor)
    completed = mask.any(1)
    return penalty[:, None] * last_token(mask), {
        "reward/overlong_reward/mean": masked_mean(penalty, completed).item(),
        "reward/overlong/mean": masked_mean((penalty < 0).float(), completed).item(),
    }


def check_log_probs(batch: DataProto, config: RolloutCorrectionConfig) -> None:
    """Raises ConfigError if rollouts are to be corrected by log-probs that their engine does not return."""
    corrects = config.bypass_mode or config.rollout_is is not None or config.rollout_rs is not None
    if corrects and "rollout_log_probs" not in batch:
        raise ConfigError(
            "algorithm.rollout_correction reads the column rollout_log_probs, which the rollout engine of yours does "
            "not return: have generate_sequences return it ([B, R], after temperature), or set rollout_correction=null."
        )


def correct_rollout(batch: DataProto, config: RolloutCorrectionConfig) -> tuple[Columns, Metrics]:
    """Columns loss_mask, response_mask without the rejected tokens, and, if asked for, rollout_is_weights; [B, R].

    Needs old_log_probs beside rollout_log_probs: without one, or in bypass mode, where the loss corrects, nothing is
    rejected. A rejected token is not learnt from, but what it led to was measured, so it stays in the group's
    statistics, and an outcome that was paid on it is not lost: the advantages go by response_mask.
    """
    mask = batch.batch["response_mask"]
    has_both = "old_log_probs" in batch and "rollout_log_probs" in batch
    if config.bypass_mode or not has_both or not mask.any():
        return {"loss_mask": mask}, {}
    log_probs = batch.batch["old_log_probs"], batch.batch["rollout_log_probs"]
    weights, kept, metrics = correct_log_probs(*log_probs, mask, config)
    columns = {"loss_mask": kept} | ({} if weights is None else {"rollout_is_weights": weights})
    metrics |= compute_rollout_probs_diff(*log_probs, mask)
    return columns, metrics | {name: float(value) for name, value in rollout_mismatch(*log_probs, mask).items()}


def estimator_needs(name: str) -> set[str]:
    """The arguments that an estimator cannot do without, by which a run knows what it has to compute for it."""
    return set(required_arguments(get_adv_estimator_fn(name)))


def compute_advantage(batch: DataProto, config: AlgorithmConfig) -> tuple[Columns, Metrics]:
    """Columns advantages and returns, [B, R], by the estimator that `config.adv_estimator` names; no metrics.

    The estimator is given exactly what it names among the columns of `batch` and `run_arguments`; one with **kwargs is
    given all of it. A column called like one of its settings (epsilon=1e-6) stays a column of the data set. It sees an
    episode of several rows as one long one (`EpisodeRows.join`), so that it counts episodes, and returns as many.

    Raises:
        ValueError: it needs something that this run does not have, or returns anything but two tensors of the shape of
            the response_mask that it is given.
    """
    name = config.adv_estimator
    estimator, episodes = get_adv_estimator_fn(name), EpisodeRows(batch)
    whole = episodes.join()
    columns = {**whole.non_tensor_batch, **whole.tensors}
    given = {column: values for column, values in columns.items() if not is_setting(estimator, column)}
    present = given | run_arguments(whole, config) | config.adv_estimator_kwargs
    if missing := estimator_needs(name) - present.keys():
        raise ValueError(
            f"algorithm.adv_estimator={name} needs {sorted(missing)}, which this run does not have. It has: "
            f"{sorted(present)}. Columns come from the data set and from what the reward returns beside the score; "
            "settings of an estimator of yours from algorithm.adv_estimator_kwargs."
        )
    result = bind(estimator, present, key=f"algorithm.adv_estimator={name}")()
    shape = whole.batch["response_mask"].shape
    pair = result if isinstance(result, tuple | list) else (result,)
    found = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in pair]
    if found != [tuple(shape)] * 2:
        raise ValueError(
            f"algorithm.adv_estimator={name}: {callable_name(estimator)} returned {found}; it must return advantages "
            f"and returns, both tensors of shape {tuple(shape)}."
        )
    return dict(zip(("advantages", "returns"), map(episodes.cut, pair), strict=True)), {}


def run_arguments(batch: DataProto, config: AlgorithmConfig) -> dict[str, Any]:
    """Returns the arguments offered to estimators beside columns: settings, and columns under the field's names."""
    rewards, mask = batch.batch["token_level_rewards"].clone(), batch.batch["response_mask"]
    return {
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
