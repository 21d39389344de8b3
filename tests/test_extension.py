"""An estimator and a loss in a file of the user's, named in the config: one from a textbook, one as verl's users do."""

import re
from pathlib import Path

import pytest
import torch

from tests.runs import learning_metrics, run_main, short_run
from training.policy_loss import LossConfig, call_policy_loss

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


ROWS = [torch.full((2, 3), -1.0), torch.full((2, 3), -1.5, requires_grad=True), torch.ones(2, 3), torch.ones(2, 3)]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda ratio: ratio.mean(), r"returned \[\(\)\]; it must return the loss, a tensor of shape \(\)"),
        (lambda ratio: (ratio, {}), r"returned \[\(2, 3\), 'dict'\]"),
        (lambda ratio: (ratio.mean(), 0.5), r"returned \[\(\), 'float'\]"),
        (lambda ratio: (ratio.mean(), 0.5, 0.25), r"returned \[\(\), 'float', 'float'\]"),
        (lambda ratio: (ratio.mean(), {"own/ratio": ratio}), r"metrics of which \['own/ratio'\] are not numbers"),
        (lambda ratio: (ratio.mean(), ratio, 0.1, 0.2), r"metrics of which \['actor/pg_clipfrac'\] are not numbers"),
        (lambda ratio: (ratio.detach().mean(), {}), "a loss that does not depend on the log-probs"),
    ],
)
def test_what_a_loss_gets_wrong_is_named_with_its_file(result, words):
    def mine(old, new, advantages, mask):
        return result((new - old).exp())

    with pytest.raises(ValueError, match=rf"the policy loss .*mine \({re.escape(__file__)}\) returned .*") as caught:
        call_policy_loss(mine, ROWS, "token-mean", LossConfig(), {})
    assert re.search(words, str(caught.value))


def test_a_loss_is_given_what_it_takes_in_every_form():
    given = {}

    def note(old, new, advantages, mask, **rest):
        given.update(rest)
        return new.sum(), {"own/tensor": new.mean(), "own/flag": True}

    def by_place(old, new, advantages, mask, mode, *, config, scale):
        return note(old, new, advantages, mask, by_place=mode, config=config, scale=scale)

    def by_text(old, new, advantages, mask, mode="?", scale=1.0):
        return note(old, new, advantages, mask, by_text=mode, scale=scale)

    def no_mode(old, new, advantages, mask, scale=1.0):
        return note(old, new, advantages, mask, scale=scale)

    config = LossConfig(clip_ratio=0.2)
    for function, wanted in (
        (by_place, {"by_place": "token-sum", "config": config, "scale": 3}),
        (by_text, {"by_text": "token-sum", "scale": 3}),
        (no_mode, {"scale": 3}),
        (note, {"loss_agg_mode": "token-sum", "config": config, "scale": 3}),
    ):
        given.clear()
        _, metrics = call_policy_loss(function, ROWS, "token-sum", config, {"scale": 3})
        assert given == wanted and metrics == {"own/tensor": -1.5, "own/flag": 1.0}
    given.clear()
    call_policy_loss(no_mode, ROWS, "token-sum", config, {})
    assert given == {"scale": 1.0}, "a fifth argument with a number for a default is no mode"
    assert config.get("clip_ratio") == config["clip_ratio"] == 0.2 and config.get("none", 1) == 1
