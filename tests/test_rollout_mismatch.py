"""The mismatch of an engine's log-probs is measured every step, wherever the trainer's come from, and told if high."""

import math

import pytest
import torch

import main
from configs.schema import ActorConfig, PolicyLossConfig
from data.protocol import DataProto
from tests.batches import CUTS, TEMPERATURE, ragged_batch, update_of
from tests.runs import compose, learning_metrics, short_run
from training.advantage import MAX_MISMATCH_RATIO as MAX_RATIO
from training.advantage import MEAN_MISMATCH as MEAN
from training.advantage import rollout_mismatch
from training.mini_batches import PolicyUpdates
from workers.dp_actor import DataParallelPPOActor
from workers.engine import TrainEngine
from workers.micro_batches import PooledMetrics

K3_KL = "rollout_mismatch/k3_kl"


def floats(metrics: dict) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def test_the_three_numbers_by_hand():
    policy = torch.tensor([[0.5, 0.25, 9.0], [0.1, 0.9, 9.0]]).log()
    engine = torch.tensor([[0.25, 0.5, 1.0], [0.1, 0.9, 1.0]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    found = floats(rollout_mismatch(policy, engine, mask))
    assert found[MEAN] == pytest.approx(2 * math.log(2) / 3)
    assert found[K3_KL] == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 3)
    assert found[MAX_RATIO] == pytest.approx(2)


def test_it_is_nothing_for_equal_log_probs_and_for_no_tokens_and_stays_finite():
    log_probs, mask = torch.randn(3, 4), torch.ones(3, 4)
    nothing = {MEAN: 0.0, K3_KL: 0.0, MAX_RATIO: 1.0}
    assert floats(rollout_mismatch(log_probs, log_probs, mask)) == nothing
    assert floats(rollout_mismatch(log_probs, torch.full((3, 4), torch.nan), 0 * mask)) == nothing
    assert all(map(math.isfinite, floats(rollout_mismatch(log_probs, log_probs - 1000, mask)).values()))


def test_a_mean_of_a_micro_batch_without_tokens_does_not_count():
    metrics = PooledMetrics()
    metrics.add_mean("mean", 2.5, 2)
    metrics.add_mean("mean", math.nan, 0)
    assert metrics.reduce() == {"mean": 2.5}


@pytest.mark.parametrize("loss_mode", ["vanilla", "clip_cov"])
@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS)
def test_the_updates_own_forward_measures_it_whatever_the_cut(policy, size, loss_mode):
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    engine = TrainEngine(policy, config.optim, 10, torch.device("cpu"), torch.float32)
    actor = DataParallelPPOActor(config, engine, size, size)
    batch = ragged_batch()
    own = actor.compute_log_prob(batch, TEMPERATURE, ["old_log_probs"]).old_log_probs
    drift = 0.3 * torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    batch.batch["rollout_log_probs"] = own + drift
    weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
    found = actor.update_policy(batch, update_of(batch, config))
    policy.load_state_dict(weights)
    wanted = floats(rollout_mismatch(own, own + drift, batch.response_mask))
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("scored", "measured"), [(False, [True, False, False]), (True, [False] * 3)])
def test_the_first_mini_batch_measures_it_where_no_log_prob_pass_does(scored, measured):
    config = compose("actor_rollout_ref.actor.ppo_mini_batch_size=1", name="ppo_trainer")
    names = ["loss_mask", "advantages", "rollout_log_probs", *(["old_log_probs"] if scored else [])]
    batch = DataProto.from_single_dict({**{name: torch.ones(3, 2) for name in names}, "uid": ["a", "b", "c"]})
    pairs = PolicyUpdates(config)(batch, step=1)
    assert ["rollout_log_probs" in mini_batch for mini_batch, _ in pairs] == measured
    assert "rollout_log_probs" in batch


MINI = "actor_rollout_ref.actor.ppo_mini_batch_size=2"


@pytest.mark.parametrize("more", [[], [MINI]])
def test_every_step_of_a_run_measures_it_and_the_models_own_rollouts_have_none(tmp_path, tiny_model, more, caplog):
    short = ["data.max_response_length=4", "env.val_episodes=0", "trainer.total_training_steps=2"]
    main.run(compose(*short_run(tiny_model, tmp_path, *short, "actor_rollout_ref.rollout.temperature=0.7", *more)))
    steps = [metrics for step, metrics in learning_metrics(tmp_path).items() if step]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics[MEAN] < 1e-5 and metrics[K3_KL] < 1e-8 and 1 <= metrics[MAX_RATIO] < 1 + 1e-4
    assert "max_rollout_mismatch" not in caplog.text


def test_a_filter_that_only_the_engine_applies_is_said(tmp_path, tiny_model, caplog):
    one_step = "trainer.total_training_steps=1"
    run = short_run(tiny_model, tmp_path, "data.max_response_length=4", "env.val_episodes=0", one_step)
    main.run(compose(*run, "actor_rollout_ref.rollout.top_k=2"))
    [said] = [record.getMessage() for record in caplog.records if "max_rollout_mismatch" in record.getMessage()]
    assert "top_p or top_k" in said
