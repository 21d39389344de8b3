"""Computes policy losses that compare the answers to a prompt with one another, by how likely each is as a whole.

Each is called once for all rows of a mini-batch on all ranks (`over_mini_batch`), so that it does not matter how they
are cut; the column group_ids names the prompt of each row. In their formulas u is the sum of log π - log π_ref over the
tokens of an answer, and A the mean of its advantages. Importance weights have no place in them: rollout_is is refused.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import ConfigError
from data.protocol import DataProto
from data.types import Metrics, Stage
from training.core_algos import Groups, spread_over_tokens
from training.losses import (
    LossConfig,
    PolicyLoss,
    clip_bounds,
    masked_mean,
    masked_means,
    register_policy_loss,
    zero_masked,
)

LOSSES: dict[str, PolicyLoss] = {}  # configs/extras.py names them
listed = partial(register_policy_loss, registry=LOSSES, over_mini_batch=True)


class GroupIds(Stage):
    """Adds the column group_ids [B, R]: the first row of the batch that answers the same prompt."""

    at = "prepared"

    @classmethod
    def check(cls, config: Any) -> None:
        loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={config.actor_rollout_ref.actor.policy_loss.loss_mode}"
        if config.actor_rollout_ref.rollout.n < 2:
            raise ConfigError(f"{loss} compares the answers to a prompt: set actor_rollout_ref.rollout.n=2 or more.")
        if config.env.id is not None and config.env.mode == "episode" and config.env.history == "turns":
            raise ConfigError(f"{loss} compares whole answers, and env.history=turns cuts them: set transcript.")

    @classmethod
    def makes(cls, config: Any) -> set[str]:
        return {"group_ids"}

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        first_rows: dict[str, int] = {}
        ids = torch.tensor([first_rows.setdefault(uid, row) for row, uid in enumerate(batch.uid)])
        batch.batch["group_ids"] = spread_over_tokens(ids, torch.ones_like(batch.batch["response_mask"]))
        return {}


@listed("gvpo")
def compute_policy_loss_gvpo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Tensor,
    config: LossConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GVPO (arXiv:2504.19599): half the variance, n - 1 in the denominator, of gvpo_beta · u - A within a group; the
    mean over the groups of two and more. π_ref is the policy that drew the answers, so that on policy the gradient is
    REINFORCE's, times gvpo_beta, with the group's mean as the baseline."""
    groups = Groups(group_ids[:, 0], response_mask)
    log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
    gaps = config.gvpo_beta * log_ratio.sum(-1) - masked_mean(advantages, response_mask, axis=-1)
    distances = gaps - groups.mean(gaps).detach()  # they sum to 0, so the mean's own gradient does, too
    counts = response_mask.bool().any(-1) & (groups.count > 1)  # rows that did not fail and are not alone
    variances = zero_masked(0.5 * distances**2 / (groups.count - 1).clamp(min=1), counts)
    loss = variances.sum() / zero_masked(1 / groups.count, counts).sum().round().clamp(min=1)
    return loss, masked_means({"actor/ppo_kl": -log_ratio}, response_mask)


def pair_loss(
    reference: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, group_ids: Tensor, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns -log σ(beta · (u of a group's best answer - u of its worst)), the mean over groups in which these differ,
    and metrics: how often the best has the larger u, and by how much, times beta.

    Best and worst are by A; of several the first in the mini-batch.
    """
    groups, is_row = Groups(group_ids[:, 0], response_mask), response_mask.bool().any(-1)
    log_ratio = zero_masked(log_prob - reference, response_mask)
    scores, u = groups.snap_ties(masked_mean(advantages, response_mask, axis=-1)), log_ratio.sum(-1)
    best, worst = (is_row & first_of_group(scores, groups, how) for how in ("amax", "amin"))
    margins = groups.reduce(zero_masked(u, best), "sum") - groups.reduce(zero_masked(u, worst), "sum")
    differ = best & (groups.reduce(scores, "amax") > groups.reduce(scores, "amin"))
    pairs = differ.sum().clamp(min=1)
    loss = zero_masked(-F.logsigmoid(beta * margins), differ).sum() / pairs
    metrics = masked_means({"actor/ppo_kl": -log_ratio}, response_mask)
    metrics |= {
        "actor/pair_accuracy": zero_masked((margins > 0).float(), differ).sum() / pairs,
        "actor/pair_margin": beta * zero_masked(margins, differ).sum().detach() / pairs,
    }
    return loss, metrics


def first_of_group(scores: Tensor, groups: Groups, how: str) -> Tensor:
    """Marks the first row of each group whose score is the group's "amax" or "amin", [B] bool."""
    places = torch.arange(len(scores), dtype=torch.float64, device=scores.device)
    has_it = scores == groups.reduce(scores, how)
    return places == groups.reduce(torch.where(has_it, places, torch.inf), "amin")


@listed("pair")
def compute_policy_loss_pair(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ref_log_prob: Tensor,
    group_ids: Tensor,
    config: LossConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Online DPO (arXiv:2305.18290, 2402.04792): `pair_loss` by dpo_beta, with the reference as π_ref."""
    return pair_loss(ref_log_prob, log_prob, advantages, response_mask, group_ids, config.dpo_beta)


@listed("spin")
def compute_policy_loss_spin(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Tensor,
    config: LossConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """SPIN (arXiv:2401.01335), as verl-recipe has it with pairs of drawn answers: `pair_loss` by dpo_beta, in which
    π_ref is the policy before this step, the one that drew them."""
    return pair_loss(old_log_prob, log_prob, advantages, response_mask, group_ids, config.dpo_beta)


@listed("flowrl")
def compute_policy_loss_flowrl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ref_log_prob: Tensor,
    group_ids: Tensor,
    config: LossConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """FlowRL (arXiv:2509.15207), trajectory balance: w · (log Z + ū - flowrl_beta · A)², the mean over the answers that
    are not alone; ū is the mean of log π - log π_ref over an answer's tokens, and w, without gradient, the geometric
    mean of its ratios to the policy that drew it, clipped to the config's bounds.

    log Z is the number that makes the loss of its group least, as in VarGrad (arXiv:2503.18929); the paper's comes from
    a head that is trained by this loss.
    """
    clip_low, clip_high = clip_bounds(config)
    groups, log_ratio = Groups(group_ids[:, 0], response_mask), zero_masked(log_prob - old_log_prob, response_mask)
    weights = masked_mean(log_ratio.detach(), response_mask, axis=-1).exp().clamp(1 - clip_low, 1 + clip_high)
    scores = config.flowrl_beta * masked_mean(advantages, response_mask, axis=-1)
    flows = masked_mean(log_prob - ref_log_prob, response_mask, axis=-1) - scores
    log_z = -groups.mean(flows.detach(), weights)
    counts = response_mask.bool().any(-1) & (groups.count > 1)
    loss = zero_masked(weights * (log_z + flows) ** 2, counts).sum() / counts.sum().clamp(min=1)
    metrics = masked_means({"actor/ppo_kl": -log_ratio}, response_mask)
    return loss, metrics | {"actor/log_z": zero_masked(log_z, counts).sum() / counts.sum().clamp(min=1)}
