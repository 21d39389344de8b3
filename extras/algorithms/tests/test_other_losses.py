"""The policy losses of the catalogue: verl's numbers, a twin of each in plain loops, and what is peculiar to one.

The rules of every loss are in tests/test_policy_losses.py, which holds these to them, too.
"""

import math

import pytest
import torch

from configs.extras import TABLE
from extras.algorithms.policy_losses import LOSSES
from tests import test_policy_losses as rules
from tests.batches import close
from tests.test_policy_losses import (
    ANCHOR,
    CLIPFRAC,
    KL,
    LOWER,
    SEEDS,
    Batch,
    actor_config,
    gpg_twin,
    token_by_token,
)


@pytest.mark.parametrize(
    ("name", "loss", "metrics", "gradient"),
    [
        ("dppo_tv", 0.014618, {CLIPFRAC: 0.142857, KL: -0.016826, LOWER: 0.0},
         [[-0.171429, 0, 0.857143, 0], [-0.035714, -0.089286, 0.071429, -0.142857]]),
        ("dppo_kl", -0.100342, {CLIPFRAC: 0.0, KL: -0.016826, LOWER: 0.0},
         [[-0.171429, 0.071429, 0.857143, 0], [-0.035714, -0.089286, 0.071429, -0.142857]]),
        ("gspo", 0.159373, {CLIPFRAC: 0.142857, KL: -0.016826, LOWER: 0.0},
         [[0, 0.173777, 0.347554, 0], [-0.06351, -0.06351, 0.06351, -0.12702]]),
        ("sapo", 0.634858, {CLIPFRAC: 0.0, KL: -0.016826, LOWER: 0.0},
         [[-0.198013, 0.077845, 0.388779, 0], [-0.029375, -0.076917, 0.0625, -0.125]]),
        ("gpg", -0.151447, {},
         [[-0.142857, 0.142857, 0.285714, 0], [-0.071429, -0.071429, 0.071429, -0.142857]]),
        ("clip_cov", 0.607143, {CLIPFRAC: 0.0, KL: -0.016826},
         [[-0.171429, 0, 0.857143, 0], [-0.035714, 0, 0.071429, -0.142857]]),
        ("kl_cov", 0.560714, {KL: 0.41291},
         [[-0.171429, 0.071429, 0.857143, 0], [-0.035714, -0.089286, 0.071429, -0.142857]]),
        ("geo_mean", 0.312173, {CLIPFRAC: 0.285714, KL: -0.016826, LOWER: 0.285714},
         [[0.159308, 0, 0.159308, 0], [-0.041438, 0, -0.041438, -0.041438]]),
        ("cispo", -0.094284, {CLIPFRAC: 0.571429, KL: -0.016826, LOWER: 0.0},
         [[-0.171429, 0.114286, 0.342857, 0], [-0.057143, -0.085714, 0.071429, -0.142857]]),
    ],
)  # fmt: skip
def test_each_gives_verls_numbers(name, loss, metrics, gradient):
    rules.assert_gives(name, loss, metrics, gradient)


def test_dro_by_hand():
    # One token: -2 · ln 0.5 + ½ · 0.4 · (ln 2)², of slope -2 + 0.4 · ln 2.
    token = Batch(*(torch.tensor([[number]]) for number in (math.log(0.25), math.log(0.5), 2.0, 1)))
    loss, metrics, gradient = token.run("dro")
    close(loss, 2 * math.log(2) + 0.2 * math.log(2) ** 2)
    close(gradient, [[-2 + 0.4 * math.log(2)]])
    close(metrics[KL], -math.log(2))


def test_geo_mean_bears_an_importance_weight_of_zero():
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    row_losses = [batch.run("geo_mean")[0] for batch in (ANCHOR.rows([0]), ANCHOR.rows([1]))]
    loss, _, gradient = ANCHOR._replace(weights=weights).run("geo_mean")
    close(loss, (row_losses[0] + 1e-10 ** (2 / 4) * row_losses[1]) / 2)
    close(gradient[0], ANCHOR.run("geo_mean")[2][0])
    close(gradient[1], 1e-5 * ANCHOR.run("geo_mean")[2][1], 1e-9)


def dppo_twin(token, config, kept):
    ratio = token.ratio.item()
    loss = -token.advantage * min(ratio, config.clip_ratio_c) * token.new
    return loss * kept, not kept, kept and ratio > config.clip_ratio_c


def dppo_tv_twin(token, config):
    moved = math.exp(token.new.item()) - math.exp(token.old)
    too_far = moved > config.clip_ratio_high if token.advantage > 0 else -moved > config.clip_ratio_low
    return dppo_twin(token, config, not too_far)


def dppo_kl_twin(token, config):
    old, new = math.exp(token.old), math.exp(token.new.item())
    divergence = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    if token.advantage > 0:
        return dppo_twin(token, config, new <= old or divergence <= config.clip_ratio_high)
    return dppo_twin(token, config, new >= old or divergence <= config.clip_ratio_low)


def gspo_twin(rows, config):
    found = []
    for row in rows:
        mean = sum(token.log_ratio.item() for token in row) / max(len(row), 1)
        ratios = [(mean + token.new - token.new.item()).exp() for token in row]
        found.append([(*token.clipped(config, ratio), False) for token, ratio in zip(row, ratios, strict=True)])
    return found


def sapo_twin(token, config):
    tau = config.tau_pos if token.advantage > 0 else config.tau_neg
    return -token.advantage * 4 / tau / (1 + (-tau * (token.ratio - 1)).exp()), False, False


def covariances(rows):
    tokens = [token for row in rows for token in row]
    mean_advantage = sum(token.advantage for token in tokens) / len(tokens)
    mean_log_prob = sum(token.new.item() for token in tokens) / len(tokens)
    return [[(t.advantage - mean_advantage) * (t.new.item() - mean_log_prob) for t in row] for row in rows]


def clip_cov_twin(rows, config):
    settings, found = config.policy_loss, [[(*t.clipped(config, t.ratio), None) for t in row] for row in rows]
    eligible = [
        (i, t)
        for i, row in enumerate(covariances(rows))
        for t, covariance in enumerate(row)
        if settings.clip_cov_lb < covariance < settings.clip_cov_ub and not found[i][t][1]
    ]
    count = max(1, math.floor(settings.clip_cov_ratio * sum(map(len, rows))))
    torch.manual_seed(0)
    dropped = {eligible[place] for place in torch.randperm(len(eligible)).tolist()[:count]}
    return [
        [(0 * loss if (i, t) in dropped else loss, (i, t) in dropped, None) for t, (loss, _, _) in enumerate(row)]
        for i, row in enumerate(found)
    ]


def kl_cov_twin(rows, config):
    shares = covariances(rows)
    count = max(1, math.floor(config.policy_loss.kl_cov_ratio * sum(map(len, rows))))
    least = sorted((share for row in shares for share in row), reverse=True)[count - 1]
    coefficient = config.policy_loss.ppo_kl_coef
    return [
        [
            (-t.advantage * t.ratio + (coefficient * t.log_ratio.abs() if share >= least else 0), None, None)
            for t, share in zip(row, row_shares, strict=True)
        ]
        for row, row_shares in zip(rows, shares, strict=True)
    ]


def geo_mean_twin(rows, config):
    """The whole loss of a row on its first token."""
    found = []
    for row in rows:
        exponent, flags = torch.zeros((), dtype=torch.float64), []
        for t in row:
            bounded = min(max(t.log_ratio.item(), -config.clip_ratio_low), config.clip_ratio_high)
            worse = bounded < t.log_ratio.item() if t.advantage > 0 else bounded > t.log_ratio.item()
            exponent = exponent + (bounded if worse else t.log_ratio)
            outside = bounded != t.log_ratio.item()
            flags.append((outside and t.advantage > 0, outside and t.advantage < 0))
        losses = [0.0 * t.new for t in row]
        if row:
            weight = math.prod(t.weight for t in row) ** (1 / len(row))
            losses[0] = -sum(t.advantage for t in row) / len(row) * (exponent / len(row)).exp() * weight
        found.append([(loss, *pair) for loss, pair in zip(losses, flags, strict=True)])
    return found


def cispo_twin(token, config):
    ratio = token.ratio.item()
    bounded = min(max(ratio, 1 - config.clip_ratio_low), 1 + config.clip_ratio_high)
    return -bounded * token.advantage * token.new, ratio != bounded, False


def dro_twin(token, config):
    penalty = config.policy_loss.dro_beta / 2 * token.log_ratio * token.log_ratio
    return -(token.new * token.advantage - penalty), None, None


rules.TWINS |= {
    "dppo_tv": token_by_token(dppo_tv_twin),
    "dppo_kl": token_by_token(dppo_kl_twin),
    "gspo": gspo_twin,
    "sapo": token_by_token(sapo_twin),
    "gpg": token_by_token(gpg_twin),
    "clip_cov": clip_cov_twin,
    "kl_cov": kl_cov_twin,
    "geo_mean": geo_mean_twin,
    "cispo": token_by_token(cispo_twin),
    "dro": token_by_token(dro_twin),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TABLE["policy_loss"])
def test_a_loss_equals_its_twin_in_loops(name, seed):
    rules.assert_equals_its_twin(name, seed)


def test_the_table_names_each():
    assert LOSSES.keys() == TABLE["policy_loss"].keys()


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
