"""The loss of bypass mode keeps the rules of every loss; extras/verl/tests holds it against verl's own."""

import pytest

from configs.schema import AGGREGATION_MODES
from extras.rollout_correction import correction
from extras.rollout_correction.settings import BYPASS_LOSS, RolloutCorrectionConfig
from tests import test_policy_losses as rules
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
assert get_policy_loss_fn(BYPASS_LOSS) is correction.compute_policy_loss_bypass_mode


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", BYPASS)
def test_it_keeps_the_rules_of_every_loss(policy, name, mode):
    rules.test_a_failed_batch_is_zero(name, mode)
    rules.test_any_cut_into_micro_batches_on_any_ranks_gives_the_whole.hypothesis.inner_test(
        name, mode, [0, 1, 0, 2, 3, 3], 2
    )
    rules.test_the_actor_makes_the_same_step_however_it_cuts_the_batch(policy, name, mode)
