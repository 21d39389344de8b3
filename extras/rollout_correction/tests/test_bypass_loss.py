"""The loss of bypass mode keeps the rules of every loss, and equals the twin of the loss that it brings."""

import math

import pytest
import torch

from configs.schema import AGGREGATION_MODES
from extras.rollout_correction import correction
from extras.rollout_correction.settings import BYPASS_LOSS, RolloutCorrectionConfig
from tests import test_policy_losses as rules
from tests.batches import close
from tests.test_policy_losses import SEEDS, TIGHT, Batch, policy, twin_of
from training.core_algos import get_policy_loss_fn

# Bypass mode in both its forms, under settings that truncate weights and reject tokens and rows.
BYPASS = {
    f"bypass_mode {loss_type}": RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold=1.2,
        rollout_rs="token_k1,seq_mean_k2",
        rollout_rs_threshold="0.7_1.5,0.1",
        bypass_mode=True,
        loss_type=loss_type,
    )
    for loss_type in ("ppo_clip", "reinforce")
}
rules.CORRECTIONS.update(BYPASS)
assert policy and get_policy_loss_fn(BYPASS_LOSS) is correction.compute_policy_loss_bypass_mode


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", BYPASS)
def test_bypass_mode_equals_the_twin_of_its_loss_on_the_tokens_that_are_kept(name, seed):
    batch, mode = Batch.draw(seed), AGGREGATION_MODES[seed % len(AGGREGATION_MODES)]
    kept, weights = batch.mask.clone(), torch.ones_like(batch.old)
    for row, mask in enumerate(batch.mask):
        places = mask.nonzero()[:, 0].tolist()
        x = {t: (batch.new[row, t] - batch.old[row, t]).item() for t in places}
        far = places and sum(x[t] ** 2 / 2 for t in places) / len(places) > 0.1
        for t in places:
            kept[row, t] = not far and 0.7 <= math.exp(-x[t]) <= 1.5
            weights[row, t] = min(math.exp(x[t]), 1.2)
    inner = "vanilla" if name == "bypass_mode ppo_clip" else "reinforce"
    weights = torch.ones_like(weights) if inner == "vanilla" else weights
    assert 0 < kept.sum() < batch.mask.sum()
    loss, metrics, gradient = batch.run(name, mode, TIGHT)
    twin_loss, _, twin_gradient = twin_of(inner, batch._replace(mask=kept, weights=weights), mode)
    close(loss, twin_loss, 1e-7)
    close(gradient, twin_gradient.masked_fill(kept == 0, 0), 1e-7)
    close(metrics["rollout_corr/rollout_rs_masked_fraction"], 1 - kept.sum() / batch.mask.sum())


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", BYPASS)
def test_it_keeps_the_rules_of_every_loss(policy, name, mode):
    rules.test_a_failed_batch_is_zero(name, mode)
    rules.test_any_cut_into_micro_batches_on_any_ranks_gives_the_whole.hypothesis.inner_test(
        name, mode, [0, 1, 0, 2, 3, 3], 2
    )
    rules.test_the_actor_makes_the_same_step_however_it_cuts_the_batch(policy, name, mode)
