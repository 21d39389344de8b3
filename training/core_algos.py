"""The algorithms of RL post-training, as a catalogue of pure functions over padded tensors.

Advantage estimators, aggregation of per-token losses, policy losses, value and entropy losses, KL penalties and their
controllers. A new entry is one short function under `@register_adv_est("name")` or `@register_policy_loss("name")`.

Shapes: B sequences, R the padded response width. `response_mask` [B, R] is 1 on tokens the policy produced and 0 on
padding, observations and tool text; a row whose mask is all zero is a failed episode. What lies under the zeros does
not matter, except that outcome estimators score a row by the sum of all its rewards, wherever they lie.
A policy loss returns metrics as means of a per-token quantity over `response_mask`, so weighting micro-batches by their
number of valid tokens pools them into the exact mean of the whole.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import AGGREGATION_MODES, AlgorithmConfig, PolicyLossConfig
from extras.rollout_correction.correction import correct_log_probs
from extras.rollout_correction.settings import RolloutCorrectionConfig
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

Pair = tuple[Tensor, Tensor]
AdvEstimatorFn = Callable[..., Pair]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, float | Tensor]]]
TokenLosses = tuple[Tensor, dict[str, Tensor]]  # losses and, by name, metrics; [B, R] each
Labels = Sequence[Hashable] | np.ndarray | Tensor  # [B], the prompt of each row
LossConfig = Any  # the settings of actor_rollout_ref.actor, and `global_batch_info`, keyword arguments of `agg_loss`

ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}
POLICY_LOSS_REGISTRY: dict[str, "PolicyLoss"] = {}

# Estimators that compare a sample with the others of its prompt alone: a group of one has no baseline at all. Those
# that whiten over the batch as well (reinforce_plus_plus_baseline, gdpo) still have the batch to compare it with.
NEEDS_GROUPS = {"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg",
                "optimal_token_baseline", "tir_optimal_token_baseline"}  # fmt: skip


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, and what those who call it have to know.

    Attributes:
        over_mini_batch: what a token contributes depends on the others of its mini-batch, so the actor calls the loss
            once for all of them, not for each micro-batch; that costs a forward pass more.
        silent_at_zero: a row whose advantages are all 0 adds nothing to loss or gradient, so it may be left out.
    """

    function: PolicyLossFn
    over_mini_batch: bool = False
    silent_at_zero: bool = False


def key_of(name_or_enum: str | Enum, decorator: str = "") -> str:
    name = name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum
    if decorator and not isinstance(name, str):
        raise TypeError(f"@{decorator} needs the name by which the config finds the function: @{decorator}('mine')")
    return name


def register_adv_est(name_or_enum: str | Enum) -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Adds an advantage estimator; raises ValueError if another function has the name, TypeError without a name."""
    name = key_of(name_or_enum, "register_adv_est")

    def register(fn: AdvEstimatorFn) -> AdvEstimatorFn:
        if (known := ADV_ESTIMATOR_REGISTRY.setdefault(name, fn)) is not fn:
            raise ValueError(
                f"Advantage estimator {name!r} has already been registered, by module {known.__module__}: "
                f"choose another name, or delete ADV_ESTIMATOR_REGISTRY[{name!r}] first"
            )
        return fn

    return register


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvEstimatorFn:
    """The estimator registered under this exact name; raises ValueError if there is none."""
    if (name := key_of(name_or_enum)) not in ADV_ESTIMATOR_REGISTRY:
        known = [*ADV_ESTIMATOR_REGISTRY]
        raise ValueError(f"Unknown advantage estimator simply: {name}. Registered estimators are: {known}")
    return ADV_ESTIMATOR_REGISTRY[name]


def register_policy_loss(name: str, **marks: bool) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Adds a policy loss, replacing any of the same name; `PolicyLoss` has the marks. TypeError without a name."""
    key_of(name, "register_policy_loss")

    def register(fn: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSS_REGISTRY[name] = PolicyLoss(fn, **marks)
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
    return get_policy_loss(name).function


class Groups:
    """Statistics over the samples of each prompt; every method maps one number per row [B] to one per row [B].

    `reduce` and `mean` also take [B, K], and treat each column alone.
    Failed rows leave the statistics (in verl they count like any sample): a group of 4 of which 1 failed gives
    exactly what a group of 3 gives. A baseline needs two: the mean of a row whose whole group else failed is its own
    value, so that it teaches nothing. A group that was never more than one sample has nothing to compare with: its mean
    counts as 0 and its std as 1, so that its raw score stands. `index` [B] names each row's group by any hashable.
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
# Those of outcomes give each row one number.


def outcome(*names: str, whitened: bool = False) -> Callable[[Callable[..., Tensor]], AdvEstimatorFn]:
    """Registers an estimator made of f(scores [B], groups, response_mask, its settings …) -> [B]; each token of a row
    gets the row's number, `whitened` over the batch's tokens or as it is."""

    def decorate(of_rows: Callable[..., Tensor]) -> AdvEstimatorFn:
        @torch.no_grad()
        def estimate(
            token_level_rewards: Tensor, response_mask: Tensor, index: Labels, *args: Any, **kwargs: Any
        ) -> Pair:
            per_row = of_rows(token_level_rewards.sum(-1), Groups(index, response_mask), response_mask, *args, **kwargs)
            advantages = spread_over_tokens(per_row, response_mask)
            if whitened:
                advantages = zero_masked(whiten_advantages(advantages, response_mask), response_mask)
            return advantages, advantages

        base = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in BASE]
        update_wrapper(estimate, of_rows).__signature__ = Signature(
            [*base, *[*signature(of_rows).parameters.values()][3:]]
        )
        for name in names:
            register_adv_est(name)(estimate)
        return estimate

    return decorate


BASE = ("token_level_rewards", "response_mask", "index")


@register_adv_est("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Pair:
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


@register_adv_est("turn_gae")
@torch.no_grad()
def compute_turn_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    turn_ids: Tensor | None = None,
) -> Pair:
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


@outcome("grpo", "grpo_vectorized")
def compute_grpo_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    mask: Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Tensor:
    """GRPO (arXiv:2402.03300): a sample's score minus its group's mean, over the group's std + epsilon; without
    `norm_adv_by_std_in_grpo` the difference alone (Dr. GRPO, arXiv:2503.20783)."""
    return groups.standardize(scores, epsilon, norm_adv_by_std_in_grpo)


@outcome("grpo_passk")
def compute_grpo_passk_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    mask: Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **kwargs: Any,
) -> Tensor:
    """Pass@k (arXiv:2503.19595): the group's best sample gets its lead over the second best, all others 0; over the
    group's std + epsilon as in grpo. Two best ones lead by nothing, and so does a sample alone in its group."""
    is_best = scores == groups.reduce(scores, "amax")
    second = groups.reduce(torch.where(is_best, -torch.inf, scores), "amax")
    leads = is_best & (groups.reduce(is_best.float(), "sum") == 1) & (groups.count > 1)
    advantages = torch.where(leads, scores - second, 0)
    return advantages / (groups.std(scores) + epsilon) if norm_adv_by_std_in_grpo else advantages


@outcome("rloo")
def compute_rloo_outcome_advantage(scores: Tensor, groups: Groups, mask: Tensor, **kwargs: Any) -> Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740): a sample's score minus the mean of the others in its group."""
    # The mean includes the sample itself; n / (n - 1) turns the distance to it into that to the mean of the others.
    return (scores - groups.mean(scores)) * groups.count / (groups.count - 1).clamp(min=1)


@outcome("rloo_vectorized")
def compute_rloo_vectorized_outcome_advantage(scores: Tensor, groups: Groups, mask: Tensor, **kwargs: Any) -> Tensor:
    """RLOO, except that a sample alone in its group gets 0, not its score."""
    advantages = (scores - groups.mean(scores)) * groups.count / (groups.count - 1).clamp(min=1)
    return torch.where(groups.count > 1, advantages, 0)


@outcome("opo")
def compute_opo_outcome_advantage(scores: Tensor, groups: Groups, mask: Tensor, **kwargs: Any) -> Tensor:
    """OPO (arXiv:2505.23585): a sample's score minus its group's mean, in which each sample weighs its tokens: the
    baseline of least variance weighs by the squared gradient norm, which grows as their number."""
    return scores - groups.mean(scores, weights=mask.sum(-1))


@outcome("gpg")
def compute_gpg_outcome_advantage(
    scores: Tensor, groups: Groups, mask: Tensor, f_norm: float = 1.0, alpha: float = 1.0, **kwargs: Any
) -> Tensor:
    """GPG (arXiv:2504.02546): alpha · (samples / samples of non-zero score) · (score - the group's mean) / f_norm.

    The factor makes up for samples that teach nothing; failed rows are no samples.
    """
    is_sample = mask.bool().any(-1)
    rescale = is_sample.sum() / (is_sample & (scores != 0)).sum().clamp(min=1)
    return alpha * rescale * (scores - groups.mean(scores)) / f_norm


@outcome("reinforce_plus_plus_baseline", whitened=True)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    scores: Tensor, groups: Groups, mask: Tensor, **kwargs: Any
) -> Tensor:
    """REINFORCE++-baseline (arXiv:2501.03262): a sample's score minus its group's mean, whitened over the batch."""
    return scores - groups.mean(scores)


@register_adv_est("gdpo")
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
) -> Pair:
    """GDPO (arXiv:2601.05242): GRPO on each of several rewards alone, their weighted sum whitened over the batch.

    The rewards are the columns of `non_tensor_batch` [B] that `config.gdpo_reward_keys` names, their weights
    `config.gdpo_reward_weights` (all 1 if None); a row where one is None takes no part in that one. Without config or
    columns it is token_level_rewards alone. Raises AssertionError as `reward_dimensions` does.
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

    Raises AssertionError for no keys, a missing column or weight, or a row that did not fail without a finite score.
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


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any, **kwargs: Any
) -> Pair:
    """REINFORCE++ (arXiv:2501.03262): returns discounted by `config.gamma`, whitened over the batch's valid tokens."""
    returns = zero_masked(sum_to_go(token_level_rewards, response_mask, config.gamma), response_mask)
    return zero_masked(whiten_advantages(returns, response_mask), response_mask), returns


@register_adv_est("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, **kwargs: Any
) -> Pair:
    """ReMax (arXiv:2310.10505): the rewards to go minus `reward_baselines` [B], the score of the greedy response.

    At masked positions both results are the sum to go, as in verl: mask before use.
    """
    returns = sum_to_go(token_level_rewards, response_mask, discount=1.0)
    return returns - spread_over_tokens(reward_baselines, response_mask), returns


@register_adv_est("tir_optimal_token_baseline")
@register_adv_est("optimal_token_baseline")
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
) -> Pair:
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


# The built-in names; user-registered estimators are plain strings beside them.
AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in ADV_ESTIMATOR_REGISTRY})


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
        raise ValueError(f"dp_size is {dp_size} but {name} is None: pass {name} summed over all ranks")
    count = local_count if count is None else torch.as_tensor(count)
    return torch.where(count > 0, count, 1)  # nothing to average: the numerator is 0 already


def clip_bounds(config: LossConfig) -> tuple[float, float]:
    """(low, high), each `clip_ratio` where unset: unlike under verl's defaults, setting `clip_ratio` alone works."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


def masked_means(per_token: dict[str, Tensor], response_mask: Tensor) -> dict[str, Tensor]:
    """Means over the mask of a policy loss's [B, R] metrics: tensors of shape (), as to read them is to wait."""
    return {name: masked_mean(values.detach().float(), response_mask) for name, values in per_token.items()}


class Tokens(NamedTuple):
    """The tensors of a loss, [B, R] each; `log_prob` and `log_ratio` are 0 under the mask, so that not even a NaN there
    reaches the gradient."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    log_ratio: Tensor


def token_loss(
    name: str | None = None, mode: str | None = None, default: str = "token-mean", **marks: bool
) -> Callable[[Callable[[Tokens, LossConfig], TokenLosses]], PolicyLossFn]:
    """Makes a policy loss, registered under `name`, of a function of `Tokens` and the config.

    The losses are multiplied by the importance weights and aggregated by `agg_loss`, in the `mode` given here or, if
    none is, in the config's; without one, as in a call by hand, in `default`.
    """

    def decorate(token_losses: Callable[[Tokens, LossConfig], TokenLosses]) -> PolicyLossFn:
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
            log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
            log_prob = zero_masked(log_prob, response_mask)
            tokens = Tokens(old_log_prob, log_prob, advantages, response_mask, log_ratio)
            losses, metrics = token_losses(tokens, config)
            if rollout_is_weights is not None:
                losses = losses * rollout_is_weights
            loss = agg_loss(losses, response_mask, mode or loss_agg_mode, **config.global_batch_info)
            return loss, masked_means(metrics, response_mask)

        update_wrapper(policy_loss, token_losses)
        del policy_loss.__wrapped__  # so that inspect.signature sees the arguments of policy_loss
        return register_policy_loss(name, **marks)(policy_loss) if name else policy_loss

    return decorate


def clip_metrics(log_ratio: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None) -> dict[str, Tensor]:
    none = torch.zeros_like(log_ratio)
    return {
        "actor/pg_clipfrac": none if clipped is None else clipped,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": none if lower is None else lower,
    }


def clip_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Pair:
    """PPO's clipped objective (arXiv:1707.06347), elementwise: max(-A · ratio, -A · clamp(ratio, 1 - low, 1 + high)),
    and where the clip lowered the objective (bool)."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


# In their formulas A is the advantage, ratio is exp(log_prob - old_log_prob), and sg() stops the gradient.


@token_loss("vanilla", silent_at_zero=True)
def compute_policy_loss_vanilla(t: Tokens, config: LossConfig) -> TokenLosses:
    """PPO's clipped loss, with the dual clip (arXiv:1912.09729): where A < 0, at most -A · clip_ratio_c.

    Raises AssertionError unless clip_ratio_c > 1."""
    assert config.clip_ratio_c > 1, f"clip_ratio_c is {config.clip_ratio_c}, but must be above 1 (verl's default is 3)"
    log_ratio = bound_log_ratio(t.log_ratio)
    pessimistic, clipped = clip_loss(log_ratio.exp(), t.advantages, *clip_bounds(config))
    cap, negative = -t.advantages * config.clip_ratio_c, t.advantages < 0
    # minimum, not where alone: it splits the gradient at exact ties, as verl's does.
    losses = torch.where(negative, torch.minimum(pessimistic, cap), pessimistic)
    return losses, clip_metrics(log_ratio, clipped, (pessimistic > cap) & negative)


def dppo_loss(t: Tokens, kept: Tensor, max_ratio: float) -> TokenLosses:
    """-A · sg(min(ratio, max_ratio)) · log_prob where `kept` and 0 elsewhere."""
    log_ratio = bound_log_ratio(t.log_ratio)
    ratio = log_ratio.exp()
    losses = zero_masked(-t.advantages * ratio.clamp(max=max_ratio).detach() * t.log_prob, kept)
    return losses, clip_metrics(log_ratio, ~kept, (ratio > max_ratio) & kept)


@token_loss("dppo_tv", silent_at_zero=True)
def compute_policy_loss_dppo_tv(t: Tokens, config: LossConfig) -> TokenLosses:
    """DPPO (arXiv:2602.04879) with total variation: `dppo_loss` of tokens whose probability has moved in A's direction
    by no more than the config's clip bounds (all other tokens are one outcome); `clip_ratio_c`: the largest ratio."""
    clip_low, clip_high = clip_bounds(config)
    moved = t.log_prob.exp() - t.old_log_prob.exp()
    kept = torch.where(t.advantages > 0, moved <= clip_high, moved >= -clip_low)
    return dppo_loss(t, kept, config.clip_ratio_c)


@token_loss("dppo_kl", silent_at_zero=True)
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


@token_loss("gspo", default="seq-mean-token-mean", silent_at_zero=True)
def compute_policy_loss_gspo(t: Tokens, config: LossConfig) -> TokenLosses:
    """GSPO (arXiv:2507.18071), its token form: `clip_loss` of each row's exp(mean log-ratio), at most e^10, without the
    dual clip. Its gradient with respect to the token's own log-ratio is that ratio, to all others 0.

    The paper's bounds are around 3e-4, and its mean is seq-mean-token-mean.
    """
    mean = masked_mean(t.log_ratio, t.mask, axis=-1).detach().unsqueeze(-1)
    ratio = (mean + (t.log_ratio - t.log_ratio.detach())).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    losses, clipped = clip_loss(ratio, t.advantages, *clip_bounds(config))
    return losses, clip_metrics(t.log_ratio, clipped)


@token_loss("sapo", "seq-mean-token-mean", silent_at_zero=True)
def compute_policy_loss_sapo(t: Tokens, config: LossConfig) -> TokenLosses:
    """SAPO (arXiv:2511.20347): -A · 4/τ · sigmoid(τ · (ratio - 1)), with τ = tau_pos where A > 0 and tau_neg elsewhere,
    always aggregated by seq-mean-token-mean.

    On policy its gradient is -A; off policy it fades smoothly, the sooner the larger τ is.
    """
    log_ratio = bound_log_ratio(t.log_ratio)
    tau = torch.full_like(log_ratio, config.tau_neg).masked_fill(t.advantages > 0, config.tau_pos)
    return -t.advantages * 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)), clip_metrics(log_ratio)


@token_loss("gpg", silent_at_zero=True)
def compute_policy_loss_gpg(t: Tokens, config: LossConfig) -> TokenLosses:
    """GPG (arXiv:2504.02546): -A · log_prob, the plain policy gradient; `old_log_prob` is not read, no metrics."""
    return -t.advantages * t.log_prob, {}


def token_covariances(t: Tokens) -> Tensor:
    """(A - mean A) · (log_prob - mean log_prob) over all valid tokens, without gradient; -inf under the mask. [B, R]

    What a token adds to the covariance that drives the entropy down (arXiv:2505.22617).
    """
    centred = [values.detach() - masked_mean(values.detach(), t.mask) for values in (t.advantages, t.log_prob)]
    return torch.where(t.mask.bool(), centred[0] * centred[1], -torch.inf)


def share_of_tokens(share: float, mask: Tensor) -> int:
    """`share` of the valid tokens, rounded down, but at least one where there is any place at all."""
    return min(max(1, int(share * int(mask.sum()))), mask.numel())


@token_loss("clip_cov", over_mini_batch=True)
def compute_policy_loss_clip_cov(t: Tokens, config: LossConfig) -> TokenLosses:
    """Clip-Cov (arXiv:2505.22617): `clip_loss`, and no loss at a few random tokens of high covariance.

    Drawn, by torch's global CPU generator, are `clip_cov_ratio` of the valid tokens, from those that the clip leaves
    alone and whose `token_covariances` lie between `clip_cov_lb` and `clip_cov_ub`; `pg_clipfrac` counts them alone.
    Means, share and draw are over the tokens of this call, which the actor makes once a mini-batch.
    """
    settings = config.policy_loss
    losses, clipped = clip_loss(t.log_ratio.exp(), t.advantages, *clip_bounds(config))
    covariances = token_covariances(t)
    eligible = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub) & ~clipped
    places = eligible.flatten().nonzero().squeeze(-1)
    drawn = places[torch.randperm(len(places))[: share_of_tokens(settings.clip_cov_ratio, t.mask)].to(places.device)]
    dropped = torch.zeros_like(eligible).flatten().index_fill(0, drawn, True).view_as(eligible)
    return zero_masked(losses, ~dropped), {"actor/pg_clipfrac": dropped, "actor/ppo_kl": -t.log_ratio}


@token_loss("kl_cov", over_mini_batch=True)
def compute_policy_loss_kl_cov(t: Tokens, config: LossConfig) -> TokenLosses:
    """KL-Cov (arXiv:2505.22617): -A · ratio, plus `ppo_kl_coef` · |log ratio| at the tokens of highest covariance.

    Those are `kl_cov_ratio` of the valid tokens, by `token_covariances`. Nothing is clipped. Means and choice are over
    the tokens of this call, which the actor makes once a mini-batch. `ppo_kl` is the mean of |log ratio|.
    """
    highest = token_covariances(t).flatten().topk(share_of_tokens(config.policy_loss.kl_cov_ratio, t.mask)).indices
    penalised = torch.zeros_like(t.mask, dtype=torch.bool).flatten().index_fill(0, highest, True).view_as(t.mask)
    penalty = config.policy_loss.ppo_kl_coef * zero_masked(t.log_ratio.abs(), penalised)
    return -t.advantages * t.log_ratio.exp() + penalty, {"actor/ppo_kl": t.log_ratio.abs()}


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
    """GMPO (arXiv:2507.20673): -(mean A) · exp(mean u) of each row, averaged over the rows that have tokens, whatever
    the mode; u is the log-ratio clipped to the config's bounds if that is worse, i.e. smaller where A > 0 and larger
    where A < 0, and 0 where A is.

    Importance weights enter as their geometric mean over the row. Differs from verl, which divides by all rows of the
    call, those without tokens too: here `global_batch_size` counts, and the cut into micro-batches does not.
    """
    clip_low, clip_high = clip_bounds(config)
    log_ratio, sign = zero_masked(log_prob - old_log_prob, response_mask), advantages.sign()
    bounded = log_ratio.clamp(-clip_low, clip_high)
    pessimistic, clipped = sign * torch.minimum(sign * log_ratio, sign * bounded), log_ratio != bounded
    ratio = masked_mean(pessimistic, response_mask, axis=-1).exp()
    losses = -masked_mean(advantages, response_mask, axis=-1) * ratio
    if rollout_is_weights is not None:
        losses = losses * masked_mean((rollout_is_weights + 1e-10).log(), response_mask, axis=-1).exp()
    has_tokens = response_mask.bool().any(-1, keepdim=True)
    loss = agg_loss(losses.unsqueeze(-1), has_tokens, "seq-mean-token-sum", **config.global_batch_info)
    metrics = clip_metrics(log_ratio, clipped & (advantages > 0), clipped & (advantages < 0))
    return loss, masked_means(metrics, response_mask)


@token_loss("cispo", silent_at_zero=True)
def compute_policy_loss_cispo(t: Tokens, config: LossConfig) -> TokenLosses:
    """CISPO (arXiv:2506.13585): -A · sg(clamp(ratio)) · log_prob, so that clipped tokens still learn."""
    clip_low, clip_high = clip_bounds(config)
    log_ratio = bound_log_ratio(t.log_ratio)
    ratio = log_ratio.exp().detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -t.advantages * bounded * t.log_prob, clip_metrics(log_ratio, ratio != bounded)


@token_loss("dro")
def compute_policy_loss_dro(t: Tokens, config: LossConfig) -> TokenLosses:
    """DRO (arXiv:2405.19107), policy part: -A · log_prob + dro_beta / 2 · (log ratio)².

    Raises ValueError unless `policy_loss.dro_beta` is a positive number.
    """
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"policy_loss.dro_beta is {beta}, but policy_loss.loss_mode=dro needs a number above 0")
    return 0.5 * beta * t.log_ratio**2 - t.advantages * t.log_prob, {"actor/ppo_kl": -t.log_ratio}


@token_loss(default="seq-mean-token-sum")
def compute_policy_loss_reinforce(t: Tokens, config: LossConfig) -> TokenLosses:
    """REINFORCE, off policy if the importance weights say so: -A · log_prob · weight; `old_log_prob`, the rollout's,
    only feeds the metric."""
    return -t.advantages * t.log_prob, {"actor/ppo_kl": -t.log_ratio}


# loss_type -> (the loss, whether the importance weights enter it: a clipped ratio corrects already)
BYPASS_LOSSES = {"ppo_clip": (compute_policy_loss_vanilla, False), "reinforce": (compute_policy_loss_reinforce, True)}


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

    `config.policy_loss.rollout_correction` says which tokens are rejected for their ratio, and `loss_type`, one of
    `BYPASS_LOSSES`; importance weights are those of this very update, and `rollout_is_weights` is not read. The metrics
    of drift are those of this call, so that pooled over micro-batches they are means of means; losses and gradients
    add up exactly. Raises ValueError on another `loss_type`.
    """
    settings: RolloutCorrectionConfig = config.policy_loss.rollout_correction
    if settings.loss_type not in BYPASS_LOSSES:
        raise ValueError(f"loss_type is {settings.loss_type!r}, but must be one of {', '.join(BYPASS_LOSSES)}")
    weights, kept, metrics = None, response_mask, {}
    if response_mask.any():  # a micro-batch may hold failed rows alone
        weights, kept, metrics = correct_log_probs(log_prob.detach(), old_log_prob, response_mask, settings)
    loss_fn, is_weighted = BYPASS_LOSSES[settings.loss_type]
    weights = weights if is_weighted else None
    found = loss_fn(old_log_prob, log_prob, advantages, kept, loss_agg_mode, config, rollout_is_weights=weights)
    return found[0], found[1] | metrics


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **global_batch_info: Any,
) -> Pair:
    """Half the squared error to the returns, or that of predictions clipped to `values` ± `cliprange_value` if larger.

    All tensors [B, R]; `values` are the predictions before the update. `global_batch_info` goes to `agg_loss`.
    Returns (loss, clip_fraction), both scalar tensors, the second without gradient.
    """
    vpreds = zero_masked(vpreds, response_mask)
    clipped_vpreds = clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    errors, clipped_errors = (vpreds - returns) ** 2, (clipped_vpreds - returns) ** 2
    losses = torch.maximum(errors, clipped_errors)
    loss = 0.5 * agg_loss(losses, response_mask, loss_agg_mode, **global_batch_info)
    return loss, masked_mean((clipped_errors > errors).float(), response_mask)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html).

    With k = logprob - ref_logprob: "kl", "k1" is k; "abs" |k|; "mse", "k2" k² / 2; "low_var_kl", "k3"
    exp(-k) + k - 1 with -k clamped to ±20 and the result to ±10. Raises NotImplementedError for other names.
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
    raise NotImplementedError(
        f"kl_penalty is {kl_penalty!r}, but must be one of kl, k1, abs, mse, k2, low_var_kl, k3, each also with a "
        "trailing '+' for the gradient of k2; 'full' needs the logits of both models"
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
        self.value, self.target_kl, self.horizon = init_kl_coef, target_kl, horizon

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
