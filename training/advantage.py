"""Computes advantages from scores on the driver, between the rollout and the updates (pure tensors on the CPU).

The batch keeps what was measured; a column of its own, loss_mask, says what is learnt from.
"""

from typing import Any

import torch
from torch import Tensor

from configs.import_utils import bind, callable_name, is_setting, required_arguments
from configs.schema import AlgorithmConfig, Config, RewardKwargsConfig
from data.padding import last_token
from data.protocol import DataProto
from data.types import Metrics
from training.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn
from training.episode_rows import EpisodeRows
from training.losses import (
    AdaptiveKLController,
    FixedKLController,
    bound_log_ratio,
    kl_penalty,
    masked_mean,
    zero_masked,
)

MEAN_MISMATCH = "rollout_mismatch/abs_log_prob_diff"
MAX_MISMATCH_RATIO = "rollout_mismatch/max_ratio"
Columns = dict[str, Tensor]


def token_level_rewards(
    batch: DataProto, config: Config, kl_ctrl: AdaptiveKLController | FixedKLController
) -> tuple[Tensor, Metrics]:
    """Computes the scores, less the KL to the reference and the overlong penalty if asked for: [B, R], and metrics."""
    rewards, metrics = batch.batch["token_level_scores"], {}
    if config.algorithm.use_kl_in_reward:
        penalty, penalty_metrics = kl_in_reward(batch, kl_ctrl, config.algorithm.kl_penalty)
        rewards, metrics = rewards - penalty, metrics | penalty_metrics
    if config.reward.reward_kwargs.overlong_buffer_cfg.enable:
        penalty, penalty_metrics = overlong_in_reward(batch, config.reward.reward_kwargs)
        rewards, metrics = rewards + penalty, metrics | penalty_metrics
    return rewards, metrics


def kl_in_reward(
    batch: DataProto, kl_ctrl: AdaptiveKLController | FixedKLController, kind: str
) -> tuple[Tensor, Metrics]:
    """Computes β·KL(old ‖ ref) of each token, [B, R], with β from before this step.

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
    """Computes DAPO's soft punishment (arXiv:2503.14476, 3.4) of responses of `lengths` [B] tokens: [B], at most 0.

    It falls from 0 at `max_length` - `buffer` to -`factor` at `max_length`, and on beyond. No buffer, no penalty.
    """
    if buffer == 0:
        return torch.zeros(lengths.shape)
    return -factor * ((lengths - (max_length - buffer)) / buffer).clamp(min=0)


def overlong_in_reward(batch: DataProto, config: RewardKwargsConfig) -> tuple[Tensor, Metrics]:
    """Puts `overlong_penalty` on each row's last policy token, [B, R]; failed rows have none.

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


def measure_mismatch(batch: DataProto) -> Metrics:
    """Compares the policy's log-probs with those of the engine that sampled, where a pass has computed them."""
    mask = batch.batch["response_mask"]
    if not {"old_log_probs", "rollout_log_probs"} <= batch.tensors.keys() or not mask.any():
        return {}
    mismatch = rollout_mismatch(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], mask)
    return {name: float(value) for name, value in mismatch.items()}


@torch.no_grad()
def rollout_mismatch(log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Compares two log-probs [B, R] of the same tokens, the trainer's and the engine's, by three numbers.

    Over the tokens under `response_mask`: the mean of |Δ log-prob| in nats, the k3 estimate of KL(rollout || policy) in
    nats a token, and the largest ratio of the two probabilities, whichever is above. An empty mask gives 0, 0 and 1.
    """
    log_ratio = zero_masked(log_prob - rollout_log_prob, response_mask)
    bounded = bound_log_ratio(log_ratio)
    return {
        MEAN_MISMATCH: masked_mean(log_ratio.abs(), response_mask),
        "rollout_mismatch/k3_kl": masked_mean(bounded.expm1() - bounded, response_mask),
        MAX_MISMATCH_RATIO: bounded.abs().max().exp(),
    }


def estimator_needs(name: str) -> set[str]:
    """Names the arguments that an estimator cannot do without, by which a run knows what it has to compute for it."""
    return set(required_arguments(ADV_ESTIMATOR_REGISTRY[name]))


class Estimator:
    """The advantage estimator that `config.adv_estimator` names, bound once a run to what it asks for.

    It is given exactly what it names among the columns of a batch and `run_arguments`; one with **kwargs is given all
    of them. A column called like one of its settings (epsilon=1e-6) stays a column of the data set. It sees an episode
    of several rows as one long one (`EpisodeRows.join`), so that it counts episodes, and returns as many.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config, self.key = config, f"algorithm.adv_estimator={config.adv_estimator}"
        self.function = get_adv_estimator_fn(config.adv_estimator)
        self.present: set[str] = set()  # what the last batch had
        self.names: list[str] = []  # what of it the function is given

    def __call__(self, batch: DataProto) -> Columns:
        """Computes the columns advantages and returns, [B, R].

        Raises:
            ValueError: it needs something that this run does not have, or returns anything but two tensors of the
                shape of the response_mask that it is given.
        """
        episodes = EpisodeRows(batch)
        joined = episodes.join()
        columns, offered = {**joined.non_tensor_batch, **joined.tensors}, run_arguments(joined, self.config)
        offered |= self.config.adv_estimator_kwargs
        if self.present != columns.keys() | offered.keys():
            self.bind(columns, offered)
        arguments = columns | offered
        result = self.function(**{name: arguments[name] for name in self.names})
        shape = joined.batch["response_mask"].shape
        pair = result if isinstance(result, tuple | list) else (result,)
        shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in pair]
        if shapes != [tuple(shape)] * 2:
            raise ValueError(
                f"{self.key}: {callable_name(self.function)} returned {shapes}; it must return advantages and returns, "
                f"both tensors of shape {tuple(shape)}."
            )
        return dict(zip(("advantages", "returns"), map(episodes.cut, pair), strict=True))

    def bind(self, columns: dict[str, Any], offered: dict[str, Any]) -> None:
        """Chooses what the function is given of a batch that has `columns`, and of what is `offered` beside them."""
        present = {name: None for name in columns if not is_setting(self.function, name)} | offered
        if missing := set(required_arguments(self.function)) - present.keys():
            raise ValueError(
                f"{self.key} needs {sorted(missing)}, which this run does not have. It has: {sorted(present)}. Columns "
                "come from the data and the reward, settings from algorithm.adv_estimator_kwargs."
            )
        self.names = [*bind(self.function, present, key=self.key).keywords]
        self.present = columns.keys() | offered.keys()


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
