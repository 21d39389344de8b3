"""How far the engine that samples is from the policy that is trained, every step; and a message when it is too far."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from training.torch_functional import bound_log_ratio, masked_mean, zero_masked

logger = logging.getLogger(__name__)

MEAN = "rollout_mismatch/abs_log_prob_diff"
MAX_RATIO = "rollout_mismatch/max_ratio"


@torch.no_grad()
def rollout_mismatch(log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Three numbers on two log-probs [B, R] of the same tokens: the trainer's and the engine's that sampled them.

    Over the tokens under `response_mask`: the mean of |Δ log-prob| in nats, the k3 estimate of KL(rollout || policy) in
    nats a token, and the largest ratio of the two probabilities, whichever is above. An empty mask gives 0, 0 and 1.
    """
    log_ratio = zero_masked(log_prob - rollout_log_prob, response_mask)
    bounded = bound_log_ratio(log_ratio)
    return {
        MEAN: masked_mean(log_ratio.abs(), response_mask),
        "rollout_mismatch/k3_kl": masked_mean(bounded.expm1() - bounded, response_mask),
        MAX_RATIO: bounded.abs().max().exp(),
    }


class MismatchAlarm:
    """Says so once when the mean |Δ log-prob| of a step is above `limit`, and again after a step that was not.

    Steps that measure nothing (a critic's warm-up, an engine without log-probs) change nothing; None: never.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.raised = False

    def check(self, metrics: Mapping[str, float]) -> None:
        """Looks at a step's metrics."""
        if self.limit is None or MEAN not in metrics:
            return
        too_far = not metrics[MEAN] <= self.limit  # NaN is too far as well
        if too_far and not self.raised:
            logger.warning(
                "%s is %.3g nats a token, above trainer.max_rollout_mismatch=%g: the engine samples from other "
                "probabilities than the policy has. Often: top_p or top_k below, which only the engine applies; an "
                "engine of lower precision; weights that it did not take up. "
                "algorithm.rollout_correction.rollout_is=token weighs what remains; null is silent.",
                MEAN,
                metrics[MEAN],
                self.limit,
            )
        self.raised = too_far
