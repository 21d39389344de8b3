"""GAE and GRPO, as pure functions over padded tensors, and the statistics of groups that estimators share.

A new estimator is a short function under `@register_adv_est("name")`; extras/algorithms has more. As under verl's path,
all of training/losses.py can be imported from here as well.

Shapes: B sequences, R the padded response width. `response_mask` [B, R] is 1 on tokens the policy produced and 0 on
padding, observations and tool text; a row whose mask is all zero is a failed episode. What lies under the zeros does
not matter, except that outcome estimators score a row by the sum of all its rewards, wherever they lie.
"""

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from enum import Enum, StrEnum
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.import_utils import REGISTRIES, bind
from configs.schema import ActorConfig
from data.padding import last_token
from training.losses import *  # noqa: F403  (verl's import path)
from training.losses import Pair, ReadableNamespace, get_policy_loss_fn, key_of, kl_penalty, masked_whiten, zero_masked

AdvEstimatorFn = Callable[..., Pair]
Labels = Sequence[Hashable] | np.ndarray | Tensor  # [B], the prompt of each row

ADV_ESTIMATOR_REGISTRY = REGISTRIES["estimator"]  # of `AdvEstimatorFn`
ESTIMATORS: dict[str, AdvEstimatorFn] = {}  # of this file; configs/extras.py names them

# Estimators that take neither a KL nor a length penalty in the reward, and the reason.
TAKES_NO_PENALTY: dict[str, str] = {}


def register_adv_est(name_or_enum: str | Enum, *, registry: MutableMapping = ADV_ESTIMATOR_REGISTRY) -> Callable:
    """Registers an advantage estimator; a module that is run again replaces its own.

    Raises:
        ValueError: another module has registered the name.
        TypeError: there is no name.
    """
    name = key_of(name_or_enum, "register_adv_est")

    def register(fn: AdvEstimatorFn) -> AdvEstimatorFn:
        if (other := registry.get(name, fn)).__module__ != fn.__module__:
            raise ValueError(f"Advantage estimator {name!r} has already been registered, by module {other.__module__}")
        registry[name] = fn
        return fn

    return register


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvEstimatorFn:
    """Returns the estimator registered under this exact name; raises ValueError if there is none."""
    if (name := key_of(name_or_enum)) not in ADV_ESTIMATOR_REGISTRY:
        registered = [*ADV_ESTIMATOR_REGISTRY]
        raise ValueError(f"Unknown advantage estimator simply: {name}. Registered estimators are: {registered}")
    return ADV_ESTIMATOR_REGISTRY[name]


def is_close(first: Tensor, second: Tensor) -> Tensor:
    """Says where two scores are equal up to rounding: float32 sums of the same rewards, split otherwise, differ in the
    last bits."""
    return (first - second).abs() <= 1e-6 * torch.maximum(first.abs(), second.abs()).clamp(min=1)


class Groups:
    """Statistics over the samples of each prompt; every method maps one number per row [B] to one per row [B].

    `reduce` and `mean` also take [B, K], each column alone. `index` [B] names each row's group by any hashable.
    Failed rows do not count (in verl they do). If only one row of a group did not fail, its mean is its own value, so
    that its advantage is 0; a group that never had more than one sample has mean 0 and std 1, so that its advantage is
    the raw score.

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

        Values of weight 0 do not count. If fewer than two count, the mean is 0; for the only row of a group that did
        not fail, it is that row's value.
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

    def differ(self, values: Tensor) -> Tensor:
        """Says for each row whether the values of its group differ by more than rounding (`is_close`)."""
        return ~is_close(self.reduce(values, "amax"), self.reduce(values, "amin"))

    def snap_ties(self, values: Tensor) -> Tensor:
        """Sets values `is_close` to the group's largest or smallest to exactly that one, so that ties are exact."""
        largest, smallest = self.reduce(values, "amax"), self.reduce(values, "amin")
        values = torch.where(is_close(values, smallest), smallest, values)
        return torch.where(is_close(values, largest), largest, values)

    def standardize(self, values: Tensor, epsilon: float, divide_by_std: bool) -> Tensor:
        """Returns the distance to the group's mean, over its std + `epsilon` if `divide_by_std`."""
        values = self.snap_ties(values)
        distance = values - self.mean(values)
        return distance / (self.std(values) + epsilon) if divide_by_std else distance


def spread_over_tokens(per_row: Tensor, response_mask: Tensor) -> Tensor:
    """Gives each valid token of a row the row's number, and all other positions 0: [B] -> [B, R]."""
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

    The largest advantage is subtracted first, so that equal ones become exactly 0: else the rounding of their mean
    would be divided by the root of 1e-8.
    """
    valid = response_mask.bool()
    if valid.sum() < 2:
        return torch.zeros_like(advantages)
    return masked_whiten(advantages - advantages[valid].max(), response_mask)


# Advantage estimators return (advantages, returns), both [B, R] float32 like `token_level_rewards`, without gradient.
# Outcome estimators give all tokens of a row the same number.


def outcome(of_rows: Callable[..., Tensor]) -> AdvEstimatorFn:
    """Makes an estimator from f(scores [B], groups, response_mask, its settings …) -> [B]: each token of a row gets the
    row's number."""

    @torch.no_grad()
    def estimate(token_level_rewards: Tensor, response_mask: Tensor, index: Labels, *args: Any, **kwargs: Any) -> Pair:
        groups = Groups(index, response_mask)
        per_row = of_rows(groups.snap_ties(token_level_rewards.sum(-1)), groups, response_mask, *args, **kwargs)
        advantages = spread_over_tokens(per_row, response_mask)
        return advantages, advantages

    base = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in BASE]
    update_wrapper(estimate, of_rows).__signature__ = Signature([*base, *[*signature(of_rows).parameters.values()][3:]])
    return estimate


BASE = ("token_level_rewards", "response_mask", "index")


@register_adv_est("gae", registry=ESTIMATORS)
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


@register_adv_est("grpo_vectorized", registry=ESTIMATORS)
@register_adv_est("grpo", registry=ESTIMATORS)
@outcome
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


# The built-in names; user-registered estimators are plain strings beside them.
AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in ADV_ESTIMATOR_REGISTRY})


# By hand, without a run


def compute_ppo_loss(
    old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, response_mask: Tensor, **settings: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss "vanilla" of tensors [B, R], and its metrics; `settings` are actor_rollout_ref.actor's,
    such as clip_ratio=0.2 and loss_agg_mode="token-mean"."""
    actor = ReadableNamespace(**vars(ActorConfig(**settings)), global_batch_info={})
    tensors = old_log_probs, log_probs, advantages, response_mask
    return get_policy_loss_fn("vanilla")(*tensors, actor.loss_agg_mode, actor)


def estimate_advantages(
    rewards: Tensor,
    values: Tensor | None = None,
    response_mask: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    adv_estimator: str = "gae",
    **needs: Any,
) -> Pair:
    """Returns (advantages, returns), [B, R], by a registered estimator; `needs`: further arguments, as GRPO's index.

    Rewards are those of tokens, [B, R], or of responses, [B], each put on its last token.
    """
    mask = torch.ones_like(rewards).view(len(rewards), -1) if response_mask is None else response_mask
    rewards = rewards if rewards.ndim == 2 else rewards[:, None] * last_token(mask)
    offered = {"token_level_rewards": rewards, "rewards": rewards, "response_mask": mask, "dones": last_token(mask)}
    offered |= {"gamma": gamma, "lam": lam, "gae_lambda": lam} | ({} if values is None else {"values": values})
    return bind(get_adv_estimator_fn(adv_estimator), offered, needs, f"adv_estimator={adv_estimator}")()


def compute_kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str = "kl") -> Tensor:
    """Estimates the KL to the reference of each token, [B, R]; `kl_penalty_forward` has the kinds."""
    return kl_penalty(log_probs, ref_log_probs, kind)
