"""PRIME's formulas (arXiv:2502.01456): the reward of a token, the losses of its model, and the advantages.

Pure functions, in the shapes of training/core_algos.py. q [B, R] is the log-ratio of the process reward model to its
reference, Q [B] a row's sum of it, and acc [B] a row's outcome, in [0, 1]. Failed rows leave every statistic.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from data.padding import last_token
from training.core_algos import (
    TAKES_NO_PENALTY,
    AdvEstimatorFn,
    Groups,
    Labels,
    Pair,
    masked_mean,
    register_adv_est,
    sum_to_go,
    whiten_advantages,
    zero_masked,
)

ESTIMATORS: dict[str, AdvEstimatorFn] = {}  # configs/extras.py names them
TAKES_NO_PENALTY["prime"] = "reads the outcome alone"
SUMMED = ("bon_rm", "bon_acc")  # losses that are added up over rows, where the others are averaged


@register_adv_est("prime", registry=ESTIMATORS)
@torch.no_grad()
def compute_prime_advantage_return(
    token_level_scores: Tensor,
    prm_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    reward_gt_coef: float = 5.0,
    reward_dpo_coef: float = 5.0,
) -> Pair:
    """PRIME: the outcome at the last token and the process rewards before it, each less its mean over the prompt's
    other samples, summed from each token on, and whitened over the batch."""
    groups, ends, acc = Groups(index, response_mask), last_token(response_mask), token_level_scores.sum(-1)
    outcome = leave_one_out(acc[:, None] * ends, acc, groups) * ends
    process = leave_one_out(prm_rewards, masked_mean(prm_rewards, response_mask, axis=-1), groups)
    rewards = zero_masked(reward_gt_coef * outcome + reward_dpo_coef * process, response_mask)
    returns = zero_masked(sum_to_go(rewards, response_mask, 1.0), response_mask)
    return zero_masked(whiten_advantages(returns, response_mask), response_mask), returns


def leave_one_out(rewards: Tensor, means: Tensor, groups: Groups) -> Tensor:
    """Returns n/(n−1) · (reward − the group's mean of `means` [B]), [B, R]; 0 in a group of one.

    This is verl's. Of a reward r in a row of mean m it is r − (mean of the others' means) + (r − m)/(n − 1).
    """
    n = groups.count[:, None]
    distance = (rewards - groups.mean(means)[:, None]) * n / (n - 1).clamp(min=1)
    return torch.where(n > 1, distance, 0)


def token_rewards(log_ratio: Tensor, response_mask: Tensor, beta: float, lam: float = 0.0) -> Tensor:
    """Returns the process rewards r_t = Σ_(k≥t) lam^(k−t) · beta · q_k, and 0 at a row's last token: the outcome is
    there. So a row's rewards do not sum to beta · Q, which the model learns; this is the algorithm's."""
    rewards = sum_to_go(beta * log_ratio, response_mask, lam)
    return zero_masked(rewards, response_mask.bool() & (last_token(response_mask) == 0))


def batch_norm(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Divides rewards by the largest |reward to go| of all rows and tokens: in verl those of one rank."""
    to_go = zero_masked(sum_to_go(rewards, response_mask, 1.0), response_mask)
    return rewards / (to_go.abs().max() + 1e-6)


def row_losses(scores: Tensor, acc: Tensor, opponents: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """Returns the loss of each row, [B], by its `scores` beta · Q.

    Without `opponents` it is the cross-entropy of sigmoid(score) and acc; with them −log sigmoid(±(score − opponents)),
    + where acc > 0, times `weights`.
    """
    if opponents is None:
        return F.softplus(scores) - acc * scores
    sign = torch.where(acc > 0, 1.0, -1.0)
    return weights * F.softplus(-sign * (scores - opponents))


def opponents_of(scores: Tensor, acc: Tensor, index: Labels, response_mask: Tensor) -> Tensor:
    """Returns for each row, [B], the mean score of its prompt's samples that it beats or, where acc is 0, that beat it;
    0 where there is none."""
    means = torch.zeros_like(scores)
    for rows in samples_by_prompt(index, response_mask):
        lead = acc[rows][:, None] - acc[rows]
        met = torch.where(acc[rows][:, None] > 0, lead > 0, lead < 0)
        means[rows] = masked_mean(scores[rows].expand_as(lead), met, axis=1)
    return means


def best_of_n_weights(values: Tensor, index: Labels, response_mask: Tensor) -> Tensor:
    """Returns for each row, [B], n · F^(n−1), where F is the share of the prompt's n samples that are not above it."""
    weights = torch.ones_like(values)
    for rows in samples_by_prompt(index, response_mask):
        share = (values[rows] <= values[rows][:, None]).float().mean(1)
        weights[rows] = len(rows) * share ** (len(rows) - 1)
    return weights


def pair_accuracy(scores: Tensor, acc: Tensor, index: Labels, response_mask: Tensor) -> float:
    """Returns the share of a prompt's pairs whose scores stand as their outcomes do, weighted by |Δ acc|: 0.5 where all
    tie; the mean over the prompts."""
    shares = []
    for rows in samples_by_prompt(index, response_mask):
        first, second = torch.triu_indices(len(rows), len(rows), offset=1)
        score_lead, lead = (values[rows][first] - values[rows][second] for values in (scores, acc))
        agree = ((score_lead > 0) == (lead > 0)).float() * lead.abs()
        shares.append((agree.sum() / lead.abs().sum()).item() if lead.any() else 0.5)
    return sum(shares) / max(1, len(shares))


def sign_accuracy(scores: Tensor, acc: Tensor, response_mask: Tensor) -> float:
    """Returns the share of rows whose score is positive where acc is above a half, and negative where it is below."""
    return masked_mean((scores.sign() == (2 * acc - 1).sign()).float(), response_mask.bool().any(-1)).item()


def samples_by_prompt(index: Labels, response_mask: Tensor) -> Iterator[list[int]]:
    """Yields the rows of each prompt that did not fail."""
    prompts: dict[int, list[int]] = {}
    labels = Groups(index, response_mask).labels.tolist()
    for row in response_mask.bool().any(-1).nonzero()[:, 0].tolist():
        prompts.setdefault(labels[row], []).append(row)
    yield from prompts.values()
