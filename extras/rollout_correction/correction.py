"""Corrects for a rollout engine whose probabilities are not the trainer's ("rollout correction" in verl).

Importance weights for the policy loss, rejection of tokens or rows that drifted too far, and diagnostics of the drift.
`log_ratio` [B, R] is x = log π_train - log π_rollout of the sampled tokens; `response_mask` [B, R] is 1 on tokens that
the policy produced. What lies under its zeros does not matter, and a row of zeros enters no statistic.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import Config
from data.protocol import DataProto
from data.types import Metrics, Stage
from extras.rollout_correction.settings import (
    BYPASS_LOSS,
    RolloutCorrectionConfig,
    Threshold,
    parse_band,
    parse_rejection,
)
from training.advantage import estimator_needs
from training.losses import (
    LossConfig,
    PolicyLoss,
    bound_log_ratio,
    compute_policy_loss_reinforce,
    compute_policy_loss_vanilla,
    masked_mean,
    masked_sum,
    register_policy_loss,
    zero_masked,
)
from training.roles import POLICY_COLUMNS


class RolloutCorrection(Stage):
    """Adds the columns loss_mask, response_mask without the rejected tokens, and rollout_is_weights, [B, R].

    A rejected token is not learnt from, but what it led to was measured, so it stays in the group's statistics, and an
    outcome that was paid on it is not lost: the advantages go by response_mask. In bypass mode the rollout's log-probs
    are the old ones, and the loss corrects. Where nothing is asked for, the drift is measured.
    """

    at = "prepared"

    @classmethod
    def check(cls, config: Config) -> None:
        absent = estimator_needs(config.algorithm.adv_estimator) & set(POLICY_COLUMNS) - {"old_log_probs"}
        if absent and config.algorithm.rollout_correction.bypass_mode:
            raise ConfigError(
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs {sorted(absent)}, for which algorithm."
                "rollout_correction.bypass_mode=true makes no pass: take one of the two back."
            )

    @classmethod
    def reads(cls, config: Config) -> set[str]:
        return {"old_log_probs"} if config.algorithm.rollout_correction.corrects else set()

    @classmethod
    def makes(cls, config: Config) -> set[str]:
        settings = config.algorithm.rollout_correction
        if settings.bypass_mode:
            return {"old_log_probs"}
        return {"rollout_is_weights"} if settings.rollout_is else set()

    @classmethod
    def loss_settings(cls, config: Config) -> dict[str, Any]:
        settings = config.algorithm.rollout_correction
        return {"rollout_correction": settings} | ({"loss_mode": BYPASS_LOSS} if settings.bypass_mode else {})

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        return correct_rollout(batch, self.config.algorithm.rollout_correction)


def correct_rollout(batch: DataProto, config: RolloutCorrectionConfig) -> Metrics:
    """Corrects where old_log_probs stand beside rollout_log_probs; else, or if all rows failed, does nothing.

    Raises ConfigError if rollouts are to be corrected by log-probs that their engine does not return.
    """
    columns, mask = batch.batch, batch.batch["response_mask"]
    if config.corrects and "rollout_log_probs" not in batch:
        raise ConfigError(
            "algorithm.rollout_correction reads the column rollout_log_probs, which the rollout engine of yours does "
            "not return: have generate_sequences return it ([B, R], after temperature), or set rollout_correction=null."
        )
    if config.bypass_mode:
        columns["old_log_probs"] = columns["rollout_log_probs"]
        return {}
    if not ("old_log_probs" in batch and "rollout_log_probs" in batch and mask.any()):
        return {}
    log_probs = columns["old_log_probs"], columns["rollout_log_probs"]
    weights, columns["loss_mask"], metrics = correct_log_probs(*log_probs, mask, config)
    if weights is not None:
        columns["rollout_is_weights"] = weights
    return metrics | compute_rollout_probs_diff(*log_probs, mask)


def row_means(values: Tensor, response_mask: Tensor) -> Tensor:
    """Mean over the tokens of each row that has any: [B, R] -> [rows that did not fail]."""
    return masked_mean(values, response_mask, axis=-1)[response_mask.bool().any(-1)]


@torch.no_grad()
def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """(importance weights [B, R], metrics without prefix); the weights are 0 under the mask and have no gradient.

    The weight of a "token" is e^x; every token of a "sequence" weighs e^(sum of x over the row). A threshold u caps
    weights at u (truncated importance sampling, https://fengyao.notion.site/off-policy-rl); "l_u" instead makes those
    outside [l, u] zero (IcePop, arXiv:2510.18855). `rollout_is_batch_normalize` then divides them by their mean.

    Raises ValueError on another level, an impossible threshold or an empty mask, TypeError on a threshold's type.
    """
    if rollout_is not in ("token", "sequence"):
        raise ValueError(f"rollout_is is {rollout_is!r}, but must be null or one of token, sequence")
    lower, upper = parse_band("rollout_is_threshold", rollout_is_threshold)
    _refuse_empty(response_mask)
    valid, of_rows = response_mask.bool(), rollout_is == "sequence"
    log_weight = masked_sum(log_ratio, response_mask, axis=-1).unsqueeze(-1) if of_rows else log_ratio
    raw = zero_masked(bound_log_ratio(log_weight).exp(), response_mask)
    icepop, lower = lower is not None, lower or 1 / upper
    outside = (raw < lower) | (raw > upper)
    weights = raw.masked_fill(outside, 0) if icepop else raw.clamp(max=upper)
    # Of the applied weights; of the raw ones the shares beyond the band, and a row's max and min.
    tokens, rows, raw_rows, band = weights[valid], row_means(weights, valid), row_means(raw, valid), (lower, upper)
    extremes = raw_rows if of_rows else tokens
    metrics = {
        "mean": tokens.mean(),
        "max": extremes.max(),
        "min": extremes.min(),
        "std": tokens.std(correction=0),
        "eff_sample_size": tokens.mean() ** 2 / (tokens**2).mean().clamp(min=1e-30),  # 0 if IcePop left no weight
        **_beyond("ratio_fraction", raw_rows if of_rows else raw[valid], band),
        **_row_metrics(rows, center=1.0),
        **_beyond("seq_fraction", raw_rows, band),
    }
    if icepop:
        metrics["oob_ratio"] = _share(outside[valid])
    metrics = _floats({f"rollout_is_{name}": value for name, value in metrics.items()})
    if rollout_is_batch_normalize:
        mean = (rows if of_rows else tokens).mean().item()
        factor = mean if mean > 1e-8 else 1.0  # nothing is left to normalise if every weight is 0
        weights, metrics["rollout_is_batch_norm_factor"] = weights / factor, factor
    return weights, metrics


# Estimators of the KL divergence of the rollout from the training policy (http://joschu.net/blog/kl-approx.html). k1
# has a sign and a band, written as bounds of the ratio π_rollout / π_train: the inverse of the importance weight.
DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x**2,
    "k3": lambda x: x.expm1() - x,
}
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "seq_sum": lambda values, mask: masked_sum(values, mask, axis=-1).unsqueeze(-1),
    "seq_mean": lambda values, mask: masked_mean(values, mask, axis=-1).unsqueeze(-1),
    # The statistics it goes with are never negative, and 0 under the mask.
    "seq_max": lambda values, mask: values.amax(-1, keepdim=True),
}


@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str | None = "token_k1",
    rollout_rs_threshold: Threshold | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(`response_mask` without the tokens rejected, in its dtype; metrics without prefix, none if the mask is empty).

    `rollout_rs` names any of `REJECTION_OPTIONS`, joined by commas: a statistic of a token, or of a row, which then
    stays or goes as a whole; what passes them all stays. `rollout_rs_threshold` is one entry for all or one for each:
    for k1 "lower_upper" or an upper bound u, meaning 1/u to u, of the ratio; for k2, k3 an upper bound of the
    statistic.

    Raises ValueError on an unknown option or an impossible threshold, TypeError on one of another type.
    """
    bands = parse_rejection(rollout_rs, rollout_rs_threshold)
    valid = response_mask.bool()
    if not valid.any():
        return response_mask.clone(), {}
    log_ratio = bound_log_ratio(zero_masked(log_ratio, response_mask))
    keep, metrics = torch.ones_like(valid), {}
    for option, (low, high) in bands.items():
        unit, _, kind = option.rpartition("_")
        statistic = REDUCTIONS[unit](DIVERGENCES[kind](log_ratio), response_mask)
        passed = ((statistic >= low) & (statistic <= high)).expand_as(valid)
        keep = keep & passed
        described = _rejection_metrics(statistic, valid, (low, high)) | _rejected(passed, valid)
        metrics |= {f"rollout_rs_{option}_{name}": value for name, value in described.items()}
    metrics |= {f"rollout_rs_{name}": value for name, value in _rejected(keep, valid).items()}
    return response_mask.masked_fill(~keep, 0), _floats(metrics)


def _rejection_metrics(statistic: Tensor, valid: Tensor, band: tuple[float, float]) -> dict[str, Tensor]:
    rows = row_means(statistic.expand(valid.shape), valid)
    tokens = statistic.expand(valid.shape)[valid]
    units = tokens if statistic.shape == valid.shape else rows
    return {
        "mean": tokens.mean(),
        "max": units.max(),
        "min": units.min(),
        "std": tokens.clamp(*band).std(correction=0),
        **_beyond("fraction", units, band),
        **_row_metrics(rows, center=0.0),
        **_beyond("seq_fraction", rows, band),
    }


def _rejected(keep: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Shares of the tokens that are rejected, and of the rows that lose any."""
    rejected = valid & ~keep
    return {
        "masked_fraction": _share(rejected[valid]),
        "seq_masked_fraction": _share(rejected.any(-1)[valid.any(-1)]),
    }


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Measures how far two log-probs [B, R] of the same tokens differ; without `rollout_log_prob`, the perplexity.

    With l, q the row means of the training and rollout log-probs: ppl is mean e^-l, the log_ppl_diff metrics are of
    q - l, and ppl_ratio is mean e^(q - l). kl and k3_kl estimate KL(rollout || training) in nats a token; chi2 is
    mean ratio² - 1, of tokens and of rows. Raises AssertionError on an empty mask.
    """
    assert response_mask.any(), "response_mask selects no token: there is nothing to compare"
    train = row_means(old_log_prob, response_mask)
    metrics = {"training_ppl": (-train).exp().mean(), "training_log_ppl": -train.mean()}
    if rollout_log_prob is None:
        return _floats(metrics)
    rollout = row_means(rollout_log_prob, response_mask)
    valid, diff = response_mask.bool(), rollout - train
    log_ratio = zero_masked(old_log_prob - rollout_log_prob, response_mask)
    tokens, row_sums = log_ratio[valid], log_ratio.sum(-1)[valid.any(-1)]
    metrics |= {
        "kl": -tokens.mean(),
        "k3_kl": (tokens.expm1() - tokens).mean(),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": -rollout.mean(),
        "log_ppl_diff": diff.mean(),
        "log_ppl_abs_diff": diff.abs().mean(),
        "log_ppl_diff_max": diff.max(),
        "log_ppl_diff_min": diff.min(),
        "ppl_ratio": diff.exp().mean(),
        "chi2_token": (2 * bound_log_ratio(tokens)).expm1().mean(),
        "chi2_seq": (2 * bound_log_ratio(row_sums)).expm1().mean(),
    }
    return _floats(metrics)


def correct_log_probs(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """(importance weights if `config.rollout_is` is set, mask after rejection, metrics under "rollout_corr/").

    Weights and the metrics of both use the mask as it came; the weights are not zeroed where tokens are rejected.
    Raises ValueError on an empty mask or unequal shapes, and what the two parts raise.
    """
    shapes = [tuple(tensor.shape) for tensor in (old_log_prob, rollout_log_prob, response_mask)]
    if len(set(shapes)) > 1:
        raise ValueError(f"old_log_prob, rollout_log_prob and response_mask have shapes {shapes}: they must be equal")
    _refuse_empty(response_mask)
    log_ratio = old_log_prob - rollout_log_prob
    weights, new_mask, metrics = None, response_mask.clone(), {}
    if config.rollout_is is not None:
        weights, metrics = compute_rollout_correction_weights(
            log_ratio,
            response_mask,
            config.rollout_is,
            config.rollout_is_threshold,
            config.rollout_is_batch_normalize,
        )
    if config.rollout_rs is not None:
        new_mask, rejection = compute_rollout_rejection_mask(
            log_ratio, response_mask, config.rollout_rs, config.rollout_rs_threshold
        )
        metrics |= rejection
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return weights, new_mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
    *,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Threshold | None = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """`correct_log_probs` as verl has it: the settings one by one, the weights as the column rollout_is_weights."""
    config = RolloutCorrectionConfig(
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold
    )
    weights, mask, metrics = correct_log_probs(old_log_prob, rollout_log_prob, response_mask, config)
    return (None if weights is None else DataProto.from_dict({"rollout_is_weights": weights})), mask, metrics


@torch.no_grad()
def compute_rollout_probs_diff(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Measures how far the sampled tokens' probabilities differ, as training/rollout_probs_diff_{valid, max, mean, std}
    and training/rollout_actor_probs_pearson_corr. What is not defined is left out; an empty mask gives {}."""
    valid = response_mask.bool()
    if not valid.any():
        return {}
    probs = torch.stack([old_log_prob[valid], rollout_log_prob[valid]]).exp()
    diff = (probs[0] - probs[1]).abs()
    name = "training/rollout_probs_diff"
    metrics = {f"{name}_valid": diff.new_ones(()), f"{name}_max": diff.max(), f"{name}_mean": diff.mean()}
    if len(diff) > 1:
        metrics[f"{name}_std"] = diff.std()
        correlation = torch.corrcoef(probs)[0, 1]
        if correlation.isfinite():
            metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return _floats(metrics)


def _share(condition: Tensor) -> Tensor:
    return condition.float().mean()


def _beyond(name: str, values: Tensor, band: tuple[float, float]) -> dict[str, Tensor]:
    return {f"{name}_high": _share(values > band[1]), f"{name}_low": _share(values < band[0])}


def _row_metrics(rows: Tensor, center: float) -> dict[str, Tensor]:
    """Statistics over one number per row; `center` is what it would be if training and rollout agreed."""
    return {
        "seq_mean": rows.mean(),
        "seq_std": rows.std() if len(rows) > 1 else torch.zeros_like(rows[0]),
        "seq_max": rows.max(),
        "seq_min": rows.min(),
        "seq_max_deviation": (rows - center).abs().max(),
    }


def _floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """`metrics` as python floats, in one transfer from the device."""
    return dict(zip(metrics, torch.stack([value.float() for value in metrics.values()]).tolist(), strict=True))


def _refuse_empty(response_mask: Tensor) -> None:
    if not response_mask.any():
        raise ValueError("response_mask selects no token: leave out a batch whose rows all failed")


# loss_type -> (the loss, whether the importance weights enter it: a clipped ratio corrects already)
BYPASS_LOSSES = {"ppo_clip": (compute_policy_loss_vanilla, False), "reinforce": (compute_policy_loss_reinforce, True)}


LOSSES: dict[str, PolicyLoss] = {}  # configs/extras.py names it


@register_policy_loss(BYPASS_LOSS, registry=LOSSES, silent_at_zero=True)
def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: LossConfig | None = None,
    *,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """A loss straight from the rollout to the policy in training: `old_log_prob` are the rollout's log-probs.

    `config.policy_loss.rollout_correction` says which tokens are rejected for their ratio, and `loss_type`, one of
    `BYPASS_LOSSES`; importance weights are those of this very update, and `rollout_is_weights` is not read. The metrics
    of drift are those of this call, so that pooled over micro-batches they are means of means; losses and gradients
    add up exactly. Raises ValueError on another `loss_type`.
    """
    settings: RolloutCorrectionConfig = config.policy_loss.rollout_correction
    if settings.loss_type not in BYPASS_LOSSES:
        raise ValueError(f"loss_type is {settings.loss_type!r}, but must be one of {', '.join(BYPASS_LOSSES)}")
    weights, mask, metrics = None, response_mask, {}
    if response_mask.any():  # a micro-batch may hold failed rows alone
        weights, mask, metrics = correct_log_probs(log_prob.detach(), old_log_prob, response_mask, settings)
    loss_fn, is_weighted = BYPASS_LOSSES[settings.loss_type]
    weights = weights if is_weighted else None
    result = loss_fn(old_log_prob, log_prob, advantages, mask, loss_agg_mode, config, rollout_is_weights=weights)
    return result[0], result[1] | metrics
