"""The algorithms of RL post-training, as a catalogue of pure functions over padded tensors.

Advantage estimators, aggregation of per-token losses, policy losses, value and entropy losses, KL penalties and their
controllers. A new entry is one short function under `@register_adv_est("name")` or `@register_policy_loss("name")`.

Shapes: B sequences, R the padded response width. `response_mask` [B, R] is 1 on tokens the policy produced and 0 on
padding, observations and tool text; a row whose mask is all zero is a failed episode. What lies under the zeros does
not matter, except that outcome estimators score a row by the sum of all its rewards, wherever they lie.
Metrics: a policy loss returns python floats, each the mean of a per-token quantity over `response_mask`, so weighting
micro-batches by their number of valid tokens pools them into the exact mean of the whole.
Left out: whatever needs a batch object, a device or a process group.
"""

from collections.abc import Callable, Hashable, Sequence
from enum import Enum, StrEnum
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.torch_functional import (
    clip_by_value,
    entropy_from_logits,
    masked_mean,
    masked_sum,
    masked_whiten,
    zero_masked,
)

MAX_LOG_RATIO = 20.0  # keeps exp() finite; a token further off policy than this gets no gradient through its ratio

AdvEstimatorFn = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, float]]]

ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}
POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}


class AdvantageEstimator(StrEnum):
    """The built-in names; user-registered estimators are plain strings beside them."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


# Estimators that compare the samples of one prompt: a group of one would be compared with nothing.
NEEDS_GROUPS = {AdvantageEstimator.GRPO, AdvantageEstimator.RLOO}


def register_adv_est(name_or_enum: str | Enum) -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Decorator that adds an advantage estimator; raises ValueError if another function already has the name."""
    name = _registry_key(name_or_enum)

    def register(fn: AdvEstimatorFn) -> AdvEstimatorFn:
        known = ADV_ESTIMATOR_REGISTRY.setdefault(name, fn)
        if known is not fn:
            raise ValueError(
                f"Advantage estimator {name!r} has already been registered, by module {known.__module__}: "
                f"choose another name, or delete ADV_ESTIMATOR_REGISTRY[{name!r}] first"
            )
        return fn

    return register


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvEstimatorFn:
    """The estimator registered under this exact name; raises ValueError if there is none."""
    name = _registry_key(name_or_enum)
    if name not in ADV_ESTIMATOR_REGISTRY:
        known = list(ADV_ESTIMATOR_REGISTRY)
        raise ValueError(f"Unknown advantage estimator simply: {name}. Registered estimators are: {known}")
    return ADV_ESTIMATOR_REGISTRY[name]


def _registry_key(name_or_enum: str | Enum) -> str:
    return name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator that adds a policy loss, replacing any of the same name."""

    def register(fn: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSS_REGISTRY[name] = fn
        return fn

    return register


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss registered under this exact name; raises ValueError if there is none."""
    if name not in POLICY_LOSS_REGISTRY:
        raise ValueError(f"Unsupported loss mode: {name}. Supported modes are: {list(POLICY_LOSS_REGISTRY)}")
    return POLICY_LOSS_REGISTRY[name]


class Groups:
    """Statistics over the samples of each prompt; every method maps one number per row [B] to one per row [B].

    Failed rows leave the statistics (in verl they count like any sample): a group of 4 of which 1 failed gives
    exactly what a group of 3 gives. A group of one has nothing to compare with: its mean counts as 0 and its std as
    1, so that its raw score stands.

    `index` [B] names each row's group by any hashable; it may be a list, an array or a tensor.
    """

    def __init__(self, index: Sequence[Hashable] | np.ndarray | Tensor, response_mask: Tensor) -> None:
        labels = index.tolist() if isinstance(index, np.ndarray | Tensor) else index
        if len(labels) != len(response_mask):
            raise ValueError(
                f"index names the group of {len(labels)} rows, but response_mask has {len(response_mask)}: "
                "pass one group label per row"
            )
        codes: dict[Hashable, int] = {}
        row_codes = [codes.setdefault(label, len(codes)) for label in labels]
        self._group = torch.tensor(row_codes, dtype=torch.int64, device=response_mask.device)
        self._num_groups = len(codes)
        self._valid = response_mask.bool().any(-1)
        self.count = self.reduce(self._valid.float(), "sum")

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """`how` of `scatter_reduce` ("sum", "amax", ...) over the group's valid rows; 0 where it has none."""
        per_group = values.new_zeros(self._num_groups).scatter_reduce(
            0, self._group[self._valid], values[self._valid], how, include_self=False
        )
        return per_group[self._group]

    def mean(self, values: Tensor) -> Tensor:
        """Mean of the group; the mean of equal values is exactly that value."""
        # Averaging distances to the largest is what makes it exact. The plain mean, verl's, of seven times 0.3 is
        # off by 3e-8, and GRPO divides the difference by 1e-6.
        largest = self.reduce(values, "amax")
        mean = largest + self.reduce(values - largest, "sum") / self.count.clamp(min=1)
        return torch.where(self.count > 1, mean, 0)

    def std(self, values: Tensor) -> Tensor:
        """Standard deviation of the group with n - 1 in the denominator; exactly 0 for equal values."""
        squares = self.reduce((values - self.mean(values)) ** 2, "sum")
        return torch.where(self.count > 1, (squares / (self.count - 1).clamp(min=1)).sqrt(), 1)


def spread_over_tokens(per_row: Tensor, response_mask: Tensor) -> Tensor:
    """Give each valid token of a row the row's number, and every other position 0: [B] -> [B, R]."""
    return zero_masked(per_row.unsqueeze(-1), response_mask)


def sum_to_go(values: Tensor, response_mask: Tensor, discount: float) -> Tensor:
    """S_t = values_t + discount · S_(next valid t), [B, R]; a masked position repeats the sum to its right.

    Observations between two turns are jumped over: they neither add to the sum nor cost a step of discount.
    """
    valid = response_mask.bool()
    sums = torch.empty_like(values)
    carry = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        carry = torch.where(valid[:, t], values[:, t] + discount * carry, carry)
        sums[:, t] = carry
    return sums


def whiten_advantages(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """`masked_whiten`, but 0 for fewer than two valid tokens, where verl raises: nothing stands out from itself."""
    if response_mask.sum() < 2:
        return torch.zeros_like(advantages)
    return masked_whiten(advantages, response_mask)


# Advantage estimators return (advantages, returns), both [B, R] float32 like `token_level_rewards`, without gradient.


@register_adv_est(AdvantageEstimator.GAE)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438) along the valid tokens, whitened over the batch.

    returns = unwhitened advantages + values. Rewards and values at masked positions are ignored; the advantages
    there are not zero, as in verl: mask before use.
    """
    # With discount 0 the sum to go is the value itself or, at a masked position, that of the next valid token.
    value_or_next = sum_to_go(values, response_mask, discount=0.0)
    next_values = F.pad(value_or_next[:, 1:], (0, 1))
    deltas = token_level_rewards + gamma * next_values - values
    advantages = sum_to_go(deltas, response_mask, gamma * lam)
    return whiten_advantages(advantages, response_mask), advantages + values


@register_adv_est(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable] | np.ndarray | Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """GRPO (arXiv:2402.03300): a sample's score minus its group's mean, over the group's std + epsilon.

    Without `norm_adv_by_std_in_grpo` it is the difference alone (Dr. GRPO, arXiv:2503.20783). `config` is not read.
    """
    groups = Groups(index, response_mask)
    scores = token_level_rewards.sum(-1)
    advantages = scores - groups.mean(scores)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + epsilon)
    advantages = spread_over_tokens(advantages, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.RLOO)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable] | np.ndarray | Tensor,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out (arXiv:2402.14740): a sample's score minus the mean of the others in its group."""
    groups = Groups(index, response_mask)
    scores = token_level_rewards.sum(-1)
    # The mean includes the sample itself; n / (n - 1) turns the distance to it into that to the mean of the others.
    advantages = (scores - groups.mean(scores)) * groups.count / (groups.count - 1).clamp(min=1)
    advantages = spread_over_tokens(advantages, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv:2501.03262): returns discounted by `config.gamma`, whitened over the batch's valid tokens."""
    returns = zero_masked(sum_to_go(token_level_rewards, response_mask, config.gamma), response_mask)
    return zero_masked(whiten_advantages(returns, response_mask), response_mask), returns


LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregate per-token losses [B, R] to a scalar.

    | mode | value |
    |---|---|
    | token-mean | sum over tokens / tokens |
    | token-sum | sum over tokens |
    | seq-mean-token-sum | sum over tokens / sequences |
    | seq-mean-token-mean | sum over sequences of their token means / sequences |
    | seq-mean-token-sum-norm | sum over tokens / sequences / `loss_scale_factor` (default R) |

    For a piece of a mini-batch pass the counts of the whole: `batch_num_tokens` valid tokens, `global_batch_size`
    sequences with at least one, and `loss_scale_factor` where widths may differ. Then the losses and gradients of
    any cut into micro-batches add up to the whole's. Without them, the counts are this tensor's own.
    `dp_size` cancels a gradient all-reduce that averages over that many ranks; leave it 1 where gradients are summed.

    Differs from verl: no mode lets NaN out from under the mask, and an empty mask gives 0 with zero gradient, not NaN.

    Raises ValueError on an unknown mode, or if dp_size > 1 and the mode's global count is missing.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(f"Invalid loss_agg_mode: {loss_agg_mode}. Choose one of {', '.join(LOSS_AGG_MODES)}")
    total = dp_size * masked_sum(loss_mat, loss_mask)
    if loss_agg_mode == "token-sum":
        return total
    if loss_agg_mode == "token-mean":
        return total / _global_count("batch_num_tokens", batch_num_tokens, loss_mask.sum(), dp_size)
    if loss_agg_mode == "seq-mean-token-mean":
        total = dp_size * masked_mean(loss_mat, loss_mask, axis=-1).sum()
    if loss_agg_mode == "seq-mean-token-sum-norm":
        total = total / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return total / _global_count("global_batch_size", global_batch_size, loss_mask.bool().any(-1).sum(), dp_size)


def _global_count(name: str, count: int | Tensor | None, local_count: Tensor, dp_size: int) -> Tensor:
    if count is None and dp_size > 1:
        raise ValueError(
            f"dp_size is {dp_size} but {name} is None: each rank would divide by its own count and the average over "
            f"ranks would depend on how the batch was cut; pass {name} summed over all ranks"
        )
    count = local_count if count is None else torch.as_tensor(count)
    return torch.where(count > 0, count, 1)  # nothing to average: the numerator is 0 already


class PolicyLossConfig(Protocol):
    """What the policy losses read from `actor_rollout_ref.actor`."""

    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float
    global_batch_info: dict[str, Any]  # keyword arguments of `agg_loss`


def clip_bounds(config: PolicyLossConfig) -> tuple[float, float]:
    """(low, high), each `clip_ratio` where unset: unlike under verl's defaults, setting `clip_ratio` alone works."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def masked_means(per_token: dict[str, Tensor], response_mask: Tensor) -> dict[str, float]:
    """The metrics of a policy loss: each [B, R] quantity's mean over the mask, in one transfer from the device."""
    means = torch.stack([masked_mean(values.detach().float(), response_mask) for values in per_token.values()])
    return dict(zip(per_token, means.tolist(), strict=True))


def _weigh_and_aggregate(
    losses: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: PolicyLossConfig,
    rollout_is_weights: Tensor | None,
) -> Tensor:
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)


def dual_clip_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, clip_ratio_c: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped objective (arXiv:1707.06347) with the dual clip (arXiv:1912.09729), elementwise.

    With ratio = exp(log_ratio) and A the advantage, the loss is max(-A · ratio, -A · clamp(ratio, 1 - clip_low,
    1 + clip_high)) and, where A < 0, at most -A · clip_ratio_c.

    Returns (losses, clipped, dual_clipped); the last two are bool and mark where each clip lowered the objective
    or raised it back. Raises AssertionError unless clip_ratio_c > 1.
    """
    assert clip_ratio_c > 1, (
        f"clip_ratio_c is {clip_ratio_c}, but must be above 1: it caps the ratio where the advantage is negative, "
        "and must leave room above the on-policy ratio of 1 (verl's default is 3)"
    )
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    # maximum and minimum, not where: they split the gradient at exact ties, as verl's do.
    pessimistic = torch.maximum(unclipped, clipped)
    cap = -advantages * clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, cap), pessimistic)
    return losses, clipped > unclipped, (pessimistic > cap) & (advantages < 0)


# Policy losses take log-probs, advantages, mask and importance weights of shape [B, R], and return (scalar loss with
# gradient, metrics). The log-ratio is zeroed under the mask first, so that not even a NaN there reaches the gradient.


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: PolicyLossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped loss with dual clip: `dual_clip_loss` of the config's bounds."""
    clip_low, clip_high = clip_bounds(config)
    log_ratio = zero_masked(log_prob - old_log_prob, response_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    losses, clipped, dual_clipped = dual_clip_loss(
        log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=config.clip_ratio_c
    )
    metrics = {"actor/pg_clipfrac": clipped, "actor/ppo_kl": -log_ratio, "actor/pg_clipfrac_lower": dual_clipped}
    loss = _weigh_and_aggregate(losses, response_mask, loss_agg_mode, config, rollout_is_weights)
    return loss, masked_means(metrics, response_mask)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **global_batch_info: Any,
) -> tuple[Tensor, Tensor]:
    """Half the squared error to the returns, or that of predictions clipped to `values` ± `cliprange_value` if larger.

    All tensors [B, R]; `values` are the predictions before the update. `global_batch_info` goes to `agg_loss`.
    Returns (loss, clip_fraction), both scalar tensors, the second without gradient.
    """
    vpreds = zero_masked(vpreds, response_mask)
    clipped_vpreds = clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    errors = (vpreds - returns) ** 2
    clipped_errors = (clipped_vpreds - returns) ** 2
    losses = torch.maximum(errors, clipped_errors)
    loss = 0.5 * agg_loss(losses, response_mask, loss_agg_mode, **global_batch_info)
    return loss, masked_mean((clipped_errors > errors).float(), response_mask)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregated entropy of logits [B, R, V]: a bonus, to be subtracted from the loss."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html).

    With k = logprob - ref_logprob: "kl", "k1" is k; "abs" |k|; "mse", "k2" k² / 2; "low_var_kl", "k3"
    exp(-k) + k - 1 with -k clamped to ±20 and the result to ±10.
    Raises NotImplementedError for other names, and for "full", which needs logits.
    """
    log_ratio = logprob - ref_logprob
    match kl_penalty:
        case "kl" | "k1":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "mse" | "k2":
            return 0.5 * log_ratio**2
        case "low_var_kl" | "k3":
            inverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (inverse.exp() - inverse - 1).clamp(-10, 10)
        case "full":
            raise NotImplementedError("kl_penalty 'full' needs the logits of both models: choose 'k1', 'k2' or 'k3'")
    raise NotImplementedError(
        f"kl_penalty is {kl_penalty!r}, but must be one of kl, k1, abs, mse, k2, low_var_kl, k3, each also with a "
        "trailing '+' for the gradient of k2"
    )


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """`kl_penalty_forward`; a trailing "+" keeps its value but takes the gradient of k2.

    The expected gradient of k2 over the policy's samples is that of the KL divergence; of k1 it is zero.
    """
    value = kl_penalty_forward(logprob, ref_logprob, kl_penalty.removesuffix("+"))
    if not kl_penalty.endswith("+"):
        return value
    surrogate = kl_penalty_forward(logprob, ref_logprob, "k2")
    return value.detach() + (surrogate - surrogate.detach())


class FixedKLController:
    """A KL coefficient that stays what it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt."""


class AdaptiveKLController:
    """A KL coefficient that follows the measured KL towards a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move by at most 20 % per `horizon` samples, given the mean KL of the last `n_steps` samples."""
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """The controller for `algorithm.kl_ctrl` (type, kl_coef, target_kl, horizon in samples).

    Raises NotImplementedError on another type than "fixed" or "adaptive", AssertionError on a horizon <= 0.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        assert kl_ctrl.horizon > 0, f"kl_ctrl.horizon is {kl_ctrl.horizon}, but must be a positive number of samples"
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise NotImplementedError(f"kl_ctrl.type is {kl_ctrl.type!r}, but must be 'fixed' or 'adaptive'")
