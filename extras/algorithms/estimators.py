"""Estimates advantages in other ways than GAE and GRPO, which are in training/core_algos.py with shapes and masks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from training.core_algos import (
    TAKES_NO_PENALTY,
    AdvEstimatorFn,
    Groups,
    Labels,
    Pair,
    compute_grpo_outcome_advantage,
    discounted_td_errors,
    outcome,
    register_adv_est,
    spread_over_tokens,
    sum_to_go,
    whiten_advantages,
    zero_masked,
)

ESTIMATORS: dict[str, AdvEstimatorFn] = {}  # configs/extras.py names them
listed = partial(register_adv_est, registry=ESTIMATORS)
TAKES_NO_PENALTY |= {
    "gdpo": "reads the rewards of algorithm.gdpo_reward_keys alone",
    "max_rl": "takes scores of 0 and above alone",
}


@listed("turn_gae")
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


@listed("grpo_passk")
@outcome
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


@listed("rloo")
@outcome
def compute_rloo_outcome_advantage(scores: Tensor, groups: Groups, mask: Tensor, **kwargs: Any) -> Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740): a sample's score minus the mean of the others in its group."""
    # The mean includes the sample itself; n / (n - 1) turns the distance to it into that to the mean of the others.
    return (scores - groups.mean(scores)) * groups.count / (groups.count - 1).clamp(min=1)


@listed("rloo_vectorized")
@outcome
def compute_rloo_vectorized_outcome_advantage(scores: Tensor, groups: Groups, mask: Tensor, **kwargs: Any) -> Tensor:
    """RLOO, except that a sample alone in its group gets 0, not its score."""
    advantages = (scores - groups.mean(scores)) * groups.count / (groups.count - 1).clamp(min=1)
    return torch.where(groups.count > 1, advantages, 0)


@listed("opo")
@outcome
def compute_opo_outcome_advantage(scores: Tensor, groups: Groups, mask: Tensor, **kwargs: Any) -> Tensor:
    """OPO (arXiv:2505.23585): a sample's score minus its group's mean, in which each sample weighs its tokens: the
    baseline of least variance weighs by the squared gradient norm, which grows as their number."""
    return scores - groups.mean(scores, weights=mask.sum(-1))


@listed("gpg")
@outcome
def compute_gpg_outcome_advantage(
    scores: Tensor, groups: Groups, mask: Tensor, f_norm: float = 1.0, alpha: float = 1.0, **kwargs: Any
) -> Tensor:
    """GPG (arXiv:2504.02546): alpha · (samples / samples of non-zero score) · (score - the group's mean) / f_norm.

    The factor makes up for samples that teach nothing; failed rows are no samples.
    """
    is_sample = mask.bool().any(-1)
    rescale = is_sample.sum() / (is_sample & (scores != 0)).sum().clamp(min=1)
    return alpha * rescale * (scores - groups.mean(scores)) / f_norm


@listed("max_rl")
@outcome
def compute_max_rl_outcome_advantage(scores: Tensor, groups: Groups, mask: Tensor, **kwargs: Any) -> Tensor:
    """MaxRL (arXiv:2602.02710): a sample's score minus its group's mean, over that mean: of n samples it maximises the
    likelihood of a success up to order n, which weighs hard prompts more. 0 where the mean is not above 0."""
    means = groups.mean(scores)
    return torch.where((means > 0) & (groups.count > 1), (scores - means) / means, 0)


@listed("sppo")
@outcome
def compute_sppo_outcome_advantage(scores: Tensor, groups: Groups, mask: Tensor, **kwargs: Any) -> Tensor:
    """SPPO (arXiv:2405.00675): P(y ≻ π_t | x) - 1/2, where P is the share of its group, itself included, that a sample
    beats by its score; a tie is half a win. It is what the policy loss of the same name asks for."""
    rivals = (groups.labels[:, None] == groups.labels) & mask.bool().any(-1)
    wins, losses = ((rivals & than).sum(-1) for than in (scores[:, None] > scores, scores[:, None] < scores))
    return ((wins - losses) / (2 * groups.count.clamp(min=1))).to(scores)


@listed("fapo")
@outcome
def compute_fapo_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    mask: Tensor,
    flawed: np.ndarray | Tensor,
    token_level_scores: Tensor,
    *,
    wrong_score: float = 0.0,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **kwargs: Any,
) -> Tensor:
    """FAPO (arXiv:2510.22543): GRPO, in which an answer that is right by flawed reasoning scores halfway to wrong ones.

    `flawed` [B] is what the reward returns under that name. Such an answer is learnt while wrong ones outnumber sound
    ones in its group, and unlearnt from then on. With scores of 1 and -1, the paper's, `wrong_score` is -1.
    """
    is_flawed = torch.tensor([bool(value) for value in flawed], device=scores.device)
    penalties = zero_masked((token_level_scores.sum(-1) - wrong_score) / 2, is_flawed)
    return groups.standardize(scores - penalties, epsilon, norm_adv_by_std_in_grpo)


@listed("spo")
@torch.no_grad()
def compute_spo_outcome_advantage(
    token_level_rewards: Tensor, tracked_values: Tensor, response_mask: Tensor, **kwargs: Any
) -> Pair:
    """SPO (arXiv:2509.13232): a sample's score minus `tracked_values` [B], what earlier answers to its prompt let
    expect, whitened over the batch's samples; 0 for fewer than two."""
    is_sample = response_mask.bool().any(-1, keepdim=True)
    distances = token_level_rewards.sum(-1, keepdim=True) - tracked_values.unsqueeze(-1).to(token_level_rewards)
    advantages = spread_over_tokens(whiten_advantages(distances, is_sample)[:, 0], response_mask)
    return advantages, advantages


@listed("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Labels, **kwargs: Any
) -> Pair:
    """REINFORCE++-baseline (arXiv:2501.03262): a sample's score minus its group's mean, whitened over the batch."""
    distances, _ = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=False
    )
    advantages = zero_masked(whiten_advantages(distances, response_mask), response_mask)
    return advantages, advantages


@listed("gdpo")
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


@listed("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any, **kwargs: Any
) -> Pair:
    """REINFORCE++ (arXiv:2501.03262): returns discounted by `config.gamma`, whitened over the batch's valid tokens."""
    returns = zero_masked(sum_to_go(token_level_rewards, response_mask, config.gamma), response_mask)
    return zero_masked(whiten_advantages(returns, response_mask), response_mask), returns


@listed("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, **kwargs: Any
) -> Pair:
    """ReMax (arXiv:2310.10505): the rewards to go minus `reward_baselines` [B], the score of the greedy response.

    At masked positions both results are the sum to go, as in verl: mask before use.
    """
    returns = sum_to_go(token_level_rewards, response_mask, discount=1.0)
    return returns - spread_over_tokens(reward_baselines, response_mask), returns


@listed("tir_optimal_token_baseline")
@listed("optimal_token_baseline")
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
