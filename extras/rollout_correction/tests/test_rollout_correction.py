"""Rollout correction: its invariances. extras/verl/tests holds it against verl's own on random batches."""

import math
from dataclasses import dataclass

import pytest
import torch

from extras.rollout_correction.correction import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    correct_log_probs,
)
from extras.rollout_correction.settings import REJECTION_OPTIONS, RolloutCorrectionConfig
from tests.batches import close

NAN = math.nan
SEEDS = range(12)
THRESHOLDS = {option: "0.5_3.0" if option.endswith("k1") else 0.4 for option in REJECTION_OPTIONS}


def same_metrics(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    assert all(type(value) is float for value in actual.values())
    for name in expected:
        assert actual[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name


@dataclass
class Rollouts:
    """Random log-probs, ragged masks with holes, one failed row and 1 to 4 others; float64."""

    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def draw(cls, seed):
        torch.manual_seed(seed)
        rows, width = 2 + seed % 4, 1 + seed % 5
        mask = (torch.rand(rows, width) < 0.7).long()
        mask[torch.arange(rows), torch.randint(width, (rows,))] = 1
        mask[seed % rows] = 0
        rollout = -3 * torch.rand(rows, width).double()
        return cls(rollout + (0.2, 1.0)[seed % 2] * torch.randn(rows, width).double(), rollout, mask)

    def stretched(self, spread):
        """(the same rollouts with NaN observations and padding between and a failed row below, where tokens went)."""
        rows, width = self.mask.shape
        columns = torch.stack([torch.randperm(width + spread)[:width].sort().values for _ in range(rows)])
        wide = [torch.full((rows + 1, width + spread), NAN).double() for _ in range(2)]
        mask = torch.zeros(rows + 1, width + spread, dtype=torch.int64)
        for new, old in zip((*wide, mask), (self.train, self.rollout, self.mask), strict=True):
            new[:rows].scatter_(1, columns, old)
        wide[0][mask == 0] = NAN
        return Rollouts(*wide, mask), columns


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_enormous_ratios_stay_finite(level):
    log_ratio = torch.tensor([[500.0, 1.0], [-500.0, 1.0]])
    weights, metrics = compute_rollout_correction_weights(log_ratio, torch.ones(2, 2), level, 1e30)
    close([weights[0, 0].log(), weights[1, 0].log()], [20.0, -20.0])
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_without_a_token_there_is_nothing_to_reject(shape):
    mask = torch.zeros(shape, dtype=torch.int64)
    rejected, metrics = compute_rollout_rejection_mask(torch.full(shape, NAN), mask, "seq_max_k3", 0.1)
    assert torch.equal(rejected, mask) and metrics == {}


SETTINGS = [
    {"rollout_is": "token", "rollout_is_threshold": 1.5},
    {"rollout_is": "token", "rollout_is_threshold": "0.7_1.4", "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.7_1.4"},
    *({"rollout_rs": option, "rollout_rs_threshold": threshold} for option, threshold in THRESHOLDS.items()),
    {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.6_2.0,0.2"},
]


def name_of(settings):
    return "-".join(str(value) for value in settings.values())


def correct(batch, **settings):
    """(weights, or ones; mask; metrics)."""
    config = RolloutCorrectionConfig(**settings)
    weights, mask, metrics = correct_log_probs(batch.train, batch.rollout, batch.mask, config)
    return torch.ones_like(batch.train) if weights is None else weights, mask, metrics


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_observations_padding_and_failed_rows_change_nothing(settings, seed):
    batch = Rollouts.draw(seed)
    stretched, columns = batch.stretched(spread=3)
    weights, mask, metrics = correct(batch, **settings)
    wide_weights, wide_mask, wide_metrics = correct(stretched, **settings)
    valid = batch.mask.bool()
    close(wide_weights[:-1].gather(1, columns)[valid], weights[valid], 1e-9)
    assert torch.equal(wide_mask[:-1].gather(1, columns), mask) and not wide_mask[stretched.mask == 0].any()
    assert wide_weights.isfinite().all()
    same_metrics(wide_metrics, metrics)


@pytest.mark.parametrize("settings", [*SETTINGS, {"rollout_rs": "token_k1", "rollout_rs_threshold": 1}], ids=name_of)
def test_where_training_and_rollout_agree_every_weight_is_1_and_nothing_is_rejected(settings):
    batch = Rollouts.draw(4)
    batch.train, batch.rollout = batch.rollout.float(), batch.rollout.float()
    weights, mask, metrics = correct(batch, **settings)
    assert torch.equal(weights[batch.mask.bool()], torch.ones(int(batch.mask.sum())))
    assert torch.equal(mask, batch.mask)
    ones = {"ppl_ratio", "mean", "max", "min", "eff_sample_size", "seq_mean", "seq_max", "seq_min", "batch_norm_factor"}
    for name, value in metrics.items():
        if not name.endswith("_ppl"):
            kind = name.removeprefix("rollout_corr/").removeprefix("rollout_is_")
            assert value == (1.0 if kind in ones else 0.0), name


@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_no_gradient_passes_and_no_input_is_written_to(settings):
    batch = Rollouts.draw(5)
    before = [tensor.clone() for tensor in (batch.train, batch.rollout, batch.mask)]
    batch.train.requires_grad_()
    weights, mask, _ = correct(batch, **settings)
    assert not weights.requires_grad and not mask.requires_grad
    for tensor, copy in zip((batch.train, batch.rollout, batch.mask), before, strict=True):
        assert torch.equal(tensor, copy)


def test_a_batch_without_a_token_is_named():
    zeros, settings = torch.zeros(1, 2), RolloutCorrectionConfig()
    for call in (
        lambda: compute_rollout_correction_weights(zeros, zeros),
        lambda: correct_log_probs(zeros, zeros, zeros, settings),
        lambda: compute_offpolicy_metrics(zeros, zeros, zeros),
    ):
        with pytest.raises((ValueError, AssertionError), match="response_mask selects no token"):
            call()
