"""Saved rollouts that are learnt from again: by the same loss the same run to the bit, by another that one's steps."""

from collections.abc import Callable
from pathlib import Path

import pytest

import main
from configs.errors import ConfigError
from tests.runs import compose, learning_metrics, short_run, state_files
from workers.group import RolloutRole

REWARD = "def compute_reward(prompt, response, ground_truth):\n    return len(set(response)) % 3 / 2\n"
SAVED = ("trainer.save_freq=1", "trainer.total_training_steps=3")
DYNAMIC = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3")
GPG = ("actor_rollout_ref.actor.policy_loss.loss_mode=gpg", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum")


@pytest.fixture
def train(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """train(name, more…): the folder of a run of this name."""
    (tmp_path / "reward.py").write_text(REWARD)

    def run(name: str, *more: str) -> Path:
        reward = [f"path={tmp_path / 'reward.py'}", "name=compute_reward"]
        settings = ["data.max_response_length=4", "trainer.n_threads=1", "env.val_episodes=0", *SAVED, *more]
        settings += [f"reward.custom_reward_function.{setting}" for setting in reward]
        main.run(compose(*short_run(tiny_model, tmp_path / name, *settings)))
        return tmp_path / name

    return run


@pytest.mark.parametrize("more", [(), DYNAMIC], ids=["as drawn", "dynamic sampling"])
def test_by_the_same_loss_it_is_the_same_run_to_the_bit(train, tmp_path, monkeypatch, more):
    first = train("first", f"trainer.save_rollouts={tmp_path / 'kept'}", *more)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"1.pkl", "2.pkl", "3.pkl"}
    monkeypatch.setattr(RolloutRole, "generate_sequences", None)
    again = train("again", f"trainer.replay_rollouts={tmp_path / 'kept'}", *more)
    metrics = learning_metrics(first)
    assert learning_metrics(again) == metrics and all(metrics[step]["actor/grad_norm"] > 0 for step in metrics)
    for step in (1, 2, 3):
        assert state_files(again, step) == state_files(first, step)


def test_by_another_loss_its_first_step_is_that_of_a_run_of_this_loss(train, tmp_path):
    first = learning_metrics(train("first", f"trainer.save_rollouts={tmp_path / 'kept'}"))
    other = train("other", *GPG, "trainer.total_training_steps=1")
    replayed = train("replayed", *GPG, f"trainer.replay_rollouts={tmp_path / 'kept'}")
    metrics = learning_metrics(replayed)
    assert metrics[1] == learning_metrics(other)[1] and state_files(replayed, 1) == state_files(other, 1)
    for step in (1, 2, 3):  # the rows are those of the first run, and what is learnt from them is not
        scores = [name for name in first[step] if name.startswith(("critic/score", "response_length"))]
        assert scores and all(metrics[step][name] == first[step][name] for name in scores)
        assert metrics[step]["actor/grad_norm"] != first[step]["actor/grad_norm"]
    gaps = [metrics[step]["rollout_mismatch/abs_log_prob_diff"] for step in (1, 2, 3)]
    assert gaps[0] < 1e-5 < gaps[2], "once the weights have moved the rows are those of another policy, as metrics say"


def test_what_cannot_be_replayed_is_refused(train, tmp_path):
    kept = tmp_path / "kept"
    with pytest.raises(ConfigError, match=r"replay_rollouts=.*kept has no 1\.pkl"):
        train("none", f"trainer.replay_rollouts={kept}")
    train("first", f"trainer.save_rollouts={kept}", "trainer.total_training_steps=1")
    with pytest.raises(ConfigError, match="is what is replayed"):
        train("same", f"trainer.save_rollouts={kept}", f"trainer.replay_rollouts={kept}")
    with pytest.raises(ConfigError, match=r"has 1 of 3 steps: set trainer\.total_training_steps=1"):
        train("more", f"trainer.replay_rollouts={kept}")
    ahead = ("actor_rollout_ref.rollout.nnodes=1", "algorithm.rollout_correction.rollout_is=token")
    with pytest.raises(ConfigError, match=r"leave out trainer\.async_mode"):
        train("ahead", f"trainer.replay_rollouts={kept}", "trainer.async_mode=one_step_off", *ahead)
