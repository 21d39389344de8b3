"""Rollout correction: verl's numbers, each weight and rejection rule by hand, and invariances.

extras/verl/tests holds it against verl's own on random batches.
"""

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
LEVELS = ["token", "sequence"]
THRESHOLDS = {option: "0.5_3.0" if option.endswith("k1") else 0.4 for option in REJECTION_OPTIONS}


def same_metrics(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    assert all(type(value) is float for value in actual.values())
    for name in expected:
        assert actual[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name


def logs(rows):
    return torch.tensor(rows).log()


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


class TestAgreesWithVerl:
    """The anchor of the specification, and what else follows from it by hand."""

    train = torch.full((2, 2), -1.0)
    rollout = torch.tensor([[-2.0, -2.0], [-1.0, -1.0]])
    mask = torch.ones(2, 2, dtype=torch.int64)

    def test_the_combined_entry_point(self):
        config = RolloutCorrectionConfig(
            rollout_is="token", rollout_is_threshold=2.0, rollout_rs="token_k1", rollout_rs_threshold="0.5_3.0"
        )
        weights, mask, metrics = correct_log_probs(self.train, self.rollout, self.mask, config)
        close(weights, [[2.0, 2.0], [1.0, 1.0]])
        assert mask.tolist() == [[0, 0], [1, 1]] and mask.dtype == torch.int64
        expected = {
            "rollout_is_mean": 1.5, "rollout_is_max": 2.0, "rollout_is_min": 1.0, "rollout_is_std": 0.5,
            "rollout_is_eff_sample_size": 0.9,
            "rollout_is_ratio_fraction_high": 0.5, "rollout_is_ratio_fraction_low": 0.0,
            "rollout_is_seq_mean": 1.5, "rollout_is_seq_std": 0.707107, "rollout_is_seq_max": 2.0,
            "rollout_is_seq_min": 1.0, "rollout_is_seq_max_deviation": 1.0,
            "rollout_is_seq_fraction_high": 0.5, "rollout_is_seq_fraction_low": 0.0,
            "rollout_rs_masked_fraction": 0.5, "rollout_rs_seq_masked_fraction": 0.5,
            "rollout_rs_token_k1_mean": -0.5, "rollout_rs_token_k1_max": 0.0, "rollout_rs_token_k1_min": -1.0,
            "rollout_rs_token_k1_std": math.log(2) / 2,  # of -1 clamped to ln 0.5, and 0
            "rollout_rs_token_k1_fraction_high": 0.0, "rollout_rs_token_k1_fraction_low": 0.5,
            "rollout_rs_token_k1_seq_mean": -0.5, "rollout_rs_token_k1_seq_std": 0.707107,
            "rollout_rs_token_k1_seq_max": 0.0, "rollout_rs_token_k1_seq_min": -1.0,
            "rollout_rs_token_k1_seq_max_deviation": 1.0,
            "rollout_rs_token_k1_seq_fraction_high": 0.0, "rollout_rs_token_k1_seq_fraction_low": 0.5,
            "rollout_rs_token_k1_masked_fraction": 0.5, "rollout_rs_token_k1_seq_masked_fraction": 0.5,
            "training_ppl": math.e, "training_log_ppl": 1.0, "rollout_ppl": (math.e**2 + math.e) / 2,
            "rollout_log_ppl": 1.5, "kl": -0.5, "k3_kl": (math.e - 2) / 2,
            "log_ppl_diff": -0.5, "log_ppl_abs_diff": 0.5, "log_ppl_diff_max": 0.0, "log_ppl_diff_min": -1.0,
            "ppl_ratio": (math.exp(-1) + 1) / 2,
            "chi2_token": (math.e**2 + 1) / 2 - 1, "chi2_seq": (math.e**4 + 1) / 2 - 1,
        }  # fmt: skip
        same_metrics(metrics, {f"rollout_corr/{name}": value for name, value in expected.items()})

    def test_with_nothing_asked_for_it_measures_and_hands_back_a_copy_of_the_mask(self):
        weights, mask, metrics = correct_log_probs(self.train, self.rollout, self.mask, RolloutCorrectionConfig())
        assert weights is None and torch.equal(mask, self.mask) and mask is not self.mask
        drift = compute_offpolicy_metrics(self.train, self.rollout, self.mask)
        assert metrics == {f"rollout_corr/{name}": value for name, value in drift.items()}


class TestWeights:
    ratios = logs([[4.0, 0.25, 1.5, 1.0], [3.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])

    @pytest.mark.parametrize(
        ("level", "threshold", "normalize", "expected"),
        [
            ("token", 2.0, False, [[2.0, 0.25, 1.5, 0], [2.0, 0, 0, 0]]),
            ("token", "2", False, [[2.0, 0.25, 1.5, 0], [2.0, 0, 0, 0]]),
            ("token", "0.5_3.5", False, [[0, 0, 1.5, 0], [3.0, 0, 0, 0]]),
            ("token", 2.0, True, [[1.391304, 0.173913, 1.043478, 0], [1.391304, 0, 0, 0]]),  # mean of 4 tokens: 1.4375
            ("sequence", 2.0, False, [[1.5, 1.5, 1.5, 0], [2.0, 0, 0, 0]]),
            ("sequence", "0.5_2.0", False, [[1.5, 1.5, 1.5, 0], [0, 0, 0, 0]]),
            ("sequence", 2.0, True, [[0.857143] * 3 + [0], [1.142857, 0, 0, 0]]),  # mean of 2 rows: 1.75
        ],
    )
    def test_by_hand(self, level, threshold, normalize, expected):
        weights, metrics = compute_rollout_correction_weights(self.ratios, self.mask, level, threshold, normalize)
        close(weights, expected)
        assert weights.dtype == torch.float32
        assert ("rollout_is_oob_ratio" in metrics) == ("_" in str(threshold))
        assert ("rollout_is_batch_norm_factor" in metrics) == normalize

    @pytest.mark.parametrize("level", LEVELS)
    def test_enormous_ratios_stay_finite(self, level):
        log_ratio = torch.tensor([[500.0, 1.0], [-500.0, 1.0]])
        weights, metrics = compute_rollout_correction_weights(log_ratio, torch.ones(2, 2), level, 1e30)
        close([weights[0, 0].log(), weights[1, 0].log()], [20.0, -20.0])
        assert all(math.isfinite(value) for value in metrics.values())


class TestRejection:
    # Per token: k1 = -x, k2 = x² / 2, k3 = e^x - 1 - x of x = ln 2, 0, ln 0.25 | ln 0.5.
    log_ratio = logs([[2.0, 1.0, 0.25], [0.5, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])

    @pytest.mark.parametrize(
        ("option", "threshold", "expected"),
        [
            ("token_k1", "0.6_3.0", [[0, 1, 0], [1, 0, 0]]),  # π_rollout / π_train: 0.5, 1, 4 | 2
            ("token_k1", 3.0, [[1, 1, 0], [1, 0, 0]]),  # 1/3 to 3
            ("token_k2", 0.25, [[1, 1, 0], [1, 0, 0]]),  # 0.240, 0, 0.961 | 0.240
            ("token_k3", 0.25, [[0, 1, 0], [1, 0, 0]]),  # 0.307, 0, 0.636 | 0.193
            ("seq_sum_k1", "0.5_1.9", [[0, 0, 0], [0, 0, 0]]),  # 2 | 2
            ("seq_sum_k1", "0.5_2.1", [[1, 1, 1], [1, 0, 0]]),
            ("seq_mean_k1", "0.5_1.3", [[1, 1, 1], [0, 0, 0]]),  # the geometric mean: 1.260 | 2
            ("seq_sum_k2", "1.0", [[0, 0, 0], [1, 0, 0]]),  # 1.201 | 0.240
            ("seq_mean_k2", 0.3, [[0, 0, 0], [1, 0, 0]]),  # 0.400 | 0.240
            ("seq_max_k2", 0.5, [[0, 0, 0], [1, 0, 0]]),  # 0.961 | 0.240
            ("seq_sum_k3", 0.9, [[0, 0, 0], [1, 0, 0]]),  # 0.943 | 0.193
            ("seq_mean_k3", 0.25, [[0, 0, 0], [1, 0, 0]]),  # 0.314 | 0.193
            ("seq_max_k3", 0.15, [[0, 0, 0], [0, 0, 0]]),  # 0.636 | 0.193
            ("token_k1,seq_mean_k1", "0.6_3.0,0.5_1.3", [[0, 1, 0], [0, 0, 0]]),  # what passes both
            (" token_k2 , token_k3,token_k2,", 0.25, [[0, 1, 0], [1, 0, 0]]),  # one threshold for all, names once
            ("token_k2,seq_max_k2", "0.25,9", [[1, 1, 0], [1, 0, 0]]),
        ],
    )
    def test_by_hand(self, option, threshold, expected):
        mask, _ = compute_rollout_rejection_mask(self.log_ratio, self.mask, option, threshold)
        assert mask.tolist() == expected

    @pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
    def test_without_a_token_there_is_nothing_to_reject(self, shape):
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


GEO, K3 = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", 0.01)


class TestMistakesAreNamed:
    mask = torch.ones(1, 2)
    zeros = torch.zeros(1, 2)

    def test_a_batch_without_a_token(self):
        empty = torch.zeros(1, 2)
        for call in (
            lambda: compute_rollout_correction_weights(self.zeros, empty),
            lambda: correct_log_probs(self.zeros, self.zeros, empty, RolloutCorrectionConfig()),
        ):
            with pytest.raises(ValueError, match="response_mask selects no token"):
                call()
        with pytest.raises(AssertionError, match="response_mask selects no token"):
            compute_offpolicy_metrics(self.zeros, self.zeros, empty)
