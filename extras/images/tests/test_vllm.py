"""vLLM reads the images of Idefics3 as the trainer does: the same tokens, and the same log-probs after every sync."""

import torch

from configs.schema import ModelConfig, OptimConfig, RolloutConfig
from data.pretrained import load_tokenizer
from extras.images.tests.test_image_generation import answered, check_is_trainers
from extras.images.tests.test_scores import prompts_of
from tests.runs import needs_vllm
from workers.engine import TrainEngine
from workers.models import load_causal_lm
from workers.vllm_rollout_spmd import vLLMRollout

pytestmark = needs_vllm


def test_vllm_and_trainer_agree_before_and_after_the_weights_change(folders):
    folder = folders["idefics3"]
    model = load_causal_lm(ModelConfig(path=str(folder)), longest=80)
    policy = TrainEngine(model, OptimConfig(), 10, torch.device("cpu"), torch.float32)
    config = RolloutConfig(name="vllm", prompt_length=64, response_length=12, max_num_seqs=16)
    engine = vLLMRollout(config, load_tokenizer(ModelConfig(path=str(folder))), model)
    prompts = prompts_of(folder)
    try:
        for version in (0, 1):
            engine.load_weights(policy.weights(), version)
            batch = answered(engine, prompts)
            check_is_trainers(engine, batch)
            assert not set(model.vision.pads) & set(batch.batch["responses"].flatten().tolist())
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.1)
    finally:
        engine.close()
