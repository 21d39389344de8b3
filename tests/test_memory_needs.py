"""The memory of a GPU that a run's models take, by hand: 16 bytes a weight in training, 4 in a frozen model."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from configs.errors import ConfigError
from tests.runs import compose, short_run
from workers.model_worker import memory_report, model_bytes
from workers.parallel import Replicas

LAYOUTS, GIB = dict.fromkeys(("policy", "ref", "rm"), Replicas()), 1 << 30


def test_models_in_training_take_weights_gradients_and_moments(tiny_model: Path, tmp_path: Path):
    numbers = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    run = short_run(tiny_model, tmp_path, "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true")
    held = model_bytes(compose(*run), LAYOUTS)
    assert held["actor"] == 16 * numbers and held["ref"] == 4 * numbers and held["critic"] > 15 * numbers


@pytest.mark.parametrize(
    ("settings", "free", "message"),
    [
        ("name=vllm", 79, None),
        ("name=hf", 30, None),
        ("name=vllm", 30, r"beside the 40\.0 of rollout\.gpu_memory_utilization=0\.5, and 30\.0 of the GPU's 80\.0 are "
         r"free\. Take rollout\.gpu_memory_utilization=0\.37, more GPUs"),  # 30 / 80 is 0.375
        ("name=vllm", 2, r"and 2\.0 of the GPU's 80\.0 are free\. Take more GPUs"),  # no room for vLLM's own weights
        ("name=vllm ++R.engine_kwargs.vllm.gpu_memory_utilization=0.3", 30, None),
        ("name=vllm ++R.engine_kwargs.vllm.gpu_memory_utilization=0.9", 60, r"72\.0 of .*=0\.9, .* Take .*=0\.74, "),
        ("name=hf", 0, r"GiB, and 0\.0 of the GPU's 80\.0 are free\. Take more GPUs"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_key(settings, free, message, tiny_model: Path, tmp_path: Path):
    """vLLM starts where its share of the whole card is free: what others, and the models, have of it, is not."""
    rollout = [word.replace("R.", "actor_rollout_ref.rollout.") for word in f"R.{settings}".split()]
    config = compose(*short_run(tiny_model, tmp_path, *rollout))
    if message is None:
        assert "actor 0.0" in memory_report(config, LAYOUTS, free * GIB, 80 * GIB)
        return
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.model\.path: models take actor 0\.0.*" + message):
        memory_report(config, LAYOUTS, free * GIB, 80 * GIB)
