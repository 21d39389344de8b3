"""The registries, aggregation and KL; extras/verl/tests holds them against verl's own."""

import math

import numpy as np
import pytest
import torch

from configs.extras import present
from configs.schema import AGGREGATION_MODES
from tests.batches import close
from tests.runs import needs_algorithms
from training import core_algos
from training.core_algos import agg_loss, estimate_advantages, get_adv_estimator_fn, kl_penalty
from training.core_algos import compute_grpo_outcome_advantage as grpo

NAN = math.nan


def ragged(seed, columns):
    """Random masks with holes and an empty row, [B, R], and float64 columns that are NaN under the mask."""
    torch.manual_seed(seed)
    rows, width = 4 + seed % 5, 2 + seed % 4
    mask = (torch.rand(rows, width) < 0.6).long()
    mask[seed % rows] = 0
    mask[(seed + 1) % rows, :2] = 1
    return mask, *torch.randn(columns, rows, width).double().masked_fill(mask == 0, NAN)


@pytest.mark.usefixtures("restored_registries")
class TestRegistries:
    def test_a_registered_estimator_comes_back_unchanged_and_may_be_registered_twice(self):
        def mine(token_level_rewards, **kwargs):
            return token_level_rewards, token_level_rewards

        assert core_algos.register_adv_est("mine")(mine) is mine
        assert core_algos.register_adv_est("mine")(mine) is mine
        assert get_adv_estimator_fn("mine") is mine

    def test_a_second_function_under_a_taken_name_is_refused_and_the_first_stays(self):
        with pytest.raises(ValueError, match=r"'grpo' has already been registered, by module training\.core_algos"):
            core_algos.register_adv_est(core_algos.AdvantageEstimator.GRPO)(lambda **kwargs: None)
        assert get_adv_estimator_fn("grpo") is grpo

    @needs_algorithms
    def test_a_name_of_the_table_is_found_as_if_registered(self):
        assert "rloo" in core_algos.ADV_ESTIMATOR_REGISTRY and "rloo" not in core_algos.ADV_ESTIMATOR_REGISTRY.data
        rloo = get_adv_estimator_fn("rloo")
        with pytest.raises(ValueError, match="'rloo' has already been registered, by module extras"):
            core_algos.register_adv_est("rloo")(lambda **kwargs: None)
        assert (
            get_adv_estimator_fn(core_algos.AdvantageEstimator.RLOO)
            is rloo
            is core_algos.ADV_ESTIMATOR_REGISTRY["rloo"]
        )
        mine = core_algos.register_policy_loss("gspo")(print)
        assert {**core_algos.POLICY_LOSS_REGISTRY}["gspo"].function is mine  # whatever else is loaded

    def test_a_policy_loss_may_be_replaced(self):
        assert core_algos.get_policy_loss_fn("vanilla") is core_algos.compute_policy_loss_vanilla

        @core_algos.register_policy_loss("vanilla")
        def mine(*args):
            return args

        assert core_algos.get_policy_loss_fn("vanilla") is mine

    def test_an_unknown_policy_loss_lists_the_known_ones(self):
        core_algos.register_policy_loss("mine")(print)
        with pytest.raises(ValueError) as error:
            core_algos.get_policy_loss_fn("vanila")
        supported = list(core_algos.POLICY_LOSS_REGISTRY)
        assert supported[0] == "vanilla" and "mine" in supported and {*present("policy_loss")} < {*supported}
        assert str(error.value) == f"Unsupported loss mode: vanila. Supported modes are: {supported}"


@pytest.mark.parametrize(
    "index",
    [
        [7, "b", 7, (1, 2), "b"],
        np.array(["x", "y", "x", "z", "y"], dtype=object),
        np.array([5, -1, 5, 2, -1]),
        torch.tensor([5, -1, 5, 2, -1]),
    ],
)
def test_rows_are_grouped_by_equality_of_any_labels_in_any_order(index):
    scores = torch.tensor([[1.0], [4.0], [2.0], [9.0], [8.0]])
    advantages, _ = grpo(scores, torch.ones(5, 1), index, norm_adv_by_std_in_grpo=False)
    close(advantages[:, 0], [-0.5, -2.0, 0.5, 9.0, 2.0])


COUNTS = {"dp_size": 3, "batch_num_tokens": 37, "global_batch_size": 11, "loss_scale_factor": 4.0}


def token_weights(mask, mode, *, dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None):
    """Returns what `agg_loss` weighs each token's loss by, token by token; float64 [B, R]."""
    lengths = [sum(row) for row in mask.tolist()]
    tokens = batch_num_tokens or sum(lengths)
    rows = global_batch_size or sum(length > 0 for length in lengths)
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    for row, t in mask.nonzero().tolist():
        weights[row, t] = {
            "token-mean": 1 / tokens,
            "token-sum": 1,
            "seq-mean-token-sum": 1 / rows,
            "seq-mean-token-mean": 1 / lengths[row] / rows,
            "seq-mean-token-sum-norm": 1 / rows / (loss_scale_factor or mask.shape[1]),
        }[mode]
    return dp_size * weights


class TestAggLoss:
    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("counts", [{}, COUNTS], ids=["own counts", "global counts"])
    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_equals_a_loop_over_tokens(self, mode, counts, seed):
        """The aggregate is linear: with counts of the whole, any cut into micro-batches and ranks adds up to it."""
        mask, loss = ragged(seed, columns=1)
        loss.requires_grad_()
        weights = token_weights(mask, mode, **counts)
        value = agg_loss(loss, mask, mode, **counts)
        value.backward()
        close(value, sum(weights[place] * loss[place] for place in map(tuple, mask.nonzero().tolist())), 1e-7)
        close(loss.grad, weights, 1e-7)

    @pytest.mark.parametrize("counts", [{}, {"batch_num_tokens": 0, "global_batch_size": 0}])
    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_an_empty_mask_gives_zero_and_no_gradient(self, mode, counts):
        loss = torch.full((2, 3), NAN, requires_grad=True)
        value = agg_loss(loss, torch.zeros(2, 3), mode, **counts)
        value.backward()
        assert value == 0 and not loss.grad.any()

    @pytest.mark.parametrize("mode", [mode for mode in AGGREGATION_MODES if mode != "token-sum"])
    def test_several_ranks_need_the_global_count(self, mode):
        missing = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
        with pytest.raises(ValueError, match=f"dp_size is 2 but {missing} is None"):
            agg_loss(torch.ones(2, 3), torch.ones(2, 3), mode, dp_size=2)

    def test_an_unknown_mode_lists_the_known_ones(self):
        with pytest.raises(ValueError, match=r"^Invalid loss_agg_mode: mean\. .*token-mean, .*token-sum$"):
            agg_loss(torch.ones(2, 3), torch.ones(2, 3), "mean")


@pytest.mark.parametrize("name", ["full", "full+", "k4", "", "k1++"])
def test_other_kls_are_refused(name):
    with pytest.raises(NotImplementedError, match="kl_penalty"):
        kl_penalty(torch.zeros(1), torch.zeros(1), name)


def test_k3_of_a_token_that_the_policy_all_but_excludes_has_no_gradient():
    logprob = torch.tensor([-200.0], requires_grad=True)  # e^200 overflows
    penalty = kl_penalty(logprob, torch.zeros(1), "k3")
    penalty.sum().backward()
    assert penalty.item() == 10.0 and logprob.grad.item() == 0.0


class TestByHand:
    mask = torch.ones(1, 2)

    @pytest.mark.parametrize(
        ("settings", "wanted"),
        [
            ({}, (-1.2 - 0.5) / 2),  # the clip holds the first back; the second may fall
            ({"clip_ratio": 0.4}, (-1.4 - 0.5) / 2),
            ({"clip_ratio_high": 0.6, "loss_agg_mode": "token-sum"}, -1.5 - 0.5),
        ],
    )
    def test_ppos_loss(self, settings, wanted):
        log_probs = torch.tensor([[1.5, 0.5]]).log()
        loss, metrics = core_algos.compute_ppo_loss(0 * self.mask, log_probs, self.mask, self.mask, **settings)
        close(loss, wanted)
        close(metrics["actor/ppo_kl"], -math.log(0.75) / 2)

    def test_advantages_of_rewards_for_tokens_or_responses(self):
        values = torch.tensor([[0.5, 0.25]])  # TD errors 0.5 · 0.25 - 0.5 and 1 - 0.25
        for rewards in (torch.tensor([[0.0, 1.0]]), torch.tensor([1.0])):
            advantages, returns = estimate_advantages(rewards, values, self.mask, gamma=0.5, lam=0.5)
            close(returns, [[0.5 - 0.375 + 0.25 * 0.75, 1.0]])
            close(advantages, [[-math.sqrt(0.5), math.sqrt(0.5)]])
        needs = {"adv_estimator": "grpo", "index": ["a", "b", "a", "b"], "norm_adv_by_std_in_grpo": False}
        close(estimate_advantages(torch.tensor([1.0, 3.0, 0.0, 3.0]), **needs)[0], [[0.5], [0], [-0.5], [0]])
        for arguments, words in ({}, "=gae: .*'values'"), (needs | {"idx": []}, "=grpo: .*'idx'"):
            with pytest.raises(ValueError, match=words):
                estimate_advantages(self.mask, **arguments)

    @pytest.mark.usefixtures("restored_registries")
    def test_a_registered_estimator_is_given_what_it_names(self):
        core_algos.register_adv_est("mine")(
            lambda rewards, dones, gae_lambda, bonus: (gae_lambda * rewards + bonus, dones)
        )
        pair = estimate_advantages(torch.ones(1), None, self.mask, lam=0.5, adv_estimator="mine", bonus=2)
        assert [part.tolist() for part in pair] == [[[2.0, 2.5]], [[0.0, 1.0]]]

    @pytest.mark.parametrize(
        ("kind", "wanted"), [({}, [1.0, -1.0, -29.0]), ({"kind": "k3"}, [0.367879, 0.718282, 10.0])]
    )
    def test_the_kl_of_tokens(self, kind, wanted):
        policy, reference = torch.tensor([-1.0, -2.0, -30.0]), torch.tensor([-2.0, -1.0, -1.0])
        close(core_algos.compute_kl_penalty(policy, reference, **kind), wanted)
