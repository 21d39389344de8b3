"""Advantage estimators, as a catalogue of pure functions over padded tensors, and the statistics of groups.

A new one is a short function under `@register_adv_est("name")`. As under verl's path, all of training/losses.py can be
imported from here as well.

Shapes: B sequences, R the padded response width. `response_mask` [B, R] is 1 on tokens the policy produced and 0 on
padding, observations and tool text; a row whose mask is all zero is a failed episode. What lies under the zeros does
not matter, except that outcome estimators score a row by the sum of all its rewards, wherever they lie.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum, StrEnum
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import AlgorithmConfig
from training.losses import *  # noqa: F403  (verl's import path)
from training.losses import Pair, key_of, masked_whiten, zero_masked

AdvEstimatorFn = Callable[..., Pair]
Labels = Sequence[Hashable] | np.ndarray | Tensor  # [B], the prompt of each row

ADV_ESTIMATOR_REGISTRY: dict[str, AdvEstimatorFn] = {}

# Estimators that compare a sample with the others of its prompt alone: a group of one has no baseline at all. Those
# that whiten over the batch as well (reinforce_plus_plus_baseline, gdpo) still have the batch to compare it with.
NEEDS_GROUPS = {"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg",
                "optimal_token_baseline", "tir_optimal_token_baseline"}  # fmt: skip


def register_adv_est(name_or_enum: str | Enum) -> Callable[[AdvEstimatorFn], AdvEstimatorFn]:
    """Adds an advantage estimator, or replaces one of the same module, which is then being run again.

    Raises:
        ValueError: another module's has the name.
        TypeError: there is no name.
    """
    name = key_of(name_or_enum, "register_adv_est")

    def register(fn: AdvEstimatorFn) -> AdvEstimatorFn:
        if (other := ADV_ESTIMATOR_REGISTRY.get(name, fn)).__module__ != fn.__module__:
            raise ValueError(f"Advantage estimator {name!r} has already been registered, by module {other.__module__}")
        ADV_ESTIMATOR_REGISTRY[name] = fn
        return fn

    return register


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvEstimatorFn:
    """Returns the estimator registered under this exact name; raises ValueError if there is none."""
    if (name := key_of(name_or_enum)) not in ADV_ESTIMATOR_REGISTRY:
        registered = [*ADV_ESTIMATOR_REGISTRY]
        raise ValueError(f"Unknown advantage estimator simply: {name}. Registered estimators are: {registered}")
    return ADV_ESTIMATOR_REGISTRY[name]


class Groups:
    """Statistics over the samples of each prompt; every method maps one number per row [B] to one per row [B].

    `reduce` and `mean` also take [B, K], each column alone. `index` [B] names each row's group by any hashable.
    Failed rows leave the statistics (in verl they count like any sample). The mean of a row whose whole group else
    failed is its own value, so that it teaches nothing; a group that was never more than one sample has mean 0 and std
    1, so that its raw score stands.

    Attributes:
        labels: the number of each row's group, [B]; count: how many of its rows did not fail, [B].
    """

    def __init__(self, index: Labels, response_mask: Tensor) -> None:
        labels = index.tolist() if isinstance(index, np.ndarray | Tensor) else index
        if len(labels) != len(response_mask):
            raise ValueError(f"index names the group of {len(labels)} rows, but response_mask has {len(response_mask)}")
        codes: dict[Hashable, int] = {}
        row_codes = [codes.setdefault(label, len(codes)) for label in labels]
        self.labels = torch.tensor(row_codes, dtype=torch.int64, device=response_mask.device)
        self._num_groups = len(codes)
        self._valid = response_mask.bool().any(-1)
        self.count = self.reduce(self._valid.float(), "sum")
        self._survives_alone = (self.count == 1) & (torch.bincount(self.labels)[self.labels] > 1)

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """Applies `how` of `scatter_reduce` ("sum", "amax", ...) to the group's valid rows; 0 where it has none."""
        valid_values = values[self._valid]
        group = self.labels[self._valid].view(-1, *[1] * (values.ndim - 1)).expand_as(valid_values)
        per_group = values.new_zeros(self._num_groups, *values.shape[1:])
        return per_group.scatter_reduce(0, group, valid_values, how, include_self=False)[self.labels]

    def mean(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns the mean of the group, weighted by `weights` >= 0; the mean of equal values is exactly that value.

        A value of weight 0 does not count, whatever it is; where fewer than two count, the mean is 0, or, for a row
        whose group has failed but for it, its own value.
        """
        weights = torch.ones_like(values) if weights is None else weights
        counts = weights > 0
        # Averaging distances to the largest makes it exact. The plain mean, verl's, of seven times 0.3 is
        # off by 3e-8, and GRPO divides the difference by 1e-6.
        largest = self.reduce(torch.where(counts, values, -torch.inf), "amax")
        distances = self.reduce(weights * zero_masked(values - largest, counts), "sum")
        mean = largest + distances / self.reduce(weights, "sum")
        lone_values = zero_masked(values, self._survives_alone.view(-1, *[1] * (values.ndim - 1)) & counts)
        return torch.where(self.reduce(counts.float(), "sum") > 1, mean, lone_values)

    def std(self, values: Tensor) -> Tensor:
        """Returns the standard deviation of the group with n - 1 in the denominator; exactly 0 for equal values."""
        squares = self.reduce((values - self.mean(values)) ** 2, "sum")
        return torch.where(self.count > 1, (squares / (self.count - 1).clamp(min=1)).sqrt(), 1)

    def standardize(self, values: Tensor, epsilon: float, divide_by_std: bool) -> Tensor:
        """Returns the distance to the group's mean, over its std + `epsilon` if `divide_by_std`."""
        distance = values - self.mean(values)
        return distance / (self.std(values) + epsilon) if divide_by_std else distance


def spread_over_tokens(per_row: Tensor, response_mask: Tensor) -> Tensor:
    """Gives each valid token of a row the row's number, and every other position 0: [B] -> [B, R]."""
    return zero_masked(per_row.unsqueeze(-1), response_mask)


def sum_to_go(values: Tensor, response_mask: Tensor, discount: float) -> Tensor:
    """Sums S_t = values_t + discount · S_(next valid t), [B, R]; a masked position repeats the sum to its right.

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
    """Returns `masked_whiten`, but 0 for fewer than two valid tokens, where verl raises.

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
    positions = torch.where(response_mask.bool(), torch.arange(width, device=turns.device), width)
    first = positions.new_full(shape, width).scatter_reduce(1, turns, positions, "amin")
    present = first < width  # [B, turns], as all below
    token_rewards = zero_masked(token_level_rewards, response_mask)
    rewards = token_rewards.new_zeros(shape).scatter_add(1, turns, token_rewards)
    turn_values = zero_masked(values.gather(1, first.clamp(max=width - 1)), present)
    advantages = discounted_td_errors(rewards, turn_values, present, gamma, lam)
    per_token = zero_masked(advantages.gather(1, turns), response_mask)
    whitened = zero_masked(whiten_advantages(per_token, response_mask), response_mask)
    return whitened, zero_masked((advantages + turn_values).gather(1, turns), response_mask)


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
    columns it is token_level_rewards alone.
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
    """Lists GDPO's rewards as (weight, scores [B] float64, response_mask without the rows in which they are None).

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
        present = torch.tensor([value is not None for value in column], device=response_mask.device)
        mask = response_mask * present[:, None]
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
    packed_returns, packed_weights = returns.gather(1, policy_tokens_first), weights.gather(1, policy_tokens_first)
    baseline = groups.mean(packed_returns, packed_weights)
    if not handle_zero_tail:
        reached = groups.reduce((packed_weights > 0).float(), "sum")
        baseline = torch.where((reached == 1) & (groups.count > 1).unsqueeze(-1), packed_returns, baseline)
    baseline = torch.empty_like(baseline).scatter(1, policy_tokens_first, baseline)
    return zero_masked(returns - baseline, response_mask), returns


# The built-in names; user-registered estimators are plain strings beside them.
AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in ADV_ESTIMATOR_REGISTRY})
