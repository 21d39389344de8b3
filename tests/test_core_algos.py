"""Estimators, losses and KL: verl's numbers, slow twins on ragged batches, and the rules that no rewrite may bend."""

import inspect
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import AGGREGATION_MODES
from training import core_algos
from training.core_algos import (
    AdaptiveKLController,
    AdvantageEstimator,
    FixedKLController,
    agg_loss,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_value_loss,
    get_adv_estimator_fn,
    get_kl_controller,
    get_policy_loss_fn,
    kl_penalty,
    register_adv_est,
    register_policy_loss,
)

NAN = math.nan
SEEDS = range(20)


@dataclass
class ActorConfig:
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    global_batch_info: dict = field(default_factory=dict)


def close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected), rtol=tolerance, atol=tolerance, check_dtype=False
    )


def outcome(scores, num_tokens=2):
    """Rewards with each score on the last token, and a full mask."""
    rewards = torch.zeros(len(scores), num_tokens)
    rewards[:, -1] = torch.tensor(scores)
    return rewards, torch.ones(len(scores), num_tokens, dtype=torch.int64)


@dataclass
class RaggedBatch:
    """Random masks with holes, empty rows and groups of one to many; float64, so that twins agree closely."""

    rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    index: np.ndarray

    @classmethod
    def draw(cls, seed):
        torch.manual_seed(seed)
        rows, width = 4 + seed % 5, 2 + seed % 4
        mask = (torch.rand(rows, width) < 0.6).long()
        mask[seed % rows] = 0
        mask[(seed + 1) % rows, :2] = 1  # whitening needs two tokens
        index = np.array([f"prompt-{g}" for g in torch.randint(4, (rows,)).tolist()], dtype=object)
        return cls(torch.randn(rows, width).double(), torch.randn(rows, width).double(), mask, index)

    def estimate(self, name):
        """(advantages, returns) of a registered estimator, which gets just the arguments that it names."""
        offered = {
            "token_level_rewards": self.rewards,
            "values": self.values,
            "response_mask": self.mask,
            "index": self.index,
            "gamma": 0.9,
            "lam": 0.8,
            "config": SimpleNamespace(gamma=0.9),
        }
        fn = get_adv_estimator_fn(name)
        return fn(**{name: offered[name] for name in inspect.signature(fn).parameters if name in offered})


@pytest.mark.usefixtures("restored_registries")
class TestRegistries:
    def test_enum_members_are_strings_named_by_their_upper_case_form(self):
        assert len(AdvantageEstimator) == 15
        assert all(member == member.name.lower() == member.value for member in AdvantageEstimator)
        assert isinstance(AdvantageEstimator.GRPO, str) and f"{AdvantageEstimator.GRPO}" == "grpo"

    def test_an_estimator_is_found_by_its_name_and_by_its_enum_member(self):
        assert get_adv_estimator_fn("grpo") is compute_grpo_outcome_advantage
        assert get_adv_estimator_fn(AdvantageEstimator.GAE) is compute_gae_advantage_return

    def test_a_registered_estimator_comes_back_unchanged_and_may_be_registered_twice(self):
        def mine(token_level_rewards, **kwargs):
            return token_level_rewards, token_level_rewards

        assert register_adv_est("mine")(mine) is mine
        assert register_adv_est("mine")(mine) is mine
        assert get_adv_estimator_fn("mine") is mine

    def test_a_second_function_under_a_taken_name_is_refused_and_the_first_stays(self):
        with pytest.raises(ValueError, match=r"'grpo' has already been registered, by module training\.core_algos"):
            register_adv_est(AdvantageEstimator.GRPO)(lambda **kwargs: None)
        assert get_adv_estimator_fn("grpo") is compute_grpo_outcome_advantage

    @pytest.mark.parametrize("name", ["GRPO", "gpro"])
    def test_an_unknown_estimator_lists_the_known_ones(self, name):
        with pytest.raises(ValueError, match=rf"^Unknown advantage estimator simply: {name}.*'gae', .*'grpo'"):
            get_adv_estimator_fn(name)

    def test_a_policy_loss_may_be_replaced(self):
        assert get_policy_loss_fn("vanilla") is compute_policy_loss_vanilla

        @register_policy_loss("vanilla")
        def mine(*args):
            return args

        assert get_policy_loss_fn("vanilla") is mine

    def test_an_unknown_policy_loss_lists_the_known_ones(self):
        register_policy_loss("mine")(print)
        with pytest.raises(ValueError) as error:
            get_policy_loss_fn("vanila")
        supported = list(core_algos.POLICY_LOSS_REGISTRY)
        assert supported[0] == "vanilla" and supported[-1] == "mine"
        assert str(error.value) == f"Unsupported loss mode: vanila. Supported modes are: {supported}"


class TestEstimatorsAgreeWithVerl:
    """The anchors of the specification: 4 samples, 4 tokens, groups a, a, b, b."""

    rewards = torch.tensor([[0, 0, 1, 0], [0, 0.5, 0, 0], [0, 0, 0, 2], [1, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]])
    values = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 0.2], [0, 0.1, 0.2, 0.3], [0.9, 0.8, 0.7, 0.6]])
    index = np.array(["a", "a", "b", "b"], dtype=object)

    def test_gae(self):
        advantages, returns = compute_gae_advantage_return(self.rewards, self.values, self.mask, 0.9, 0.8)
        close(
            advantages,
            [
                [-0.289842, -0.155334, 0.054627, -1.111822],
                [-1.225134, -0.945186, -1.111822, -1.111822],
                [0.740632, 1.044442, 1.044442, 1.720982],
                [-0.945186, -1.111822, -1.111822, -1.111822],
            ],
        )
        close(
            returns,
            [
                [0.59328, 0.774, 1, 0.4],
                [0.432, 0.5, 0.3, 0.2],
                [1.11168, 1.394, 1.494, 2],
                [1, 0.8, 0.7, 0.6],
            ],
        )

    @pytest.mark.parametrize(
        ("normalize", "per_row"),
        [(True, [0.707105, -0.707105, 0.707106, -0.707106]), (False, [0.25, -0.25, 0.5, -0.5])],
    )
    def test_grpo(self, normalize, per_row):
        advantages, returns = compute_grpo_outcome_advantage(
            self.rewards, self.mask, self.index, norm_adv_by_std_in_grpo=normalize
        )
        close(advantages, torch.tensor(per_row)[:, None] * self.mask)
        assert returns is advantages

    def test_rloo(self):
        advantages, returns = compute_rloo_outcome_advantage(self.rewards, self.mask, self.index)
        close(advantages, torch.tensor([0.5, -0.5, 1, -1])[:, None] * self.mask)
        assert returns is advantages

    def test_reinforce_plus_plus(self):
        advantages, returns = compute_reinforce_plus_plus_outcome_advantage(
            self.rewards, self.mask, config=SimpleNamespace(gamma=0.9)
        )
        close(
            advantages,
            [
                [-0.555278, -0.394069, -0.214946, 0],
                [-1.200118, -1.110557, 0, 0],
                [0.89561, 0, 1.21803, 1.576274],
                [-0.214946, 0, 0, 0],
            ],
        )
        close(returns, [[0.81, 0.9, 1, 0], [0.45, 0.5, 0, 0], [1.62, 0, 1.8, 2], [1, 0, 0, 0]])

    def test_a_sample_alone_in_its_group_keeps_its_score(self):
        rewards, mask = outcome([1.0])
        close(compute_grpo_outcome_advantage(rewards, mask, ["a"])[0], [[0.999999] * 2])
        close(compute_rloo_outcome_advantage(rewards, mask, ["a"])[0], [[1.0] * 2])

    def test_nearly_equal_scores_are_divided_by_their_own_small_std(self):
        rewards, mask = outcome([1.0, 1.0001])
        advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a"])
        close(advantages[:, 0], [-0.698078, 0.696416])


class TestGroups:
    @given(score=st.floats(-100, 100, width=32), size=st.integers(2, 9))
    @settings(max_examples=60, deadline=None)
    def test_equal_scores_give_exactly_zero(self, score, size):
        rewards, mask = outcome([score] * size)
        assert not compute_grpo_outcome_advantage(rewards, mask, ["a"] * size)[0].any()
        assert not compute_rloo_outcome_advantage(rewards, mask, ["a"] * size)[0].any()

    def test_the_sums_that_float32_rounds_are_exactly_zero_too(self):
        for score, size in [(0.3, 7), (0.7, 7), (0.1, 7), (0.3, 6)]:  # verl gives up to 0.056 here
            rewards, mask = outcome([score] * size)
            assert not compute_grpo_outcome_advantage(rewards, mask, ["a"] * size)[0].any()

    @pytest.mark.parametrize("failed_score", [0.0, 5.0, NAN])
    @pytest.mark.parametrize(
        "estimate",
        [
            compute_grpo_outcome_advantage,
            lambda *args: compute_grpo_outcome_advantage(*args, norm_adv_by_std_in_grpo=False),
            compute_rloo_outcome_advantage,
        ],
        ids=["grpo", "grpo without std", "rloo"],
    )
    def test_a_group_with_a_failed_row_equals_the_group_without_it(self, estimate, failed_score):
        rewards, mask = outcome([1.0, failed_score, 0.0, 0.25, 3.0, 3.5])
        mask[1] = 0
        index = ["a", "a", "a", "a", "b", "b"]
        survivors = [0, 2, 3, 4, 5]
        advantages, _ = estimate(rewards, mask, index)
        expected, _ = estimate(rewards[survivors], mask[survivors], [index[row] for row in survivors])
        assert torch.equal(advantages[survivors], expected)
        assert not advantages[1].any()

    def test_the_last_survivor_of_a_group_counts_as_alone_and_a_lost_group_as_zero(self):
        rewards, mask = outcome([2.0, 1.0, 1.0, 1.0])
        mask[1:] = 0
        advantages, _ = compute_rloo_outcome_advantage(rewards, mask, ["a", "a", "b", "b"])
        assert advantages.tolist() == [[2.0, 2.0], [0, 0], [0, 0], [0, 0]]

    @pytest.mark.parametrize(
        "index",
        [
            [7, "b", 7, (1, 2), "b"],
            np.array(["x", "y", "x", "z", "y"], dtype=object),
            np.array([5, -1, 5, 2, -1]),
            torch.tensor([5, -1, 5, 2, -1]),
        ],
    )
    def test_rows_are_grouped_by_equality_of_any_labels_in_any_order(self, index):
        rewards, mask = outcome([1.0, 4.0, 2.0, 9.0, 8.0])
        advantages, _ = compute_rloo_outcome_advantage(rewards, mask, index)
        close(advantages[:, 0], [-1.0, -4.0, 1.0, 9.0, 4.0])

    def test_a_label_too_few_is_refused(self):
        rewards, mask = outcome([1.0, 2.0, 3.0])
        with pytest.raises(ValueError, match="group of 2 rows, but response_mask has 3"):
            compute_grpo_outcome_advantage(rewards, mask, ["a", "a"])


class TestWhitenedEstimators:
    @pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
    def test_nothing_at_masked_positions_matters(self, name):
        batch = RaggedBatch.draw(5)
        valid = batch.mask.bool()
        clean_advantages, clean_returns = batch.estimate(name)
        batch.values[~valid] = NAN
        batch.rewards[~valid] = NAN
        advantages, returns = batch.estimate(name)
        assert torch.equal(advantages, clean_advantages)
        assert torch.equal(returns[valid], clean_returns[valid])

    @pytest.mark.parametrize("num_valid", [0, 1])
    @pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
    def test_with_fewer_than_two_tokens_there_is_nothing_to_whiten(self, name, num_valid):
        batch = RaggedBatch.draw(0)
        batch.mask[:] = 0
        batch.mask[1, :num_valid] = 1
        advantages, returns = batch.estimate(name)
        assert not advantages.any()
        close(returns[1, :num_valid], batch.rewards[1, :num_valid])


AGG_WHOLE = {
    "token-mean": -0.071429,
    "token-sum": -0.5,
    "seq-mean-token-sum": -0.25,
    "seq-mean-token-mean": -0.145833,
    "seq-mean-token-sum-norm": -0.0625,
}
AGG_WITH_COUNTS = AGG_WHOLE | {"token-mean": -0.1, "token-sum": -1.0}


COUNTS = {"dp_size": 3, "batch_num_tokens": 37, "global_batch_size": 11, "loss_scale_factor": 4.0}


def token_weights(mask, mode, *, dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None):
    """What `agg_loss` weighs each token's loss by, token by token; float64 [B, R]."""
    lengths = [sum(row) for row in mask.tolist()]
    tokens = batch_num_tokens or sum(lengths)
    rows = global_batch_size or sum(length > 0 for length in lengths)
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    for row, t in mask.nonzero().tolist():
        weights[row, t] = (
            dp_size
            * {
                "token-mean": 1 / tokens,
                "token-sum": 1,
                "seq-mean-token-sum": 1 / rows,
                "seq-mean-token-mean": 1 / lengths[row] / rows,
                "seq-mean-token-sum-norm": 1 / rows / (loss_scale_factor or mask.shape[1]),
            }[mode]
        )
    return weights


class TestAggLoss:
    loss = torch.tensor([[1.0, -1.0, -2.0, 1.0], [0.5, 0.5, -0.5, 1.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])

    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_agrees_with_verl(self, mode):
        close(agg_loss(self.loss, self.mask, mode), AGG_WHOLE[mode])
        counts = {"dp_size": 2, "batch_num_tokens": 10, "global_batch_size": 4}
        close(agg_loss(self.loss, self.mask, mode, **counts), AGG_WITH_COUNTS[mode])

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("counts", [{}, COUNTS], ids=["own counts", "global counts"])
    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_equals_a_loop_over_tokens(self, mode, counts, seed):
        batch = RaggedBatch.draw(seed)
        loss = batch.rewards.masked_fill(batch.mask == 0, NAN).requires_grad_()
        weights = token_weights(batch.mask, mode, **counts)
        value = agg_loss(loss, batch.mask, mode, **counts)
        value.backward()
        close(value, sum(weights[place] * loss[place] for place in map(tuple, batch.mask.nonzero().tolist())), 1e-7)
        close(loss.grad, weights, 1e-7)

    def test_the_sum_norm_divides_by_its_factor(self):
        close(agg_loss(self.loss, self.mask, "seq-mean-token-sum-norm", loss_scale_factor=10), -0.025)

    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_a_nan_under_the_mask_reaches_neither_loss_nor_gradient(self, mode):
        loss = torch.where(self.mask.bool(), self.loss, NAN).requires_grad_()
        value = agg_loss(loss, self.mask, mode)
        value.backward()
        close(value, AGG_WHOLE[mode])
        assert loss.grad.isfinite().all() and loss.grad[0, 3] == 0

    @pytest.mark.parametrize("counts", [{}, {"batch_num_tokens": 0, "global_batch_size": 0}])
    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_an_empty_mask_gives_zero_and_no_gradient(self, mode, counts):
        loss = torch.full((2, 3), NAN, requires_grad=True)
        value = agg_loss(loss, torch.zeros(2, 3), mode, **counts)
        value.backward()
        assert value == 0 and not loss.grad.any()

    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_a_failed_row_changes_nothing(self, mode):
        loss, mask = torch.cat([self.loss, torch.ones(1, 4)]), torch.cat([self.mask, torch.zeros(1, 4).long()])
        assert agg_loss(loss, mask, mode) == agg_loss(self.loss, self.mask, mode)

    @given(piece_of_row=st.lists(st.integers(0, 3), min_size=6, max_size=6))
    @settings(max_examples=15, deadline=None)
    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_any_cut_into_micro_batches_adds_up_to_the_whole(self, mode, piece_of_row):
        torch.manual_seed(0)
        lengths = [5, 2, 0, 4, 1, 0]
        mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
        mask[3, 1] = 0  # an observation
        loss = torch.randn(6, 5, requires_grad=True)
        counts = {
            "batch_num_tokens": int(mask.sum()),
            "global_batch_size": int(mask.any(-1).sum()),
            "loss_scale_factor": 5,
        }
        whole = agg_loss(loss, mask, mode, loss_scale_factor=5)
        (whole_gradient,) = torch.autograd.grad(whole, loss)

        pieces = [[row for row in range(6) if piece_of_row[row] == piece] for piece in set(piece_of_row)]
        widths = [max(lengths[row] for row in rows) for rows in pieces]  # a worker may trim the padding
        summed = sum(
            agg_loss(loss[rows, :width], mask[rows, :width], mode, **counts)
            for rows, width in zip(pieces, widths, strict=True)
        )
        (summed_gradient,) = torch.autograd.grad(summed, loss)
        close(summed, whole)
        close(summed_gradient, whole_gradient)

    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_dp_size_makes_the_mean_over_ranks_the_whole(self, mode):
        counts = {"dp_size": 2, "batch_num_tokens": 7, "global_batch_size": 2}
        ranks = [agg_loss(self.loss[rank : rank + 1], self.mask[rank : rank + 1], mode, **counts) for rank in range(2)]
        close(sum(ranks) / 2, AGG_WHOLE[mode])

    @pytest.mark.parametrize("mode", [mode for mode in AGGREGATION_MODES if mode != "token-sum"])
    def test_several_ranks_need_the_global_count(self, mode):
        missing = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
        with pytest.raises(ValueError, match=f"dp_size is 2 but {missing} is None"):
            agg_loss(self.loss, self.mask, mode, dp_size=2)

    def test_an_unknown_mode_lists_the_known_ones(self):
        with pytest.raises(ValueError, match=r"^Invalid loss_agg_mode: mean\. .*token-mean, .*token-sum$"):
            agg_loss(self.loss, self.mask, "mean")


METRICS = ["actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"]
ANCHOR = {
    "old": torch.tensor([[0.5, 0.4, 0.3, 0.2], [0.6, 0.2, 0.1, 0.9]]).log(),
    "new": torch.tensor([[0.6, 0.2, 0.9, 0.2], [0.3, 0.25, 0.1, 0.9]]).log(),
    "advantages": torch.tensor([[1.0, -1.0, -2.0, 1.0], [0.5, 0.5, -0.5, 1.0]]),
    "mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
    "weights": None,
}


class TestVanillaLoss:
    def run(self, config=None, mode="token-mean", **changed):
        """(loss, metrics, gradient) of verl's anchor input, or of one changed in part."""
        old, new, advantages, mask, weights = (ANCHOR | changed).values()
        log_prob = new.clone().requires_grad_()
        args = (old, log_prob, advantages, mask, mode, config or ActorConfig())
        loss, metrics = compute_policy_loss_vanilla(*args, rollout_is_weights=weights)
        loss.backward()
        return loss, metrics, log_prob.grad

    def test_agrees_with_verl(self):
        loss, metrics, gradient = self.run()
        close(loss, 0.607143)
        assert list(metrics) == METRICS and all(type(value) is float for value in metrics.values())
        close(list(metrics.values()), [0.285714, -0.016826, 0.0])
        # Token (1, 3) meets the dual-clip bound exactly, and ties halve the gradient.
        close(gradient, [[-0.171429, 0, 0.428571, 0], [-0.035714, 0, 0.071429, -0.142857]])
        close(self.run(mode="seq-mean-token-sum")[0], 2.125)

    def test_clip_ratio_alone_sets_both_bounds(self):
        alone = self.run(ActorConfig(clip_ratio=0.05))[0]
        both = self.run(ActorConfig(clip_ratio_low=0.05, clip_ratio_high=0.05))[0]
        assert alone == both != self.run()[0]

    def test_each_bound_holds_on_its_own_side(self):
        # Ratios 1.2 and 1.25 at positive advantages meet the upper bound, 0.5 at a negative one the lower.
        wide_high = self.run(ActorConfig(clip_ratio_high=10.0))[1]["actor/pg_clipfrac"]
        wide_low = self.run(ActorConfig(clip_ratio_low=10.0))[1]["actor/pg_clipfrac"]
        close([wide_high, wide_low], [1 / 7, 1 / 7])

    def test_on_policy_the_gradient_is_that_of_reinforce(self):
        loss, metrics, gradient = self.run(new=ANCHOR["old"])
        close(loss, -(ANCHOR["advantages"] * ANCHOR["mask"]).sum() / 7)
        close(gradient, -ANCHOR["advantages"] * ANCHOR["mask"] / 7)
        assert list(metrics.values()) == [0.0, 0.0, 0.0]

    def test_importance_weights_multiply_each_token(self):
        weights = torch.tensor([[2.0, 0.0, 0.5, 9.0], [1.0, 1.0, 0.0, 3.0]])
        loss, metrics, gradient = self.run(weights=weights)
        per_token = torch.tensor([[-1.2, 0.8, 6, 0], [-0.25, -0.6, 0.5, -1]])
        close(loss, (per_token * weights * ANCHOR["mask"]).sum() / 7)
        close(gradient, self.run()[2] * weights)
        assert metrics == self.run()[1]

    @pytest.mark.parametrize("spoilt", ["old", "new", "advantages", "weights"])
    def test_a_nan_under_the_mask_reaches_neither_loss_metrics_nor_gradient(self, spoilt):
        tensor = torch.ones(2, 4) if spoilt == "weights" else ANCHOR[spoilt].clone()
        tensor[0, 3] = NAN
        clean, (loss, metrics, gradient) = self.run(), self.run(**{spoilt: tensor})
        assert loss == clean[0] and metrics == clean[1] and torch.equal(gradient, clean[2])

    def test_a_failed_batch_is_a_loss_of_zero(self):
        loss, metrics, gradient = self.run(mask=torch.zeros(2, 4))
        assert loss == 0 and not gradient.any() and list(metrics.values()) == [0.0, 0.0, 0.0]

    def test_a_far_off_policy_token_is_bounded_and_gets_no_gradient(self):
        loss, metrics, gradient = self.run(new=ANCHOR["old"] + 500.0, config=ActorConfig(clip_ratio_c=1e30))
        assert loss.isfinite() and not gradient.any()
        close(metrics["actor/ppo_kl"], -20.0)

    def test_a_dual_clip_at_or_below_one_is_refused(self):
        with pytest.raises(AssertionError, match=r"clip_ratio_c is 1\.0, but must be above 1"):
            self.run(ActorConfig(clip_ratio_c=1.0))


class TestValueAndEntropyLoss:
    vpreds = torch.tensor([[1.0, 0.0, 2.0]])
    returns = torch.tensor([[0.0, 1.0, 1.0]])
    values = torch.tensor([[0.2, 0.3, 1.9]])
    mask = torch.tensor([[1, 1, 0]])

    def test_value_loss_agrees_with_verl(self):
        loss, clip_fraction = compute_value_loss(self.vpreds, self.returns, self.values, self.mask, 0.5)
        close(loss, 0.5)
        assert clip_fraction == 0

    def test_value_loss_takes_the_worse_of_plain_and_clipped(self):
        # The first prediction would be right, but is clipped to 0.5: error 0.25. The second is plainly off by 1.
        vpreds = torch.tensor([[1.0, 2.0]], requires_grad=True)
        loss, clip_fraction = compute_value_loss(
            vpreds, torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]]), torch.ones(1, 2), 0.5
        )
        loss.backward()
        close(loss, 0.5 * (0.25 + 1) / 2)
        assert clip_fraction == 0.5
        close(vpreds.grad, [[0.0, 0.5]])

    def test_value_loss_divides_by_the_global_count(self):
        args = (self.vpreds, self.returns, self.values, self.mask, 0.5)
        close(compute_value_loss(*args, batch_num_tokens=8)[0], 0.125)
        close(compute_value_loss(*args, "seq-mean-token-sum", dp_size=2, global_batch_size=4)[0], 0.5)

    def test_a_nan_under_the_mask_reaches_neither_value_loss_nor_gradient(self):
        spoilt = [t.masked_fill(self.mask == 0, NAN) for t in (self.vpreds, self.returns, self.values)]
        spoilt[0].requires_grad_()
        loss, clip_fraction = compute_value_loss(*spoilt, self.mask, 0.5)
        loss.backward()
        close(loss, 0.5)
        assert clip_fraction == 0
        close(spoilt[0].grad, [[0.5, -0.5, 0.0]])

    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("counts", [{}, COUNTS], ids=["own counts", "global counts"])
    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_value_loss_equals_a_loop_over_tokens(self, mode, counts, seed):
        batch = RaggedBatch.draw(seed)
        columns = (batch.values, batch.rewards, batch.values + batch.rewards.flip(0))
        vpreds, returns, values = (column.masked_fill(batch.mask == 0, NAN) for column in columns)
        vpreds.requires_grad_()
        loss, clip_fraction = compute_value_loss(vpreds, returns, values, batch.mask, 0.4, mode, **counts)
        loss.backward()

        weights = token_weights(batch.mask, mode, **counts)
        total, num_clipped, gradient = 0.0, 0, torch.zeros_like(weights)
        for row, t in batch.mask.nonzero().tolist():
            prediction, target, before = (column[row, t].item() for column in (vpreds, returns, values))
            bounded = min(max(prediction, before - 0.4), before + 0.4)
            is_clipped = (bounded - target) ** 2 > (prediction - target) ** 2
            num_clipped += is_clipped
            total += weights[row, t] * 0.5 * ((bounded if is_clipped else prediction) - target) ** 2
            gradient[row, t] = 0.0 if is_clipped else weights[row, t] * (prediction - target)
        close(loss, total, 1e-7)
        close(vpreds.grad, gradient, 1e-7)
        close(clip_fraction, num_clipped / int(batch.mask.sum()))


KL_VALUES = {
    "k1": [1.0, -1.0, -29.0],
    "abs": [1.0, 1.0, 29.0],
    "k2": [0.5, 0.5, 420.5],
    "k3": [0.367879, 0.718282, 10.0],
}
KL_GRADIENTS = {
    "k1": [1.0, 1.0, 1.0],
    "abs": [1.0, -1.0, -1.0],
    "k2": [1.0, -1.0, -29.0],
    "k3": [1 - 1 / math.e, 1 - math.e, 0.0],
}


class TestKL:
    logprob = torch.tensor([-1.0, -2.0, -30.0])
    ref_logprob = torch.tensor([-2.0, -1.0, -1.0])

    def run(self, kind):
        logprob = self.logprob.clone().requires_grad_()
        penalty = kl_penalty(logprob, self.ref_logprob, kind)
        return penalty.detach(), torch.autograd.grad(penalty.sum(), logprob)[0]

    @pytest.mark.parametrize("names", [["kl", "k1"], ["abs"], ["mse", "k2"], ["low_var_kl", "k3"]])
    def test_kinds_agree_with_verl(self, names):
        for name in names:
            penalty, gradient = self.run(name)
            close(penalty, KL_VALUES[names[-1]])
            close(gradient, KL_GRADIENTS[names[-1]])
            close(self.run(f"{name}+")[0], KL_VALUES[names[-1]])

    def test_kinds_equal_loops(self):
        torch.manual_seed(0)
        pairs = (4 * torch.randn(200, 2, dtype=torch.float64)).tolist()
        logprob, ref_logprob = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
        by_definition = {
            "k1": lambda k: k,
            "abs": abs,
            "k2": lambda k: k * k / 2,
            "k3": lambda k: min(math.exp(-k) + k - 1, 10.0),
        }
        for name, estimate in by_definition.items():
            expected = torch.tensor([estimate(new - ref) for new, ref in pairs], dtype=torch.float64)
            close(kl_penalty(logprob, ref_logprob, name), expected, 1e-12)

    def test_k3_of_a_token_that_the_policy_all_but_excludes_has_no_gradient(self):
        logprob = torch.tensor([-200.0], requires_grad=True)  # e^200 overflows
        penalty = kl_penalty(logprob, torch.zeros(1), "k3")
        penalty.sum().backward()
        assert penalty.item() == 10.0 and logprob.grad.item() == 0.0

    @pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
    def test_a_plus_keeps_the_exact_value_and_takes_the_gradient_of_k2(self, name):
        torch.manual_seed(0)
        logprob, ref_logprob = (3 * torch.randn(50)).requires_grad_(), 3 * torch.randn(50)
        penalty = kl_penalty(logprob, ref_logprob, f"{name}+")
        assert torch.equal(penalty, kl_penalty(logprob, ref_logprob, name))
        (gradient,) = torch.autograd.grad(penalty.sum(), logprob)
        close(gradient, logprob - ref_logprob)

    @pytest.mark.parametrize("name", ["full", "full+", "k4", "", "k1++"])
    def test_other_names_are_refused(self, name):
        with pytest.raises(NotImplementedError, match="kl_penalty"):
            self.run(name)

    def test_the_adaptive_controller_agrees_with_verl(self):
        controller = AdaptiveKLController(0.2, 6, 10000)
        controller.update(9, 256)
        close(controller.value, 0.201024)
        controller.update(6.3, 256)
        assert controller.value == pytest.approx(0.20128131072, abs=1e-12)
        controller.update(0, 10000)
        assert controller.value == pytest.approx(0.8 * 0.20128131072, abs=1e-12)

    def test_the_controller_is_chosen_by_type(self):
        fixed = get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.3, horizon=0, target_kl=0.1))
        fixed.update(100, 100)
        assert isinstance(fixed, FixedKLController) and fixed.value == 0.3
        adaptive = get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.2, horizon=10000, target_kl=6))
        adaptive.update(9, 256)
        assert adaptive.value == pytest.approx(0.201024)

    def test_bad_controller_settings_are_refused(self):
        with pytest.raises(AssertionError, match=r"kl_ctrl\.horizon is 0"):
            get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.2, horizon=0, target_kl=6))
        with pytest.raises(NotImplementedError, match=r"kl_ctrl\.type is 'pid'"):
            get_kl_controller(SimpleNamespace(type="pid"))
