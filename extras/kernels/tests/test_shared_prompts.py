"""A prompt goes through actor and critic once for all samples that answer it."""

import copy
from pathlib import Path

import pytest
import torch

from configs.schema import ModelConfig
from tests import test_actor as actors
from tests import test_critic as critics
from tests.batches import CUTS, PROMPT_LENGTHS, ragged_batch, relative_distance
from workers.micro_batches import MicroBatchSize
from workers.models import load_causal_lm, load_value_model


def test_samples_of_one_token_share_the_forward_pass_of_their_prompt(tiny_model: Path):
    """…and have the gradient of the definition: prompts 0 and 1 five times each, with answers of their own."""
    policy, batch = load_causal_lm(ModelConfig(path=str(tiny_model))), ragged_batch().select_idxs([0, 1] * 5)
    for name in ("responses", "response_mask", "advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights"):
        batch.batch[name] = batch.batch[name][:, :1].clone()
    width = batch.batch["prompts"].shape[1] + 1
    for name in ("input_ids", "attention_mask", "position_ids"):
        batch.batch[name] = batch.batch[name][:, :width].clone()
    batch.batch["responses"][:, 0] = batch.batch["input_ids"][:, -1] = torch.arange(10, 20)
    batch.batch["advantages"] = torch.linspace(-1, 1, 10)[:, None]
    twin, actor, shapes = copy.deepcopy(policy), actors.make_actor(policy, size=CUTS["all rows"]), []
    actors.slow_loss(twin, batch, actor.config).backward()
    actor.engine.module.base_model.register_forward_pre_hook(
        lambda *call: shapes.append(call[2]["input_ids"].shape), with_kwargs=True
    )
    actor.update_size = MicroBatchSize(10, 0)
    _, gradient, _ = actors.update(actor, batch)
    assert shapes == [(1, PROMPT_LENGTHS[0] + PROMPT_LENGTHS[1])]
    assert relative_distance(gradient, [parameter.grad for parameter in twin.parameters()]) < 1e-5


def test_values_of_one_token_responses_share_the_forward_pass_of_their_prompt(tiny_model: Path):
    value_model = load_value_model(ModelConfig(path=str(tiny_model)), seed=0)
    batch = ragged_batch().select_idxs([1, 6, 1, 1, 6])  # the two rows with responses of one token
    critic, shapes = critics.make_critic(value_model, size=CUTS["all rows"]), []
    critic.engine.module.base_model.register_forward_pre_hook(
        lambda *call: shapes.append(call[2]["input_ids"].shape), with_kwargs=True
    )
    values = critic.compute_values(batch).values
    assert shapes == [(1, PROMPT_LENGTHS[1] + PROMPT_LENGTHS[6])]
    wanted = [critics.values_alone(value_model, batch, row)[0].item() for row in range(5)]
    assert values[:, 0].tolist() == pytest.approx(wanted, rel=1e-5)
