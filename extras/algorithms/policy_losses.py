"""Computes the policy losses beside PPO's, as training/losses.py computes that: each a function of `Tokens`, [B, R].

In their formulas A is the advantage, ratio is exp(log_prob - old_log_prob), and sg() stops the gradient.
"""

from functools import partial

import torch
from torch import Tensor

from training.losses import (
    EPSILON,
    LossConfig,
    PolicyLoss,
    TokenLosses,
    Tokens,
    agg_loss,
    bound_log_ratio,
    clip_bounds,
    clip_loss,
    clip_metrics,
    masked_mean,
    masked_means,
    register_policy_loss,
    token_loss,
    zero_masked,
)

MAX_SEQUENCE_LOG_RATIO = 10.0  # of gspo: bounds a row's mean log-ratio, from above only
LOSSES: dict[str, PolicyLoss] = {}  # configs/extras.py names them
listed = partial(register_policy_loss, registry=LOSSES)


def dppo_loss(t: Tokens, counted: Tensor, max_ratio: float) -> TokenLosses:
    """Returns -A · sg(min(ratio, max_ratio)) · log_prob where `counted`, and 0 elsewhere."""
    log_ratio = bound_log_ratio(t.log_ratio)
    ratio = log_ratio.exp()
    losses = zero_masked(-t.advantages * ratio.clamp(max=max_ratio).detach() * t.log_prob, counted)
    learns = t.advantages != 0
    return losses, clip_metrics(log_ratio, learns & ~counted, learns & (ratio > max_ratio) & counted)


@listed("dppo_tv", silent_at_zero=True)
@token_loss()
def compute_policy_loss_dppo_tv(t: Tokens, config: LossConfig) -> TokenLosses:
    """DPPO (arXiv:2602.04879) with total variation: `dppo_loss` of tokens whose probability has moved in A's direction
    by no more than the config's clip bounds (all other tokens are one outcome); `clip_ratio_c`: the largest ratio."""
    clip_low, clip_high = clip_bounds(config)
    moved = t.log_prob.exp() - t.old_log_prob.exp()
    counted = torch.where(t.advantages > 0, moved <= clip_high, moved >= -clip_low)
    return dppo_loss(t, counted, config.clip_ratio_c)


@listed("dppo_kl", silent_at_zero=True)
@token_loss()
def compute_policy_loss_dppo_kl(t: Tokens, config: LossConfig) -> TokenLosses:
    """DPPO (arXiv:2602.04879) with KL: `dppo_loss` of tokens with KL(old || new) within the config's clip bounds, in
    nats, or whose probability has moved against A's direction; `clip_ratio_c` is the largest ratio.

    All other tokens count as one outcome: the KL is p_old · ln(p_old / p) + (1 - p_old) · ln((1 - p_old) / (1 - p)).
    """
    clip_low, clip_high = clip_bounds(config)
    prob, old_prob = t.log_prob.exp(), t.old_log_prob.exp()
    others_ratio = (1 - old_prob + EPSILON) / (1 - prob + EPSILON)
    divergence = old_prob * (t.old_log_prob - t.log_prob) + (1 - old_prob) * others_ratio.log()
    raised = (divergence <= clip_high) | (prob <= old_prob)
    lowered = (divergence <= clip_low) | (prob >= old_prob)
    return dppo_loss(t, torch.where(t.advantages > 0, raised, lowered), config.clip_ratio_c)


@listed("gspo", silent_at_zero=True)
@token_loss(default="seq-mean-token-mean")
def compute_policy_loss_gspo(t: Tokens, config: LossConfig) -> TokenLosses:
    """GSPO (arXiv:2507.18071), its token form: `clip_loss` of each row's exp(mean log-ratio), at most e^10, without the
    dual clip. Its gradient with respect to the token's own log-ratio is that ratio, to all others 0.

    The paper's bounds are around 3e-4, and its mean is seq-mean-token-mean.
    """
    mean = masked_mean(t.log_ratio, t.mask, axis=-1).detach().unsqueeze(-1)
    ratio = (mean + (t.log_ratio - t.log_ratio.detach())).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    losses, clipped = clip_loss(ratio, t.advantages, *clip_bounds(config))
    return losses, clip_metrics(t.log_ratio, clipped)


@listed("sapo", silent_at_zero=True)
@token_loss("seq-mean-token-mean")
def compute_policy_loss_sapo(t: Tokens, config: LossConfig) -> TokenLosses:
    """SAPO (arXiv:2511.20347): -A · 4/τ · sigmoid(τ · (ratio - 1)), with τ = tau_pos where A > 0 and tau_neg elsewhere,
    always aggregated by seq-mean-token-mean.

    On policy its gradient is -A; off policy it fades smoothly, the sooner the larger τ is.
    """
    log_ratio = bound_log_ratio(t.log_ratio)
    tau = torch.full_like(log_ratio, config.tau_neg).masked_fill(t.advantages > 0, config.tau_pos)
    return -t.advantages * 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)), clip_metrics(log_ratio)


@listed("gpg", silent_at_zero=True)
@token_loss()
def compute_policy_loss_gpg(t: Tokens, config: LossConfig) -> TokenLosses:
    """GPG (arXiv:2504.02546): -A · log_prob, the plain policy gradient; `old_log_prob` is not read, no metrics."""
    return -t.advantages * t.log_prob, {}


def token_covariances(t: Tokens) -> Tensor:
    """Computes (A - mean A) · (log_prob - mean log_prob) of valid tokens, without gradient; -inf elsewhere. [B, R]

    It is what a token adds to the covariance that drives the entropy down (arXiv:2505.22617).
    """
    centred = [values.detach() - masked_mean(values.detach(), t.mask) for values in (t.advantages, t.log_prob)]
    return torch.where(t.mask.bool(), centred[0] * centred[1], -torch.inf)


def share_of_tokens(share: float, mask: Tensor) -> int:
    """Counts `share` of the valid tokens, rounded down, but at least one where there is any place at all."""
    return min(max(1, int(share * int(mask.sum()))), mask.numel())


@listed("clip_cov", over_mini_batch=True)
@token_loss()
def compute_policy_loss_clip_cov(t: Tokens, config: LossConfig) -> TokenLosses:
    """Clip-Cov (arXiv:2505.22617): `clip_loss`, and no loss at a few random tokens of high covariance.

    Drawn, by torch's global CPU generator, are `clip_cov_ratio` of the valid tokens, from those that the clip leaves
    alone and whose `token_covariances` lie between `clip_cov_lb` and `clip_cov_ub`; `pg_clipfrac` counts them alone.
    """
    settings = config.policy_loss
    losses, clipped = clip_loss(t.log_ratio.exp(), t.advantages, *clip_bounds(config))
    covariances = token_covariances(t)
    eligible = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub) & ~clipped
    indices = eligible.flatten().nonzero().squeeze(-1)
    drawn = indices[torch.randperm(len(indices))[: share_of_tokens(settings.clip_cov_ratio, t.mask)].to(indices.device)]
    dropped = torch.zeros_like(eligible).flatten().index_fill(0, drawn, True).view_as(eligible)
    return zero_masked(losses, ~dropped), {"actor/pg_clipfrac": dropped, "actor/ppo_kl": -t.log_ratio}


@listed("kl_cov", over_mini_batch=True)
@token_loss()
def compute_policy_loss_kl_cov(t: Tokens, config: LossConfig) -> TokenLosses:
    """KL-Cov (arXiv:2505.22617): -A · ratio, plus `ppo_kl_coef` · |log ratio| at the tokens of highest covariance.

    Those are `kl_cov_ratio` of the valid tokens, by `token_covariances`. `ppo_kl` is the mean of |log ratio|.
    """
    highest = token_covariances(t).flatten().topk(share_of_tokens(config.policy_loss.kl_cov_ratio, t.mask)).indices
    penalised = torch.zeros_like(t.mask, dtype=torch.bool).flatten().index_fill(0, highest, True).view_as(t.mask)
    penalty = config.policy_loss.ppo_kl_coef * zero_masked(t.log_ratio.abs(), penalised)
    return -t.advantages * t.log_ratio.exp() + penalty, {"actor/ppo_kl": t.log_ratio.abs()}


@listed("geo_mean", silent_at_zero=True)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: LossConfig | None = None,
    *,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """GMPO (arXiv:2507.20673): -(mean A) · exp(mean u) of each row, averaged over the rows that have tokens, whatever
    the mode; u is the log-ratio clipped to the config's bounds where that is worse, and 0 where A is.

    Importance weights enter as their geometric mean over the row. Differs from verl, which divides by all rows of the
    call, those without tokens too.
    """
    clip_low, clip_high = clip_bounds(config)
    log_ratio, sign = zero_masked(log_prob - old_log_prob, response_mask), advantages.sign()
    bounded = log_ratio.clamp(-clip_low, clip_high)
    pessimistic, clipped = sign * torch.minimum(sign * log_ratio, sign * bounded), log_ratio != bounded
    ratio = masked_mean(pessimistic, response_mask, axis=-1).exp()
    losses = -masked_mean(advantages, response_mask, axis=-1) * ratio
    metrics = clip_metrics(log_ratio, clipped & (advantages > 0), clipped & (advantages < 0))
    return mean_of_rows(losses, response_mask, config, rollout_is_weights), masked_means(metrics, response_mask)


def mean_of_rows(losses: Tensor, mask: Tensor, config: LossConfig, rollout_is_weights: Tensor | None) -> Tensor:
    """Averages losses [B] over the rows that have tokens, each times the geometric mean of its importance weights."""
    if rollout_is_weights is not None:
        losses = losses * masked_mean((rollout_is_weights + 1e-10).log(), mask, axis=-1).exp()
    has_tokens = mask.bool().any(-1, keepdim=True)
    return agg_loss(losses.unsqueeze(-1), has_tokens, "seq-mean-token-sum", **config.global_batch_info)


@listed("sppo")
def compute_policy_loss_sppo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: LossConfig | None = None,
    *,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """SPPO (arXiv:2405.00675): (u - sppo_eta · mean A)² of each row, averaged over the rows that have tokens, whatever
    the mode; u is the sum of the row's log-ratios. So a step moves an answer by sppo_eta · A nats, and no further."""
    log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
    losses = (log_ratio.sum(-1) - config.sppo_eta * masked_mean(advantages, response_mask, axis=-1)) ** 2
    metrics = masked_means({"actor/ppo_kl": -log_ratio}, response_mask)
    return mean_of_rows(losses, response_mask, config, rollout_is_weights), metrics


@listed("cispo", silent_at_zero=True)
@token_loss()
def compute_policy_loss_cispo(t: Tokens, config: LossConfig) -> TokenLosses:
    """CISPO (arXiv:2506.13585): -A · sg(clamp(ratio)) · log_prob, so that clipped tokens still learn."""
    clip_low, clip_high = clip_bounds(config)
    log_ratio = bound_log_ratio(t.log_ratio)
    ratio = log_ratio.exp().detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -t.advantages * bounded * t.log_prob, clip_metrics(log_ratio, (ratio != bounded) & (t.advantages != 0))


@listed("dro")
@token_loss()
def compute_policy_loss_dro(t: Tokens, config: LossConfig) -> TokenLosses:
    """DRO (arXiv:2405.19107), policy part: -A · log_prob + dro_beta / 2 · (log ratio)².

    Raises ValueError unless `policy_loss.dro_beta` is a positive number.
    """
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"policy_loss.dro_beta is {beta}, but policy_loss.loss_mode=dro needs a number above 0")
    return 0.5 * beta * t.log_ratio**2 - t.advantages * t.log_prob, {"actor/ppo_kl": -t.log_ratio}
