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

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import update_wrapper
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.rollout_correction import RolloutCorrectionConfig
from configs.schema import AGGREGATION_MODES, AlgorithmConfig, PolicyLossConfig
from training.rollout_correction import correct_log_probs
from training.torch_functional import (
    EPSILON,
    bound_log_ratio,
    clip_by_value,
    masked_mean,
    masked_sum,
    masked_whiten,
    zero_masked,
)

MAX_SEQUENCE_LOG_RATIO = 10.0  # of gspo: bounds a row's mean log-ratio, from above only

AdvEstimatorFn = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, float | Tensor]]]
TokenLosses = tuple[Tensor, dict[str, Tensor]]  # losses and, by name, metrics; [B, R] each
Labels = Sequence[Hashable] | np.ndarray | Tensor  # [B], the prompt of each row

ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}
POLICY_LOSS_REGISTRY: dict[str, "PolicyLoss"] = {}


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, and what those who call it have to know.

    Attributes:
        function: the loss, with the arguments of `compute_policy_loss_vanilla`.
        over_mini_batch: what a token contributes depends on the others of its mini-batch, so the actor calls the loss
            once for all of them, not for each micro-batch; that costs a forward pass more.
        silent_at_zero: a row whose advantages are all 0 adds nothing to loss or gradient, so it may be left out.
    """

    function: PolicyLossFn
    over_mini_batch: bool = False
    silent_at_zero: bool = False


class AdvantageEstimator(StrEnum):
    """The built-in names; user-registered estimators are plain strings beside them."""

    GAE = "gae"
    TURN_GAE = "turn_gae"
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


# Estimators that compare a sample with the others of its prompt alone: a group of one has no baseline at all. Those
# that whiten over the batch as well (reinforce_plus_plus_baseline, gdpo) still have the batch to compare it with.
NEEDS_GROUPS = {
    AdvantageEstimator.GRPO,
    AdvantageEstimator.GRPO_VECTORIZED,
    AdvantageEstimator.GRPO_PASSK,
    AdvantageEstimator.RLOO,
    AdvantageEstimator.RLOO_VECTORIZED,
    AdvantageEstimator.OPO,
    AdvantageEstimator.GPG,
    AdvantageEstimator.OPTIMAL_TOKEN_BASELINE,
    AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE,
}


def register_adv_est(name_or_enum: str | Enum) -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Decorator that adds an advantage estimator; raises ValueError if another function already has the name, and
    TypeError without a name."""
    name = _registry_key(name_or_enum)
    _check_name(name, "register_adv_est")

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


def _check_name(name: Any, decorator: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"@{decorator} needs the name by which the config finds the function: @{decorator}('mine')")


def register_policy_loss(
    name: str, *, over_mini_batch: bool = False, silent_at_zero: bool = False
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator that adds a policy loss, replacing any of the same name; `PolicyLoss` says what the marks mean.

    Raises TypeError without a name.
    """
    _check_name(name, "register_policy_loss")

    def register(fn: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSS_REGISTRY[name] = PolicyLoss(fn, over_mini_batch, silent_at_zero)
        return fn

    return register


def policy_loss_name(settings: PolicyLossConfig, correction: RolloutCorrectionConfig) -> str:
    return "bypass_mode" if correction.bypass_mode else settings.loss_mode


def get_policy_loss(name: str) -> PolicyLoss:
    """The policy loss registered under this exact name; raises ValueError if there is none."""
    if name not in POLICY_LOSS_REGISTRY:
        raise ValueError(f"Unsupported loss mode: {name}. Supported modes are: {list(POLICY_LOSS_REGISTRY)}")
    return POLICY_LOSS_REGISTRY[name]


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The function of a registered policy loss, as verl returns it; raises ValueError if there is none."""
    return get_policy_loss(name).function


class Groups:
    """Statistics over the samples of each prompt; every method maps one number per row [B] to one per row [B].

    `reduce` and `mean` also take [B, K], and treat each column alone.
    Failed rows leave the statistics (in verl they count like any sample): a group of 4 of which 1 failed gives
    exactly what a group of 3 gives. A baseline needs two: the mean of a row whose whole group else failed is its own
    value, so that it teaches nothing. A group that was never more than one sample has nothing to compare with: its mean
    counts as 0 and its std as 1, so that its raw score stands.

    `index` [B] names each row's group by any hashable; it may be a list, an array or a tensor.
    """

    def __init__(self, index: Labels, response_mask: Tensor) -> None:
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
        self._survives_alone = (self.count == 1) & (torch.bincount(self._group)[self._group] > 1)

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """`how` of `scatter_reduce` ("sum", "amax", ...) over the group's valid rows; 0 where it has none."""
        kept = values[self._valid]
        group = self._group[self._valid].view(-1, *[1] * (values.ndim - 1)).expand_as(kept)
        per_group = values.new_zeros(self._num_groups, *values.shape[1:])
        return per_group.scatter_reduce(0, group, kept, how, include_self=False)[self._group]

    def mean(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean of the group, weighted by `weights` >= 0; the mean of equal values is exactly that value.

        A value of weight 0 does not count, whatever it is; where fewer than two count, the mean is 0, and for a row
        whose whole group else failed its own value.
        """
        weights = torch.ones_like(values) if weights is None else weights
        counts = weights > 0
        # Averaging distances to the largest is what makes it exact. The plain mean, verl's, of seven times 0.3 is
        # off by 3e-8, and GRPO divides the difference by 1e-6.
        largest = self.reduce(torch.where(counts, values, -torch.inf), "amax")
        distances = self.reduce(weights * zero_masked(values - largest, counts), "sum")
        mean = largest + distances / self.reduce(weights, "sum")
        own = zero_masked(values, self._survives_alone.view(-1, *[1] * (values.ndim - 1)) & counts)
        return torch.where(self.reduce(counts.float(), "sum") > 1, mean, own)

    def std(self, values: Tensor) -> Tensor:
        """Standard deviation of the group with n - 1 in the denominator; exactly 0 for equal values."""
        squares = self.reduce((values - self.mean(values)) ** 2, "sum")
        return torch.where(self.count > 1, (squares / (self.count - 1).clamp(min=1)).sqrt(), 1)

    def standardize(self, values: Tensor, epsilon: float, divide_by_std: bool) -> Tensor:
        """Distance to the group's mean, over its std + `epsilon` if `divide_by_std`."""
        distance = values - self.mean(values)
        return distance / (self.std(values) + epsilon) if divide_by_std else distance


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
    """`masked_whiten`, but 0 for fewer than two valid tokens, where verl raises: nothing stands out from itself.

    Equal advantages come out as exactly 0, by counting from the largest: the mean rounds, and its error is divided by
    the root of 1e-8.
    """
    valid = response_mask.bool()
    if valid.sum() < 2:
        return torch.zeros_like(advantages)
    return masked_whiten(advantages - advantages[valid].max(), response_mask)


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
    advantages = discounted_td_errors(token_level_rewards, values, response_mask, gamma, lam)
    return whiten_advantages(advantages, response_mask), advantages + values


def discounted_td_errors(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE's sum over the valid steps s >= t of (gamma · lam)^(s - t) · (r_s + gamma · V_(s + 1) - V_s), [B, R]."""
    # With discount 0 the sum to go is the value itself or, at a masked position, that of the next valid step.
    value_or_next = sum_to_go(values, mask, discount=0.0)
    next_values = F.pad(value_or_next[:, 1:], (0, 1))
    return sum_to_go(rewards + gamma * next_values - values, mask, gamma * lam)


@register_adv_est(AdvantageEstimator.TURN_GAE)
@torch.no_grad()
def compute_turn_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    turn_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE over turns (turn-PPO, arXiv:2512.17008): a turn is one action, whitened over the batch's valid tokens.

    A turn is the policy tokens of a row that have one number in `turn_ids` [B, R]; without them a response is one turn.
    It earns the sum of its rewards, its state is worth the value at its first policy token, and `gamma` and `lam` count
    turns, where gae's count tokens. Each of its policy tokens gets its advantage and its return (advantage + value).
    """
    turns = zero_masked(torch.zeros_like(response_mask) if turn_ids is None else turn_ids, response_mask)
    shape, width = (len(turns), int(turns.max()) + 1), turns.shape[1]
    places = torch.where(response_mask.bool(), torch.arange(width, device=turns.device), width)
    first = places.new_full(shape, width).scatter_reduce(1, turns, places, "amin")
    taken = first < width  # [B, turns], as all below
    earned = zero_masked(token_level_rewards, response_mask)
    rewards = earned.new_zeros(shape).scatter_add(1, turns, earned)
    worth = zero_masked(values.gather(1, first.clamp(max=width - 1)), taken)
    advantages = discounted_td_errors(rewards, worth, taken, gamma, lam)
    per_token = zero_masked(advantages.gather(1, turns), response_mask)
    whitened = zero_masked(whiten_advantages(per_token, response_mask), response_mask)
    return whitened, zero_masked((advantages + worth).gather(1, turns), response_mask)


@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
@register_adv_est(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """GRPO (arXiv:2402.03300): a sample's score minus its group's mean, over the group's std + epsilon.

    Without `norm_adv_by_std_in_grpo` it is the difference alone (Dr. GRPO, arXiv:2503.20783). `config` is not read.
    """
    groups = Groups(index, response_mask)
    advantages = groups.standardize(token_level_rewards.sum(-1), epsilon, norm_adv_by_std_in_grpo)
    advantages = spread_over_tokens(advantages, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Pass@k (arXiv:2503.19595): the group's best sample gets its lead over the second best, all others 0.

    With `norm_adv_by_std_in_grpo` the lead is divided by the group's std + epsilon. Two best ones lead by nothing,
    and so does a sample alone in its group.
    """
    groups = Groups(index, response_mask)
    scores = token_level_rewards.sum(-1)
    is_best = scores == groups.reduce(scores, "amax")
    second = groups.reduce(torch.where(is_best, -torch.inf, scores), "amax")
    leads = is_best & (groups.reduce(is_best.float(), "sum") == 1) & (groups.count > 1)
    advantages = torch.where(leads, scores - second, 0)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + epsilon)
    advantages = spread_over_tokens(advantages, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.RLOO)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Labels, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out (arXiv:2402.14740): a sample's score minus the mean of the others in its group."""
    groups = Groups(index, response_mask)
    scores = token_level_rewards.sum(-1)
    # The mean includes the sample itself; n / (n - 1) turns the distance to it into that to the mean of the others.
    advantages = (scores - groups.mean(scores)) * groups.count / (groups.count - 1).clamp(min=1)
    advantages = spread_over_tokens(advantages, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)
@torch.no_grad()
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Labels, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """`compute_rloo_outcome_advantage`, except that a sample alone in its group gets 0, not its score."""
    advantages, _ = compute_rloo_outcome_advantage(token_level_rewards, response_mask, index)
    advantages = torch.where(Groups(index, response_mask).count.unsqueeze(-1) > 1, advantages, 0)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.OPO)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Labels, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """OPO (arXiv:2505.23585): a sample's score minus its group's mean, in which each sample weighs its tokens.

    The baseline of least variance weighs a score by its squared gradient norm, which grows as the number of tokens.
    """
    scores = token_level_rewards.sum(-1)
    baseline = Groups(index, response_mask).mean(scores, weights=response_mask.sum(-1))
    advantages = spread_over_tokens(scores - baseline, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.GPG)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GPG (arXiv:2504.02546): alpha · (samples / samples of non-zero score) · (score - the group's mean) / f_norm.

    The factor makes up for samples that teach nothing; failed rows are no samples.
    """
    scores = token_level_rewards.sum(-1)
    is_sample = response_mask.bool().any(-1)
    samples, informative = is_sample.sum(), (is_sample & (scores != 0)).sum()
    rescale = samples / informative.clamp(min=1)
    advantages = alpha * rescale * (scores - Groups(index, response_mask).mean(scores)) / f_norm
    advantages = spread_over_tokens(advantages, response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.GDPO)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    *,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
    non_tensor_batch: Mapping[str, np.ndarray] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GDPO (arXiv:2601.05242): GRPO on each of several rewards alone, their weighted sum whitened over the batch.

    The rewards are the columns of `non_tensor_batch` [B] that `config.gdpo_reward_keys` names, their weights
    `config.gdpo_reward_weights` (all 1 if None); a row where one is None takes no part in that one. Without config or
    columns it is token_level_rewards alone.
    Raises AssertionError as `reward_dimensions` does.
    """
    dimensions = [(1.0, token_level_rewards.sum(-1), response_mask)]
    if config is not None and non_tensor_batch is not None and response_mask.any():  # of failed rows nothing is known
        keys, weights = config.gdpo_reward_keys, config.gdpo_reward_weights
        dimensions = reward_dimensions(keys, weights, non_tensor_batch, response_mask)
    total = sum(
        weight * zero_masked(Groups(index, mask).standardize(scores, epsilon, norm_adv_by_std_in_grpo), mask.any(-1))
        for weight, scores, mask in dimensions
    )
    advantages = spread_over_tokens(total.to(token_level_rewards), response_mask)
    advantages = zero_masked(whiten_advantages(advantages, response_mask), response_mask)
    return advantages, advantages


def reward_dimensions(
    keys: Sequence[str] | None,
    weights: Sequence[float] | None,
    columns: Mapping[str, np.ndarray],
    response_mask: Tensor,
) -> list[tuple[float, Tensor, Tensor]]:
    """GDPO's rewards as (weight, scores [B] float64, response_mask without the rows in which they are None).

    Raises AssertionError if there are no keys, a column or a weight is missing, or a row that did not fail has no
    finite score.
    """
    assert keys, "algorithm.gdpo_reward_keys is empty, but gdpo needs the names of the rewards to normalise one by one"
    missing = [key for key in keys if key not in columns]
    assert not missing, (
        f"algorithm.gdpo_reward_keys names {missing}, but the batch has the columns {list(columns)}: "
        "return these numbers from the reward function, beside the score"
    )
    weights = [1.0] * len(keys) if weights is None else weights
    assert len(weights) == len(keys), f"gdpo_reward_weights has {len(weights)} numbers for {len(keys)} gdpo_reward_keys"
    dimensions = []
    for weight, key in zip(weights, keys, strict=True):
        column = np.asarray(columns[key])
        given = torch.tensor([value is not None for value in column], device=response_mask.device)
        mask = response_mask * given[:, None]
        scores = torch.as_tensor(column.astype(np.float64), device=response_mask.device)
        assert scores[mask.bool().any(-1)].isfinite().all(), f"reward {key!r} is not finite in a row that did not fail"
        dimensions.append((weight, scores, mask))
    return dimensions


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv:2501.03262): returns discounted by `config.gamma`, whitened over the batch's valid tokens."""
    returns = zero_masked(sum_to_go(token_level_rewards, response_mask, config.gamma), response_mask)
    return zero_masked(whiten_advantages(returns, response_mask), response_mask), returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Labels, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE++-baseline (arXiv:2501.03262): a sample's score minus its group's mean, whitened over the batch."""
    scores = token_level_rewards.sum(-1)
    advantages = spread_over_tokens(scores - Groups(index, response_mask).mean(scores), response_mask)
    advantages = zero_masked(whiten_advantages(advantages, response_mask), response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.REMAX)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv:2310.10505): the rewards to go minus `reward_baselines` [B], the score of the greedy response.

    At masked positions both results are the sum to go, as in verl: mask before use.
    """
    returns = sum_to_go(token_level_rewards, response_mask, discount=1.0)
    return returns - spread_over_tokens(reward_baselines, response_mask), returns


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    *,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline (arXiv:2602.07078): the rewards to go minus their weighted mean at the same token.

    The k-th policy tokens of a group's samples are compared, each with the weight that makes the variance of the
    gradient least: the energy of its prefix, Σ_(s <= t) ω_s² · |∂ log π_s / ∂ logits|². A token's squared norm is
    1 - 2π + Σ_v π_v²; `sum_pi_squared` [B, R] is the last term and ω `rollout_is_weights`. `epsilon`, added to each
    energy, makes it the plain mean where all is certain.
    A token that only one sample reaches has baseline 0; without `handle_zero_tail`, itself and so advantage 0.
    """
    groups = Groups(index, response_mask)
    returns = sum_to_go(token_level_rewards, response_mask, discount=1.0)
    energies = (1 - 2 * old_log_probs.exp() + sum_pi_squared).clamp(min=0)  # >= 0 but for rounding
    if rollout_is_weights is not None:
        energies = energies * rollout_is_weights**2
    weights = zero_masked(zero_masked(energies, response_mask).cumsum(-1) + epsilon, response_mask)

    # Column k of what is gathered is the row's k-th policy token: observations do not shift what is compared.
    policy_tokens_first = response_mask.long().argsort(dim=-1, descending=True, stable=True)
    nth_returns, nth_weights = returns.gather(1, policy_tokens_first), weights.gather(1, policy_tokens_first)
    baseline = groups.mean(nth_returns, nth_weights)
    if not handle_zero_tail:
        reached = groups.reduce((nth_weights > 0).float(), "sum")
        baseline = torch.where((reached == 1) & (groups.count > 1).unsqueeze(-1), nth_returns, baseline)
    baseline = torch.empty_like(baseline).scatter(1, policy_tokens_first, baseline)
    return zero_masked(returns - baseline, response_mask), returns


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
    if loss_agg_mode not in AGGREGATION_MODES:
        raise ValueError(f"Invalid loss_agg_mode: {loss_agg_mode}. Choose one of {', '.join(AGGREGATION_MODES)}")
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


class LossConfig(Protocol):
    """The `config` of a policy loss: the settings of `actor_rollout_ref.actor`, and the counts of the mini-batch."""

    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float
    tau_pos: float
    tau_neg: float
    policy_loss: Any  # configs.schema.PolicyLossConfig and, for bypass_mode, `algorithm.rollout_correction`
    global_batch_info: dict[str, Any]  # keyword arguments of `agg_loss`


def clip_bounds(config: LossConfig) -> tuple[float, float]:
    """(low, high), each `clip_ratio` where unset: unlike under verl's defaults, setting `clip_ratio` alone works."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def masked_means(per_token: dict[str, Tensor], response_mask: Tensor) -> dict[str, Tensor]:
    """Means over the mask of a policy loss's [B, R] metrics: tensors of shape (), as to read them is to wait."""
    return {name: masked_mean(values.detach().float(), response_mask) for name, values in per_token.items()}


def aggregate_tokens(mode: str | None = None, default: str = "token-mean") -> Callable[[Callable], PolicyLossFn]:
    """Decorator that makes a policy loss of a function that returns losses and metrics token by token.

    The losses are multiplied by the importance weights and aggregated by `agg_loss`, in the `mode` given here or, if
    none is, in the config's; without one, as in a call by hand, in `default`.
    """

    def decorate(token_losses: Callable[..., TokenLosses]) -> PolicyLossFn:
        def policy_loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default,
            config: LossConfig | None = None,
            *,
            rollout_is_weights: Tensor | None = None,
        ) -> tuple[Tensor, dict[str, float | Tensor]]:
            losses, metrics = token_losses(old_log_prob, log_prob, advantages, response_mask, config)
            if rollout_is_weights is not None:
                losses = losses * rollout_is_weights
            loss = agg_loss(losses, response_mask, mode or loss_agg_mode, **config.global_batch_info)
            return loss, masked_means(metrics, response_mask)

        update_wrapper(policy_loss, token_losses)
        del policy_loss.__wrapped__  # so that inspect.signature sees the arguments of policy_loss
        return policy_loss

    return decorate


def bounded_log_ratio(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """log_prob - old_log_prob, within ±20, and 0 under the mask."""
    return bound_log_ratio(zero_masked(log_prob - old_log_prob, response_mask))


def clip_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective (arXiv:1707.06347), elementwise.

    With A the advantage: max(-A · ratio, -A · clamp(ratio, 1 - clip_low, 1 + clip_high)).
    Returns (losses, clipped); the second is bool and marks where the clip lowered the objective.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def dual_clip_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, clip_ratio_c: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`clip_loss` of exp(log_ratio) and, where the advantage A < 0, at most -A · clip_ratio_c (arXiv:1912.09729).

    Returns (losses, clipped, dual_clipped); the last two are bool and mark where each clip lowered the objective
    or raised it back. Raises AssertionError unless clip_ratio_c > 1.
    """
    assert clip_ratio_c > 1, (
        f"clip_ratio_c is {clip_ratio_c}, but must be above 1: it caps the ratio where the advantage is negative, "
        "and must leave room above the on-policy ratio of 1 (verl's default is 3)"
    )
    pessimistic, clipped = clip_loss(log_ratio.exp(), advantages, clip_low, clip_high)
    cap = -advantages * clip_ratio_c
    # minimum, not where alone: it splits the gradient at exact ties, as verl's does.
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, cap), pessimistic)
    return losses, clipped, (pessimistic > cap) & (advantages < 0)


# Policy losses take log-probs, advantages, mask and importance weights of shape [B, R], and return (scalar loss with
# gradient, metrics); under `aggregate_tokens` stands what they do to each token. In their formulas A is the advantage,
# ratio is exp(log_prob - old_log_prob), and sg() stops the gradient. Log-probs are zeroed under the mask first, so that
# not even a NaN there reaches the gradient.


@register_policy_loss("vanilla", silent_at_zero=True)
@aggregate_tokens()
def compute_policy_loss_vanilla(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """PPO's clipped loss with dual clip: `dual_clip_loss` of the config's bounds."""
    clip_low, clip_high = clip_bounds(config)
    log_ratio = bounded_log_ratio(log_prob, old_log_prob, response_mask)
    losses, clipped, dual_clipped = dual_clip_loss(
        log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=config.clip_ratio_c
    )
    return losses, {"actor/pg_clipfrac": clipped, "actor/ppo_kl": -log_ratio, "actor/pg_clipfrac_lower": dual_clipped}


def kept_by_tv(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Marks tokens whose probability has moved in A's direction by no more than the bound; bool.

    The move is the total variation between the policies if all other tokens count as one outcome.
    """
    moved = log_prob.exp() - old_log_prob.exp()
    return torch.where(advantages > 0, moved <= clip_high, moved >= -clip_low)


def kept_by_kl(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Marks tokens with KL(old || new) within the bound, or whose probability has moved against A's direction; bool.

    All other tokens count as one outcome: the KL is p_old · ln(p_old / p) + (1 - p_old) · ln((1 - p_old) / (1 - p)).
    """
    prob, old_prob = log_prob.exp(), old_log_prob.exp()
    others_ratio = (1 - old_prob + EPSILON) / (1 - prob + EPSILON)
    divergence = old_prob * (old_log_prob - log_prob) + (1 - old_prob) * others_ratio.log()
    raised = (divergence <= clip_high) | (prob <= old_prob)
    lowered = (divergence <= clip_low) | (prob >= old_prob)
    return torch.where(advantages > 0, raised, lowered)


def dppo_loss(log_ratio: Tensor, log_prob: Tensor, advantages: Tensor, kept: Tensor, max_ratio: float) -> TokenLosses:
    """-A · sg(min(ratio, max_ratio)) · log_prob where `kept` and 0 elsewhere; returns (losses, metrics), all [B, R]."""
    ratio = log_ratio.exp()
    losses = zero_masked(-advantages * ratio.clamp(max=max_ratio).detach() * log_prob, kept)
    return losses, {
        "actor/pg_clipfrac": ~kept,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": (ratio > max_ratio) & kept,
    }


@register_policy_loss("dppo_tv", silent_at_zero=True)
@aggregate_tokens()
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """DPPO (arXiv:2602.04879) with total variation: `dppo_loss` of the tokens that `kept_by_tv` keeps.

    The config's clip bounds are differences of probability, and `clip_ratio_c` the largest ratio.
    """
    log_ratio = bounded_log_ratio(log_prob, old_log_prob, response_mask)
    log_prob = zero_masked(log_prob, response_mask)
    kept = kept_by_tv(log_prob, old_log_prob, advantages, *clip_bounds(config))
    return dppo_loss(log_ratio, log_prob, advantages, kept, config.clip_ratio_c)


@register_policy_loss("dppo_kl", silent_at_zero=True)
@aggregate_tokens()
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """DPPO (arXiv:2602.04879) with KL: `dppo_loss` of the tokens that `kept_by_kl` keeps.

    The config's clip bounds are divergences in nats, and `clip_ratio_c` the largest ratio.
    """
    log_ratio = bounded_log_ratio(log_prob, old_log_prob, response_mask)
    log_prob = zero_masked(log_prob, response_mask)
    kept = kept_by_kl(log_prob, old_log_prob, advantages, *clip_bounds(config))
    return dppo_loss(log_ratio, log_prob, advantages, kept, config.clip_ratio_c)


def sequence_ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """exp of each row's mean log-ratio, at most e^10, at every token of the row: [B, R].

    Its gradient with respect to the token's own log-ratio is the ratio, to all others 0.
    """
    mean = masked_mean(log_ratio, response_mask, axis=-1).detach().unsqueeze(-1)
    return (mean + (log_ratio - log_ratio.detach())).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()


@register_policy_loss("gspo", silent_at_zero=True)
@aggregate_tokens(default="seq-mean-token-mean")
def compute_policy_loss_gspo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """GSPO (arXiv:2507.18071), its token form: `clip_loss` of `sequence_ratio`, without the dual clip.

    The paper's bounds are around 3e-4, and its mean is seq-mean-token-mean.
    """
    log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
    losses, clipped = clip_loss(sequence_ratio(log_ratio, response_mask), advantages, *clip_bounds(config))
    none = torch.zeros_like(log_ratio)
    return losses, {"actor/pg_clipfrac": clipped, "actor/ppo_kl": -log_ratio, "actor/pg_clipfrac_lower": none}


def soft_gate_loss(log_ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """-A · 4/τ · sigmoid(τ · (ratio - 1)), with τ = tau_pos where A > 0 and tau_neg elsewhere; [B, R].

    On policy its gradient is -A; off policy it fades smoothly, the sooner the larger τ is.
    """
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    return -advantages * 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))


@register_policy_loss("sapo", silent_at_zero=True)
@aggregate_tokens("seq-mean-token-mean")
def compute_policy_loss_sapo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """SAPO (arXiv:2511.20347): `soft_gate_loss`, always aggregated by seq-mean-token-mean, whatever the mode."""
    log_ratio = bounded_log_ratio(log_prob, old_log_prob, response_mask)
    losses = soft_gate_loss(log_ratio, advantages, config.tau_pos, config.tau_neg)
    none = torch.zeros_like(log_ratio)
    return losses, {"actor/pg_clipfrac": none, "actor/ppo_kl": -log_ratio, "actor/pg_clipfrac_lower": none}


@register_policy_loss("gpg", silent_at_zero=True)
@aggregate_tokens()
def compute_policy_loss_gpg(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """GPG (arXiv:2504.02546): -A · log_prob, the plain policy gradient; `old_log_prob` is not read, no metrics."""
    return -advantages * zero_masked(log_prob, response_mask), {}


def token_covariances(log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(A - mean A) · (log_prob - mean log_prob) over all valid tokens, without gradient; -inf under the mask. [B, R]

    What a token adds to the covariance that drives the entropy down (arXiv:2505.22617).
    """
    centred = [values.detach() - masked_mean(values.detach(), response_mask) for values in (advantages, log_prob)]
    return torch.where(response_mask.bool(), centred[0] * centred[1], -torch.inf)


def share_of_tokens(share: float, response_mask: Tensor) -> int:
    """`share` of the valid tokens, rounded down, but at least one where there is any place at all."""
    return min(max(1, int(share * int(response_mask.sum()))), response_mask.numel())


def random_choice(eligible: Tensor, count: int) -> Tensor:
    """Bool like `eligible`: `count` of its set places, or all if fewer, drawn by torch's global CPU generator."""
    places = eligible.flatten().nonzero().squeeze(-1)
    drawn = places[torch.randperm(len(places))[:count].to(places.device)]
    return torch.zeros_like(eligible).flatten().index_fill(0, drawn, True).view_as(eligible)


@register_policy_loss("clip_cov", over_mini_batch=True)
@aggregate_tokens()
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """Clip-Cov (arXiv:2505.22617): `clip_loss`, and no loss at a few random tokens of high covariance.

    Drawn are `clip_cov_ratio` of the valid tokens, from those that the clip leaves alone and whose `token_covariances`
    lie between `clip_cov_lb` and `clip_cov_ub`; `pg_clipfrac` counts them alone. Means, share and draw are over the
    tokens of this call, which the actor makes once a mini-batch.
    """
    settings = config.policy_loss
    log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
    losses, clipped = clip_loss(log_ratio.exp(), advantages, *clip_bounds(config))
    covariances = token_covariances(log_prob, advantages, response_mask)
    eligible = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub) & ~clipped
    dropped = random_choice(eligible, share_of_tokens(settings.clip_cov_ratio, response_mask))
    return zero_masked(losses, ~dropped), {"actor/pg_clipfrac": dropped, "actor/ppo_kl": -log_ratio}


@register_policy_loss("kl_cov", over_mini_batch=True)
@aggregate_tokens()
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """KL-Cov (arXiv:2505.22617): -A · ratio, plus `ppo_kl_coef` · |log ratio| at the tokens of highest covariance.

    Those are `kl_cov_ratio` of the valid tokens, by `token_covariances`. Nothing is clipped. Means and choice are over
    the tokens of this call, which the actor makes once a mini-batch. `ppo_kl` is the mean of |log ratio|.
    """
    settings = config.policy_loss
    log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
    covariances = token_covariances(log_prob, advantages, response_mask).flatten()
    highest = covariances.topk(share_of_tokens(settings.kl_cov_ratio, response_mask)).indices
    penalised = torch.zeros_like(response_mask, dtype=torch.bool).flatten().index_fill(0, highest, True)
    penalty = settings.ppo_kl_coef * zero_masked(log_ratio.abs(), penalised.view_as(response_mask))
    return -advantages * log_ratio.exp() + penalty, {"actor/ppo_kl": log_ratio.abs()}


def geometric_mean_loss(
    log_ratio: Tensor, advantages: Tensor, response_mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-(mean A) · exp(mean u) of each row, where u is the log-ratio clipped to [-clip_low, clip_high] if that is worse.

    Worse is smaller where A > 0 and larger where A < 0; u is 0 where A is. Returns (losses [B], clipped [B, R]); the
    second is bool and marks log-ratios outside the bounds.
    """
    sign = advantages.sign()
    bounded = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = masked_mean(pessimistic, response_mask, axis=-1).exp()
    return -masked_mean(advantages, response_mask, axis=-1) * ratio, log_ratio != bounded


@register_policy_loss("geo_mean", silent_at_zero=True)
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
    """GMPO (arXiv:2507.20673): `geometric_mean_loss`, averaged over the rows that have tokens, whatever the mode.

    Importance weights enter as their geometric mean over the row. Differs from verl, which divides by all rows of the
    call, those without tokens too: here `global_batch_size` counts, and the cut into micro-batches does not.
    """
    log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
    losses, clipped = geometric_mean_loss(log_ratio, advantages, response_mask, *clip_bounds(config))
    if rollout_is_weights is not None:
        losses = losses * masked_mean((rollout_is_weights + 1e-10).log(), response_mask, axis=-1).exp()
    has_tokens = response_mask.bool().any(-1, keepdim=True)
    loss = agg_loss(losses.unsqueeze(-1), has_tokens, "seq-mean-token-sum", **config.global_batch_info)
    metrics = {
        "actor/pg_clipfrac": clipped & (advantages > 0),
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": clipped & (advantages < 0),
    }
    return loss, masked_means(metrics, response_mask)


@register_policy_loss("cispo", silent_at_zero=True)
@aggregate_tokens()
def compute_policy_loss_cispo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """CISPO (arXiv:2506.13585): -A · sg(clamp(ratio)) · log_prob, so that clipped tokens still learn."""
    clip_low, clip_high = clip_bounds(config)
    log_ratio = bounded_log_ratio(log_prob, old_log_prob, response_mask)
    ratio = log_ratio.exp().detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -advantages * bounded * zero_masked(log_prob, response_mask)
    none = torch.zeros_like(log_ratio)
    return losses, {"actor/pg_clipfrac": ratio != bounded, "actor/ppo_kl": -log_ratio, "actor/pg_clipfrac_lower": none}


@register_policy_loss("dro")
@aggregate_tokens()
def compute_policy_loss_dro(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """DRO (arXiv:2405.19107), policy part: -A · log_prob + dro_beta / 2 · (log ratio)².

    Raises ValueError unless `policy_loss.dro_beta` is a positive number.
    """
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(
            f"policy_loss.dro_beta is {beta}, but policy_loss.loss_mode=dro needs a number above 0: the weight of the "
            "squared log-ratio, e.g. 0.05"
        )
    log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
    losses = 0.5 * beta * log_ratio**2 - advantages * zero_masked(log_prob, response_mask)
    return losses, {"actor/ppo_kl": -log_ratio}


@aggregate_tokens(default="seq-mean-token-sum")
def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: LossConfig
) -> TokenLosses:
    """REINFORCE, off policy if the importance weights say so: -A · log_prob · weight; `rollout_log_prob` only feeds
    the metric."""
    return -advantages * zero_masked(log_prob, response_mask), {"actor/ppo_kl": rollout_log_prob - log_prob}


# loss_type -> (the loss, whether the importance weights enter it: a clipped ratio corrects already)
BYPASS_LOSSES = {
    "ppo_clip": (compute_policy_loss_vanilla, False),
    "reinforce": (compute_policy_loss_reinforce, True),
}


@register_policy_loss("bypass_mode", silent_at_zero=True)
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

    `config.policy_loss.rollout_correction` says which tokens are rejected for their ratio, and `loss_type`: "ppo_clip"
    is `compute_policy_loss_vanilla`, "reinforce" `compute_policy_loss_reinforce` with importance weights; both as of
    this very update. `rollout_is_weights` is not read. The metrics of drift are those of this call, so that pooled over
    micro-batches they are means of means; losses and gradients add up exactly.
    Raises ValueError on another `loss_type`.
    """
    settings: RolloutCorrectionConfig = config.policy_loss.rollout_correction
    if settings.loss_type not in BYPASS_LOSSES:
        raise ValueError(f"loss_type is {settings.loss_type!r}, but must be one of {', '.join(BYPASS_LOSSES)}")
    weights, kept, metrics = None, response_mask, {}
    if response_mask.any():  # a micro-batch may hold failed rows alone
        weights, kept, metrics = correct_log_probs(log_prob.detach(), old_log_prob, response_mask, settings)
    loss_fn, is_weighted = BYPASS_LOSSES[settings.loss_type]
    loss, loss_metrics = loss_fn(
        old_log_prob,
        log_prob,
        advantages,
        kept,
        loss_agg_mode,
        config,
        rollout_is_weights=weights if is_weighted else None,
    )
    return loss, loss_metrics | metrics


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
            inverse = bound_log_ratio(-log_ratio)
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
