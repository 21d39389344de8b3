"""The memory of a GPU that a run's models take, by hand: 16 bytes a weight in training, 4 in a frozen model."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from configs.errors import ConfigError
from tests.runs import compose, short_run
from workers.model_worker import GIB, memory_report, model_bytes
from workers.parallel import Replicas

LAYOUTS = dict.fromkeys(("policy", "ref", "rm"), Replicas())


def test_models_in_training_take_weights_gradients_and_moments(tiny_model: Path, tmp_path: Path):
    numbers = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    run = short_run(tiny_model, tmp_path, "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true")
    held = model_bytes(compose(*run), LAYOUTS)
    assert held["actor"] == 16 * numbers and held["ref"] == 4 * numbers and held["critic"] > 15 * numbers


def test_what_does_not_fit_is_refused_by_key(tiny_model: Path, tmp_path: Path):
    config = compose(*short_run(tiny_model, tmp_path, "actor_rollout_ref.rollout.name=vllm"))
    assert "actor 0.0" in memory_report(config, LAYOUTS, 80 * GIB)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.path.*gpu_memory_utilization"):
        memory_report(config, LAYOUTS, 1 << 16)
