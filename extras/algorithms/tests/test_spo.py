"""The counters of SPO by hand, and that a resumed run has them to the bit; what holds for its estimator is in
tests/test_estimators.py."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import main
from data.protocol import DataProto
from extras.algorithms.estimators import ESTIMATORS
from extras.algorithms.settings import RhoConfig, SPOConfig
from extras.algorithms.spo import SuccessTracker, unpack
from tests.batches import close, padded
from tests.runs import compose, learning_metrics, short_run, state_files
from tests.test_resume import run_until

REWARD = "def compute_reward(prompt, response, ground_truth):\n    return len(set(response)) % 3 / 2\n"


def answered(scores, positions, log_prob=-1.0, failed=()):
    """One answer of 2 tokens each, with these scores; those at places `failed` have no token."""
    lengths = [0 if place in failed else 2 for place in range(len(scores))]
    batch = padded([[5, 6]] * len(scores), [[7, 8][:length] for length in lengths], 3, 4, 0)
    mask = batch.batch["response_mask"].float()
    batch.batch["token_level_scores"] = torch.zeros_like(mask)
    batch.batch["token_level_scores"][:, 0] = torch.tensor(scores, dtype=torch.float32)
    batch.batch["old_log_probs"] = log_prob * mask
    return batch.union(DataProto.from_single_dict({"dataset_position": torch.tensor(positions).numpy()}))


def tracker(bypass_mode=False, **rho):
    """A tracker whose actor finds the log-prob `actor.log_prob` for every token."""

    def compute(batch, columns, temperature):
        actor.asked.append(batch)
        return DataProto.from_dict({"old_log_probs": actor.log_prob * batch.batch["response_mask"].float()})

    actor = SimpleNamespace(log_prob=-1.0, asked=[], compute=compute)
    trainer, rollout = SimpleNamespace(spo=SPOConfig(rho=RhoConfig(**rho))), SimpleNamespace(temperature=1.0)
    algorithm = {"rollout_correction": SimpleNamespace(bypass_mode=bypass_mode)}
    config = SimpleNamespace(trainer=trainer, algorithm=algorithm, actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return SuccessTracker(SimpleNamespace(config=config, actor=actor)), actor


def test_counters_forget_a_constant_share_and_are_read_before_they_count():
    stage, actor = tracker(type="constant", value=0.5)
    batch = answered([1.0, 0.0, 1.0, 0.0], [3, 9, 3, 4], failed=[3])
    stage(batch, {})
    close(batch.batch["tracked_values"], [0.5] * 4)
    # 0.5 · 0.5 + 2 of 2 successes; 0.5 · 0.5 and one failure; row 4 was not answered
    assert stage.state == {"counters": {3: (2.25, 0.25), 9: (0.25, 1.25)}} and not actor.asked
    again = answered([0.0, 1.0], [9, 3])
    metrics = stage(again, {})
    close(again.batch["tracked_values"], [0.25 / 1.5, 2.25 / 2.5])
    assert stage.state["counters"] == {3: (2.125, 0.125), 9: (0.125, 1.625)}
    close(metrics["spo/value"], (0.25 / 1.5 + 0.9) / 2)


def test_counters_forget_by_how_far_the_policy_has_moved_on_the_answer_that_is_kept():
    stage, actor = tracker(clip_lower=0.3)
    metrics = stage(answered([1.0, 1.0], [3, 9]), {})
    assert stage.state["counters"] == {3: (0.96 * 0.5 + 1, 0.48), 9: (0.96 * 0.5 + 1, 0.48)}  # new: nothing has moved
    close([metrics["spo/rho"], metrics["spo/known"]], [0.96, 0])
    actor.log_prob = -1.06  # by 0.06 nats a token: half is forgotten
    metrics = stage(answered([0.0, 0.0], [3, 4], log_prob=-2.0), {})
    close(stage.state["counters"][3], (1.48 / 2, 0.48 / 2 + 1))
    close(metrics["spo/moved"], 0.03)
    assert actor.asked[0].batch["input_ids"].tolist() == [[0, 5, 6, 7, 8, 0, 0]]
    close(unpack([stage.state["answers"][3]], actor.asked[0]).batch["rollout_log_probs"], [[-2, -2, 0, 0]])
    actor.log_prob = -9.0
    stage(answered([0.0], [3]), {})
    close(stage.state["counters"][3], (0.3 * 0.74, 0.3 * 1.24 + 1))


def test_an_engines_rounding_is_no_movement_of_the_policy():
    """The old log-probs of bypass mode are the engine's, here 0.3 nats off; the policy moves by 0.06 once."""
    stage, actor = tracker(bypass_mode=True, clip_lower=0.3)
    for log_prob, moved in ((-1.0, 0.0), (-1.0, 0.0), (-1.06, 0.06), (-1.06, 0.0)):
        actor.log_prob = log_prob
        batch = answered([1.0], [3], log_prob=-1.3)
        close(stage(batch, {})["spo/moved"], moved, 1e-6)
        assert batch.batch["old_log_probs"].tolist() == [[pytest.approx(-1.3)] * 2 + [0, 0]], "the loss's stay"


def test_a_score_that_is_no_share_of_a_success_is_refused():
    with pytest.raises(ValueError, match="a score is -1: let the reward return numbers from 0 to 1"):
        tracker()[0](answered([0.5, -1.0], [0, 1]), {})


def test_advantages_by_hand():
    """Leads 0.5, -0.25 and -0.25: their mean is 0, and their variance 0.1875."""
    rewards = torch.tensor([[0, 1], [0, 0], [0.25, 0], [9, 9]], dtype=torch.float64)
    values = torch.tensor([0.5, 0.25, 0.5, 0.0], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
    found = ESTIMATORS["spo"](token_level_rewards=rewards, tracked_values=values, response_mask=mask)[0]
    high, low = 0.5 / 0.1875**0.5, -0.25 / 0.1875**0.5
    close(found, [[high, high], [low, 0], [low, low], [0, 0]])


def test_max_rl_by_hand():
    """1 of 4 succeed: the success gets (1 - 1/4) / (1/4) = 3; all or none of a group: 0; a lone sample: 0."""
    rewards = torch.tensor([[1.0], [0], [0], [0], [1], [1], [0], [0], [1]], dtype=torch.float64)
    index = ["a"] * 4 + ["b"] * 2 + ["c"] * 2 + ["d"]
    found = ESTIMATORS["max_rl"](rewards, torch.ones(9, 1), index)[0]
    assert found[:, 0].tolist() == [3, -1, -1, -1, 0, 0, 0, 0, 0]


def test_a_resumed_run_has_the_counters_to_the_bit(tiny_model: Path, tmp_path: Path):
    (tmp_path / "reward.py").write_text(REWARD)

    def settings(folder: str) -> list[str]:
        return short_run(
            tiny_model,
            tmp_path / folder,
            *("algorithm.adv_estimator=spo", "actor_rollout_ref.rollout.n=1", "env.train_size=8"),
            *("data.max_response_length=4", "trainer.n_threads=1", "trainer.save_freq=1", "env.val_episodes=0"),
            f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
            "reward.custom_reward_function.name=compute_reward",
        )

    main.run(compose(*settings("unbroken")))
    run_until(3, settings("stopped"))  # rows are answered a second time from this step on
    main.run(compose(*settings("stopped")))
    metrics = learning_metrics(tmp_path / "unbroken")
    assert [metrics[step]["spo/known"] for step in (2, 3, 4)] == [0, 1, 1] and metrics[3]["spo/moved"] > 0
    assert learning_metrics(tmp_path / "stopped") == metrics
    assert state_files(tmp_path / "stopped", 4) == state_files(tmp_path / "unbroken", 4)
    files = [tmp_path / name / "global_step_4/trainer_state.pt" for name in ("stopped", "unbroken")]
    saved = [torch.load(file)["stages"] for file in files]
    assert saved[0] == saved[1] and len(saved[0]["SuccessTracker"]["counters"]) == 8
