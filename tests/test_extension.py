"""An estimator and a loss in a file of the user's, named in the config: one from a textbook, one as verl's users do."""

from pathlib import Path

import pytest

from tests.runs import learning_metrics, run_main, short_run

USERS_FILE = """
import torch

from training.core_algos import register_adv_est, register_policy_loss


@register_adv_est("textbook_gae")
def textbook_gae(rewards, values, dones, gamma, gae_lambda):
    advantages, running = torch.zeros_like(rewards), 0.0
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        alive = 1 - dones[:, t]
        running = rewards[:, t] + gamma * following * alive - values[:, t] + gamma * gae_lambda * alive * running
        advantages[:, t] = running
    return advantages, advantages + values


@register_policy_loss("plain_ratio")
def plain_ratio(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode, config=None, scale=1.0):
    ratio = (log_probs - old_log_probs).exp()
    tokens = config.global_batch_info["batch_num_tokens"]
    loss = -scale * (advantages * ratio * response_mask).sum() / tokens
    return loss, {"own/ratio": ((ratio * response_mask).sum() / response_mask.sum()).item(), "own/scale": scale}
"""


@pytest.mark.slow
def test_a_users_file_trains_under_both_executors_with_the_same_numbers(tiny_model, tmp_path):
    users_file = tmp_path / "my_algorithm.py"
    users_file.write_text(USERS_FILE)

    def run(executor: str) -> tuple[Path, dict]:
        folder = tmp_path / executor
        done = run_main(
            *short_run(tiny_model, folder, "trainer.save_freq=4"),
            f"actor_rollout_ref.model.external_lib={users_file}",
            "algorithm.adv_estimator=textbook_gae",
            "actor_rollout_ref.actor.policy_loss.loss_mode=plain_ratio",
            "actor_rollout_ref.actor.policy_loss.kwargs={scale: 2.0}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "data.max_response_length=3",
            f"trainer.executor={executor}",
            "trainer.n_threads=1",
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return folder, learning_metrics(folder)

    folder, local = run("local")
    assert local[4]["own/scale"] == 2.0 and local[4]["own/ratio"] != 1.0
    assert {"own/ratio", "critic/vf_loss", "actor/grad_norm"} <= local[4].keys()  # it asked for values: so a critic
    assert local == run("ray")[1]
    assert (folder / "global_step_4/critic").is_dir()


def test_an_unknown_name_lists_what_there_is_and_which_files_were_imported(tiny_model, tmp_path):
    users_file = tmp_path / "my_algorithm.py"
    users_file.write_text(USERS_FILE)
    done = run_main(
        *short_run(tiny_model, tmp_path / "run"),
        f"actor_rollout_ref.model.external_lib={users_file}",
        "algorithm.adv_estimator=textbook_gea",
    )
    assert done.returncode == 2
    assert "'textbook_gae'" in done.stderr and "'grpo'" in done.stderr and str(users_file) in done.stderr
