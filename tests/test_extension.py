"""An estimator and a loss in a file of the user's, named in the config: one from a textbook, one as verl's users do.

That they train, and behind Ray as in this process, shows tests/test_worker_group.py.
"""

import re

import pytest
import torch

import main
from tests.runs import short_run
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


@pytest.mark.usefixtures("restored_registries")
def test_an_unknown_name_lists_what_there_is_and_which_files_were_imported(tiny_model, tmp_path, capsys):
    users_file = tmp_path / "my_algorithm.py"
    users_file.write_text(USERS_FILE)
    names = [f"actor_rollout_ref.model.external_lib={users_file}", "algorithm.adv_estimator=textbook_gea"]
    with pytest.raises(SystemExit) as stop:
        main.main(["--config-name", "frozenlake", *short_run(tiny_model, tmp_path / "run"), *names])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert "'textbook_gae'" in said and "'grpo'" in said and str(users_file) in said


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
