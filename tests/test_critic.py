"""The critic's values and update equal their definition, one row at a time, however the batch is cut."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import AGGREGATION_MODES, CriticConfig, ModelConfig, OptimConfig
from data.protocol import DataProto
from tests.batches import (
    CUTS,
    Recorded,
    aggregate,
    policy_tokens,
    ragged_batch,
    recorded,
    relative_distance,
    unpadded,
    update_of,
)
from workers.dp_critic import DataParallelPPOCritic
from workers.engine import TrainEngine
from workers.micro_batches import MicroBatchSize
from workers.models import load_value_model

CONFIG = CriticConfig(
    optim=OptimConfig(lr=1e-3, clip_grad=1e9), loss_agg_mode="token-mean", cliprange_value=0.2, ppo_mini_batch_size=None
)


@pytest.fixture(scope="module")
def value_model(tiny_model: Path) -> PreTrainedModel:
    return load_value_model(ModelConfig(path=str(tiny_model)), seed=0)


def make_critic(
    value_model: PreTrainedModel, config: CriticConfig = CONFIG, size: MicroBatchSize = CUTS["3 rows"]
) -> DataParallelPPOCritic:
    engine = TrainEngine(copy.deepcopy(value_model), config.optim, 10, torch.device("cpu"), torch.float32)
    return DataParallelPPOCritic(config, engine, size)


def update(critic: DataParallelPPOCritic, batch: DataProto) -> Recorded:
    return recorded(critic.engine, lambda: critic.update_critic(batch, update_of(batch, critic.config)))


def values_alone(module: PreTrainedModel, batch: DataProto, row: int) -> Tensor:
    """The value before each response token of one row, without padding."""
    ids, prompt = unpadded(batch, row)
    return module(ids[None]).logits[0, prompt - 1 : -1, 0]


def slow_loss(module: PreTrainedModel, batch: DataProto, config: CriticConfig) -> Tensor:
    """½ max((v − R)², (clip(v, v_old ± ε) − R)²), token by token."""
    losses = []
    for row in range(len(batch)):
        predicted = values_alone(module, batch, row)
        losses.append([])
        for column in policy_tokens(batch, row):
            old, wanted = batch.batch["values"][row, column], batch.batch["returns"][row, column]
            clipped = predicted[column].clamp(old - config.cliprange_value, old + config.cliprange_value)
            losses[-1].append(0.5 * max((predicted[column] - wanted) ** 2, (clipped - wanted) ** 2))
    return aggregate(losses, config.loss_agg_mode, scale=batch.batch["responses"].shape[1])


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_any_cut_gives_the_loss_gradient_and_step_of_the_definition(value_model: PreTrainedModel, mode: str):
    config, batch = replace(CONFIG, loss_agg_mode=mode), ragged_batch()
    twin = copy.deepcopy(value_model)
    loss = slow_loss(twin, batch, config)
    loss.backward()
    wanted = [parameter.grad for parameter in twin.parameters()]
    first_metrics, _, first_weights = update(make_critic(value_model, config, CUTS["all rows"]), batch)
    assert 0 < first_metrics["critic/vf_clipfrac"] < 1
    for name, size in CUTS.items():
        metrics, gradient, weights = update(make_critic(value_model, config, size), batch)
        assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-5), name
        assert relative_distance(gradient, wanted) < 1e-5, name
        assert relative_distance(weights, first_weights) < 1e-6, name
        assert metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS)
def test_values_are_those_before_each_policy_token_and_zero_elsewhere(value_model: PreTrainedModel, size):
    batch = ragged_batch()
    values = make_critic(value_model, size=size).compute_values(batch).values
    wanted = torch.zeros_like(values)
    with torch.no_grad():
        for row in range(len(batch)):
            columns = policy_tokens(batch, row)
            wanted[row, columns] = values_alone(value_model, batch, row)[columns]
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
