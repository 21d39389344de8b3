"""The policy losses of the catalogue: what is peculiar to one.

The rules of every loss are in tests/test_policy_losses.py, which holds these to them, too; extras/verl/tests holds them
against verl's own.
"""

import math

import pytest
import torch

from configs.checks import check_config
from configs.errors import ConfigError
from configs.extras import TABLE
from extras.algorithms import group_losses, policy_losses
from tests.batches import close
from tests.runs import compose
from tests.test_policy_losses import ANCHOR, CLIPFRAC, KL, Batch, actor_config


def test_dro_by_hand():
    # One token: -2 · ln 0.5 + ½ · 0.4 · (ln 2)², of slope -2 + 0.4 · ln 2.
    token = Batch(*(torch.tensor([[number]]) for number in (math.log(0.25), math.log(0.5), 2.0, 1)))
    loss, metrics, gradient = token.run("dro")
    close(loss, 2 * math.log(2) + 0.2 * math.log(2) ** 2)
    close(gradient, [[-2 + 0.4 * math.log(2)]])
    close(metrics[KL], -math.log(2))


def test_sppo_by_hand():
    """Sums of log-ratios against half of the mean advantages: ln 1.8 and ln 0.625 against -1/3 and 0.1875."""
    loss, metrics, gradient = ANCHOR.run("sppo", config=actor_config(sppo_eta=0.5))
    distances = math.log(1.8) + 1 / 3, math.log(0.625) - 0.1875
    close(loss, (distances[0] ** 2 + distances[1] ** 2) / 2)
    close(
        gradient, distances[0] * torch.tensor([[1, 1, 1, 0], [0] * 4]) + distances[1] * torch.tensor([[0] * 4, [1] * 4])
    )
    close(metrics[KL], -(math.log(1.8) + math.log(0.625)) / 7)


def test_geo_mean_bears_an_importance_weight_of_zero():
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    row_losses = [batch.run("geo_mean")[0] for batch in (ANCHOR.rows([0]), ANCHOR.rows([1]))]
    loss, _, gradient = ANCHOR._replace(weights=weights).run("geo_mean")
    close(loss, (row_losses[0] + 1e-10 ** (2 / 4) * row_losses[1]) / 2)
    close(gradient[0], ANCHOR.run("geo_mean")[2][0])
    close(gradient[1], 1e-5 * ANCHOR.run("geo_mean")[2][1], 1e-9)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss_mode=dro", r"policy_loss\.loss_mode=dro needs actor_rollout_ref\.actor\.policy_loss\.dro_beta"),
        ("clip_cov_lb=5", r"policy_loss\.clip_cov_lb=5\.0 must be below clip_cov_ub=5\.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start_up(override, message):
    with pytest.raises(ConfigError, match=message):
        check_config(compose(f"actor_rollout_ref.actor.policy_loss.{override}"))


def test_the_table_names_each():
    assert policy_losses.LOSSES.keys() | group_losses.LOSSES.keys() == {
        name for name, path in TABLE["policy_loss"].items() if "extras.algorithms." in path
    }


@pytest.mark.parametrize(("distance", "ratio"), [(25.0, math.exp(10)), (-25.0, math.exp(-25))])
def test_the_ratio_of_a_sequence_is_bounded_from_above_only(distance, ratio):
    token = Batch(*(torch.tensor([[number]]) for number in (-26.0, -26.0 + distance, -math.copysign(1, distance), 1)))
    assert token.run("gspo")[0].abs().item() == pytest.approx(ratio, rel=1e-5, abs=0)


@pytest.mark.parametrize(("new", "kept"), [(0.0, True), (-0.1, True), (-0.3, False)])
def test_a_token_of_probability_one_has_a_divergence(new, kept):
    token = Batch(*(torch.tensor([[number]]) for number in (0.0, new, -1.0, 1)))
    loss, metrics, gradient = token.run("dppo_kl")
    assert loss.isfinite() and gradient.isfinite()
    assert (metrics[CLIPFRAC], gradient != 0) == (1.0 - kept, kept)


@pytest.mark.parametrize("beta", [None, 0.0, -1.0])
def test_dro_needs_its_beta(beta):
    with pytest.raises(ValueError, match=rf"dro_beta is {beta}, but policy_loss\.loss_mode=dro needs a number above 0"):
        ANCHOR.run("dro", config=actor_config({"dro_beta": beta}))
