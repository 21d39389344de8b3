"""Scores of rows with images are those of transformers' own forward of each row alone, however they are cut."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import DataConfig, ModelConfig
from data.padding import PromptIds, collate
from data.pretrained import load_tokenizer
from data.protocol import DataProto
from data.rl_dataset import RLHFDataset
from data.types import Sample
from extras.images.tests.conftest import MERGED, ROWS
from extras.images.tiny_model import FAMILIES
from workers.micro_batches import MicroBatchSize, cut, score_micro_batches
from workers.models import load_causal_lm

ANSWERS = ([5, 6, 7, 1], [8, 1])  # two samples of each prompt


def prompts_of(folder: Path, rows: list[dict[str, Any]] = ROWS) -> list[PromptIds]:
    dataset = RLHFDataset(None, load_tokenizer(ModelConfig(path=str(folder))), DataConfig(max_prompt_length=200))
    return [dataset.make_row(row, number)["raw_prompt_ids"] for number, row in enumerate(rows)]


def rollouts(prompts: list[PromptIds]) -> DataProto:
    samples = [Sample(ids) for ids in prompts for _ in ANSWERS]
    for number, sample in enumerate(samples):
        answer = ANSWERS[number % 2]
        sample.extend(answer, [0.0] * len(answer), True)
    return collate(samples, 64, 5, 0)


def references(model: Any, prompts: list[PromptIds], family: str) -> torch.Tensor:
    """Log-probs by transformers' forward of each row alone, with pixels, ids and no positions."""
    scores = torch.zeros(len(prompts) * len(ANSWERS), 5)
    for number, ids in enumerate(ids for ids in prompts for _ in ANSWERS):
        answer, inputs = ANSWERS[number % 2], {}
        whole = torch.tensor([[*ids, *answer]])
        if ids.media:
            names = ids.media.images[0].tensors
            inputs = {
                name: torch.cat(
                    [image.tensors[name] for image in ids.media.images],
                    int("attention" in name or (name == "pixel_values" and family == "idefics3")),
                )
                for name in names
            }
        if ids.media and family != "idefics3":
            inputs["mm_token_type_ids"] = (whole == model.config.image_token_id).int()
        logits = model(input_ids=whole, attention_mask=torch.ones_like(whole), **inputs).logits[0, len(ids) - 1 : -1]
        scores[number, : len(answer)] = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
    return scores


@pytest.mark.parametrize("kernels", ["off", "auto"])
@pytest.mark.parametrize("family", [*FAMILIES, MERGED])
def test_scores_are_those_of_each_row_alone(folders, family, kernels):
    model = load_causal_lm(ModelConfig(path=str(folders[family]), kernels=kernels), longest=80)
    assert model.shares_prompts == (kernels == "auto")
    prompts = prompts_of(folders[family])
    batch = rollouts(prompts)
    with torch.no_grad():
        expected = references(model, prompts, family)
        for rows in (1, 2, 3, 8):
            micros = cut(batch, MicroBatchSize(rows, 0), [], model)
            scores = score_micro_batches(model, batch, micros, 1.0, ["log_probs"]).log_probs
            assert (scores - expected).abs().max() < 1e-5
