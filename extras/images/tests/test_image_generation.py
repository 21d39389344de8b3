"""The hf engine samples from prompts with images by the trainer's own log-probs, and shares what prompts share."""

import pytest
import torch

from configs.schema import ModelConfig, RolloutConfig
from data.pretrained import load_tokenizer
from data.protocol import DataProto, object_array
from data.types import SamplingParams
from extras.images.tests.conftest import MERGED
from extras.images.tests.test_scores import prompts_of
from extras.images.tiny_model import FAMILIES
from workers.hf_rollout import HFRollout, NoCacheBatch
from workers.micro_batches import MicroBatchSize, cut, score_micro_batches
from workers.models import load_causal_lm

SAMPLING = SamplingParams(True, 1.0, -1, 1.0, 12)


def engine_of(folder, kernels: str) -> HFRollout:
    model = load_causal_lm(ModelConfig(path=str(folder), kernels=kernels), longest=80)
    config = RolloutConfig(prompt_length=64, response_length=12)
    return HFRollout(config, load_tokenizer(ModelConfig(path=str(folder))), model)


def answered(engine: HFRollout, prompts, n: int = 4) -> DataProto:
    rows = object_array([ids for ids in prompts for _ in range(n)])
    return engine.generate_sequences(DataProto.from_single_dict({"raw_prompt_ids": rows}), SAMPLING, seed=3)


def check_is_trainers(engine, batch) -> None:
    with torch.no_grad():
        micros = cut(batch, MicroBatchSize(len(batch), 0), [], engine.module)
        scores = score_micro_batches(engine.module, batch, micros, 1.0, ["log_probs"]).log_probs
    assert (scores - batch.batch["rollout_log_probs"]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["off", "auto", "no cache"])
@pytest.mark.parametrize("family", [*FAMILIES, MERGED])
def test_engine_and_trainer_agree(folders, family, kind):
    engine = engine_of(folders[family], "off" if kind == "no cache" else kind)
    if kind == "no cache":
        engine.batch_class = NoCacheBatch
    batch = answered(engine, prompts_of(folders[family]))
    check_is_trainers(engine, batch)
    assert not set(engine.module.vision.pads) & set(batch.batch["responses"].flatten().tolist())
    texts = [tuple(row) for row in batch.batch["responses"].tolist()]
    assert texts[:4] != texts[4:8]  # equal text, and another image


def test_an_image_is_read_once_for_all_answers_to_its_prompt(folders, monkeypatch):
    engine, read = engine_of(folders["qwen2_vl"], "auto"), []
    vision = engine.module.vision
    features = vision.features
    monkeypatch.setattr(vision, "features", lambda images: read.append(len(images)) or features(images))
    batch = answered(engine, prompts_of(folders["qwen2_vl"]), n=8)
    assert sum(read) <= 4  # the images of all prompts, one of which two show; prompts of other lengths are read apart
    read.clear()
    check_is_trainers(engine, batch)
    assert read == [3]


def test_pads_are_never_sampled_nor_do_scores_count_them(folders):
    engine = engine_of(folders["qwen2_vl"], "auto")
    module, pads = engine.module, engine.module.vision.pads
    with torch.no_grad():
        module.get_input_embeddings().weight[pads] *= 50  # tied to the head: it would say nothing else
    batch = answered(engine, prompts_of(folders["qwen2_vl"]))
    assert not set(pads) & set(batch.batch["responses"].flatten().tolist())
    assert not [name for name in module.state_dict() if name.endswith("lm_head.bias")]
