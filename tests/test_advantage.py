"""The driver's part between rollout and update: the KL in the reward, and the estimator the config names."""

import math
from dataclasses import replace

import pytest
import torch

from configs.import_utils import accepts
from configs.schema import AlgorithmConfig, OverlongBufferConfig, RewardKwargsConfig
from data.protocol import DataProto
from tests.runs import compose
from training.advantage import Estimator, estimator_needs, kl_in_reward, overlong_in_reward, token_level_rewards
from training.core_algos import ADV_ESTIMATOR_REGISTRY, AdaptiveKLController, FixedKLController, register_adv_est

MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])  # an observation in row 0; row 2 failed
SCORES = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


def make_batch(**columns) -> DataProto:
    tensors = {"response_mask": MASK, "token_level_scores": SCORES, "token_level_rewards": SCORES}
    return DataProto.from_single_dict({**tensors, "uid": ["a", "a", "b"], **columns})


@pytest.fixture
def estimator():
    """A decorator that registers an estimator as "mine" for one test."""
    yield register_adv_est("mine")
    ADV_ESTIMATOR_REGISTRY.pop("mine", None)


def advantages_of(batch: DataProto, **settings) -> DataProto:
    config = AlgorithmConfig(**{"adv_estimator": "mine", **settings})
    batch.batch.update(Estimator(config)(batch))
    return batch


def test_an_estimator_gets_exactly_what_it_names(estimator):
    given = {}

    @estimator
    def mine(index, token_level_rewards, response_mask, gamma, lam, config, norm_adv_by_std_in_grpo, epsilon=1e-6):
        given.update(locals())
        return token_level_rewards, token_level_rewards

    advantages_of(make_batch(), gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=False)
    assert [*given["index"]] == ["a", "a", "b"] and given["response_mask"] is not None
    assert (given["gamma"], given["lam"], given["norm_adv_by_std_in_grpo"], given["epsilon"]) == (0.9, 0.8, False, 1e-6)
    assert torch.equal(given["token_level_rewards"], SCORES) and given["config"].adv_estimator == "mine"


def test_the_classical_signature_works(estimator):
    """A textbook's GAE, which knows nothing of masks or groups: one step of dones ends each episode."""

    @estimator
    def mine(rewards, values, dones, gamma, gae_lambda):
        advantages = torch.zeros_like(rewards)
        running = torch.zeros(len(rewards))
        for t in reversed(range(rewards.shape[1])):
            following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
            delta = rewards[:, t] + gamma * following * (1 - dones[:, t]) - values[:, t]
            running = delta + gamma * gae_lambda * (1 - dones[:, t]) * running
            advantages[:, t] = running
        return advantages, advantages + values

    values = torch.full((3, 4), 0.5)
    batch = advantages_of(make_batch(values=values), gamma=0.5, lam=1.0)
    # Row 1 is one token long: 0.5 - 0.5. Row 0 by hand, backwards: 1 - .5; .25 - .5 + .5·.5; twice more.
    assert batch.advantages[1, 0] == 0.0
    torch.testing.assert_close(batch.advantages[0], torch.tensor([-0.375, -0.25, 0.0, 0.5]))
    assert torch.equal(batch.returns, batch.advantages + values)


def test_an_estimator_may_ask_for_any_column_and_cannot_spoil_the_scores(estimator):
    @estimator
    def mine(rewards, difficulty):
        rewards *= torch.tensor([*difficulty])[:, None]
        return rewards, rewards

    batch = advantages_of(make_batch(difficulty=[2.0, 4.0, 8.0]))
    assert torch.equal(batch.advantages[:2].sum(1), torch.tensor([2.0, 2.0]))
    assert torch.equal(batch.token_level_scores, batch.token_level_rewards) and batch.token_level_scores[0, 3] == 1.0


def test_a_missing_argument_is_named_with_what_there_is(estimator):
    @estimator
    def mine(rewards, values, oracle, *args, bonus=1, **kwargs):
        raise AssertionError("must not be called")

    with pytest.raises(ValueError, match=r"=mine needs \['oracle', 'values'\].*It has: .*'token_level_rewards'"):
        advantages_of(make_batch())


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (SCORES, r"\[\(3, 4\)\]"),
        ((SCORES.sum(1), SCORES), r"\[\(3,\), \(3, 4\)\]"),
        ((SCORES, None), r"\[\(3, 4\), 'NoneType'\]"),
        ((SCORES, SCORES, {}), r"\[\(3, 4\), \(3, 4\), 'dict'\]"),
        (None, r"\['NoneType'\]"),
    ],
)
def test_anything_but_two_tensors_of_the_right_shape_is_refused(estimator, result, found):
    estimator(lambda rewards: result)
    with pytest.raises(ValueError, match=rf"=mine: .*test_advantage.py\) returned {found}; .*of shape \(3, 4\)"):
        advantages_of(make_batch())


def test_kl_in_the_reward_by_hand():
    old = torch.tensor([[0.0, -1.0, math.nan, -2.0], [-0.5, math.nan, math.nan, math.nan], [math.nan] * 4])
    ref = torch.tensor([[-1.0, -1.0, 0.0, -5.0], [-0.1, 0.0, 0.0, 0.0], [0.0] * 4])
    batch = make_batch(old_log_probs=old, ref_log_prob=ref)
    penalty, metrics = kl_in_reward(batch, FixedKLController(0.1), "kl")
    torch.testing.assert_close(penalty, torch.tensor([[0.1, 0.0, 0.0, 0.3], [-0.04, 0.0, 0.0, 0.0], [0.0] * 4]))
    config = compose("algorithm.use_kl_in_reward=true", name="ppo_trainer")
    rewards, same = token_level_rewards(batch, config, FixedKLController(0.1))
    torch.testing.assert_close(rewards, SCORES - penalty)
    assert same == metrics and torch.equal(batch.token_level_scores, SCORES)
    mean_of_rows = ((1.0 + 0.0 + 3.0) / 3 + (-0.4)) / 2  # the failed row is no measurement
    wanted = {"actor/reward_kl_penalty": mean_of_rows, "actor/reward_kl_penalty_coeff": 0.1}
    assert metrics == pytest.approx(wanted, abs=1e-6)


def test_the_adaptive_coefficient_is_used_first_and_moved_then():
    batch = make_batch(old_log_probs=torch.zeros(3, 4), ref_log_prob=torch.full((3, 4), -1.0))
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.5, horizon=30)
    penalty, metrics = kl_in_reward(batch, controller, "kl")
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.2
    assert penalty[1, 0].item() == pytest.approx(0.2)
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 3 / 30))  # error 1 / 0.5 - 1 is clipped to 0.2; 3 samples


def test_a_batch_of_failures_leaves_the_controller_sane():
    batch = make_batch(old_log_probs=torch.zeros(3, 4), ref_log_prob=torch.ones(3, 4))
    batch.batch["response_mask"] = torch.zeros_like(MASK)
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.5, horizon=30)
    penalty, metrics = kl_in_reward(batch, controller, "kl")
    assert metrics["actor/reward_kl_penalty"] == 0.0 and not penalty.any()
    assert math.isfinite(controller.value)


def test_an_estimator_needs_the_arguments_that_have_no_default(estimator):
    @estimator
    def mine(rewards, values, *rest, lam=1.0, ref_log_prob, epsilon=0.0, **kwargs):
        return rewards, rewards

    assert estimator_needs("mine") == {"rewards", "values", "ref_log_prob"}
    assert accepts(mine, "epsilon") and accepts(mine, "anything") and not accepts(lambda rewards: None, "anything")


def test_a_column_of_the_data_called_like_a_setting_does_not_become_it(estimator):
    columns = {"alpha": [7, 7, 7], "f_norm": torch.full((3,), 9.0), "epsilon": ["?"] * 3}
    for name in {"gpg", "grpo"}.intersection(ADV_ESTIMATOR_REGISTRY):
        plain = advantages_of(make_batch(), adv_estimator=name).advantages
        assert torch.equal(advantages_of(make_batch(**columns), adv_estimator=name).advantages, plain)
    given = {}

    @estimator
    def mine(rewards, alpha, *, level=None, scale=2.0):
        given.update(alpha=[*alpha], level=[*level], scale=scale)
        return rewards, rewards

    advantages_of(make_batch(alpha=[1, 2, 3], level=[4, 5, 6], scale=[0, 0, 0]))
    assert given == {"alpha": [1, 2, 3], "level": [4, 5, 6], "scale": 2.0}


def test_the_configs_kwargs_reach_the_estimator_and_win_over_what_the_run_has(estimator):
    plain = advantages_of(make_batch(), adv_estimator="grpo").advantages
    twice = {"epsilon": SCORES[:2].sum(1).std().item() + 2e-6}  # with the std, twice that and the default of 1e-6
    changed = advantages_of(make_batch(), adv_estimator="grpo", adv_estimator_kwargs=twice)
    assert plain.any()
    torch.testing.assert_close(changed.advantages, plain / 2)
    given = {}

    @estimator
    def mine(rewards, gamma, bonus):
        given.update(gamma=gamma, bonus=bonus)
        return rewards, rewards

    advantages_of(make_batch(), gamma=0.5, adv_estimator_kwargs={"gamma": 0.25, "bonus": {"a": 1}})
    assert given == {"gamma": 0.25, "bonus": {"a": 1}}


def long_batch() -> DataProto:
    """Responses of 10, 9, 8 and 3 tokens, an observation at the end of the first; the last, of 10, failed."""
    lengths, prompt = [10, 9, 8, 3, 10], 2
    attention = torch.tensor([[0, 1] + [1] * length + [0] * (10 - length) for length in lengths])
    mask = attention[:, prompt:].clone()
    mask[0, 8:], mask[4] = 0, 0
    scores = torch.zeros(5, 10)
    scores[range(4), [7, 8, 7, 2]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return DataProto.from_single_dict(
        {"attention_mask": attention, "response_mask": mask, "token_level_scores": scores, "uid": [*"aabbc"]}
    )


def test_the_overlong_penalty_is_taken_off_the_last_policy_token_by_hand():
    """The buffer is a fifth of 10 tokens: a row of 10 loses the whole factor, of 9 a half, of 8 or fewer nothing."""
    batch = long_batch()
    scores = batch.token_level_scores.clone()
    buffer = "reward.reward_kwargs.overlong_buffer_cfg={enable: true, penalty_factor: 0.5}"
    config = compose("data.max_response_length=10", buffer, name="ppo_trainer")
    rewards, metrics = token_level_rewards(batch, config, FixedKLController(0.0))
    expected = scores.clone()
    expected[0, 7] -= 0.5  # observations count as length, and are not paid
    expected[1, 8] -= 0.25
    torch.testing.assert_close(rewards, expected)
    assert torch.equal(batch.token_level_scores, scores)
    of_four = {"reward/overlong_reward/mean": -0.75 / 4, "reward/overlong/mean": 2 / 4}  # that did not fail
    assert metrics == pytest.approx(of_four)


def test_beyond_the_longest_length_the_penalty_goes_on():
    batch = long_batch()
    settings = RewardKwargsConfig(max_resp_len=8, overlong_buffer_cfg=OverlongBufferConfig(enable=True, len=4))
    penalty, _ = overlong_in_reward(batch, settings)
    torch.testing.assert_close(penalty.sum(1), -torch.tensor([1.5, 1.25, 1.0, 0.0, 0.0]))
    penalty, _ = overlong_in_reward(batch, replace(settings, overlong_buffer_cfg=OverlongBufferConfig(enable=True)))
    torch.testing.assert_close(penalty.sum(1), -torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0]))  # a fifth of 8 is 1
