"""Policy losses and estimators of on-policy distillation: a teacher scores what the policy says.

Sources: Agarwal et al., arXiv:2306.13649 (GKD: the student's own answers, a divergence as loss); Gu et al.,
arXiv:2306.08543 (MiniLLM: the reverse KL as reward); Thinking Machines, "On-Policy Distillation", 2025 (minus the
log-ratio of a token as its advantage). In loss_mode and clamps as verl 0.9.1 has them.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from extras.distillation.settings import LossConfig as Distillation
from training.core_algos import AdvEstimatorFn, Labels, Pair, compute_grpo_outcome_advantage, register_adv_est
from training.losses import (
    LossConfig,
    Metrics,
    ReadableNamespace,
    agg_loss,
    call_policy_loss,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    kl_penalty,
    masked_mean,
    register_policy_loss,
    zero_masked,
)

ESTIMATORS: dict[str, AdvEstimatorFn] = {}  # configs/extras.py names them


@register_policy_loss("distillation")
def compute_distillation_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    *,
    config: LossConfig,
    teacher_log_prob: Tensor,
    **optional: Any,
) -> tuple[Tensor, Metrics]:
    """Adds to the task's loss, or has in its place, an estimate of KL(policy ‖ teacher) by the sampled tokens."""
    losses = kl_penalty(log_prob, teacher_log_prob, config.policy_loss.distillation.loss_mode)
    tensors = old_log_prob, log_prob, advantages, response_mask
    return beside_the_task(losses, {}, tensors, loss_agg_mode, config, optional)


@register_policy_loss("distillation_topk")
def compute_topk_distillation_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    *,
    config: LossConfig,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    logits: Tensor,
    **optional: Any,
) -> tuple[Tensor, Metrics]:
    """Adds to the task's loss, or has in its place, KL(teacher ‖ policy) over the teacher's likeliest tokens."""
    least = config.policy_loss.distillation.log_prob_min_clamp
    losses, shares = forward_kl(logits, teacher_topk_log_probs, teacher_topk_ids, least)
    tensors = old_log_prob, log_prob, advantages, response_mask
    return beside_the_task(losses, shares, tensors, loss_agg_mode, config, optional)


def forward_kl(
    logits: Tensor, teacher_log_probs: Tensor, teacher_ids: Tensor, least: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes Σ p·(log p − log q) over the tokens `teacher_ids` [b, r, k] of each place, of which the teacher has the
    log-probs log p, and the policy, by its `logits` [b, r, V], log q; 0 where it is below, as k tokens are not all.

    Returns [b, r], and by name what teacher and policy give these tokens together. `least`: both are clamped to it.
    """
    log_q, log_p = logits.gather(-1, teacher_ids) - logits.logsumexp(-1, keepdim=True), teacher_log_probs
    shares = {"teacher_mass": log_p.exp().sum(-1), "student_mass": log_q.detach().exp().sum(-1)}
    if least is not None:
        log_q, log_p = log_q.clamp(min=least), log_p.clamp(min=least)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0), shares


def beside_the_task(
    losses: Tensor,
    shares: dict[str, Tensor],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    loss_agg_mode: str,
    config: LossConfig,
    optional: dict[str, Any],
) -> tuple[Tensor, Metrics]:
    """Makes one loss of the teacher's `losses` [b, r] and the task's, which is that of `tensors` and `optional`.

    With use_policy_gradient, −losses are advantages of PPO's clipped loss.
    """
    old_log_prob, log_prob, _, mask = tensors
    settings: Distillation = config.policy_loss.distillation
    means = {"loss": losses, "abs_loss": losses.abs(), **shares}
    metrics = {f"distillation/{name}": masked_mean(values.detach(), mask) for name, values in means.items()}
    if settings.loss_max_clamp is not None:
        losses = losses.clamp(-settings.loss_max_clamp, settings.loss_max_clamp)
    if settings.use_policy_gradient:
        clips = {name: vars(settings)[name] for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")}
        clipped = ReadableNamespace(**{**vars(config), **clips})
        rows = old_log_prob, log_prob, -losses.detach(), mask
        weights = {name: optional[name] for name in ("rollout_is_weights",) if name in optional}
        loss, loss_metrics = call_policy_loss(compute_policy_loss_vanilla, rows, loss_agg_mode, clipped, weights)
        metrics |= {name.replace("actor/", "distillation/"): value for name, value in loss_metrics.items()}
    else:
        loss = agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info)
    if not settings.use_task_rewards:
        return loss, metrics
    task = get_policy_loss_fn(config.policy_loss.task_loss)
    task_loss, task_metrics = call_policy_loss(task, tensors, loss_agg_mode, config, optional)
    return task_loss + settings.distillation_loss_coef * loss, {**task_metrics, **metrics}


listed = partial(register_adv_est, registry=ESTIMATORS)


@listed("no_rewards")
@torch.no_grad()
def compute_no_advantage(response_mask: Tensor) -> Pair:
    """0 for every token: rewards are only logged, and the KL term alone teaches (recipe=opd)."""
    advantages = torch.zeros_like(response_mask, dtype=torch.float32)
    return advantages, advantages


@listed("opd")
@torch.no_grad()
def compute_opd_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    *,
    teacher_weight: float = 1.0,
    reward_weight: float = 0.0,
    norm_adv_by_std_in_grpo: bool = True,
) -> Pair:
    """On-policy distillation by the policy gradient: teacher_weight · (log ν − log π) of a token, where ν is the model
    at ref.model.path; plus reward_weight · grpo's advantage."""
    advantages = teacher_weight * zero_masked(ref_log_prob - old_log_probs, response_mask)
    if reward_weight:
        of_rewards, _ = compute_grpo_outcome_advantage(
            token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo
        )
        advantages = advantages + reward_weight * of_rewards
    return advantages, advantages
