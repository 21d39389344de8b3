"""LoRA's matrices are merged rightly in layers of all kinds, or refused."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from configs.schema import ModelConfig
from extras.lora.lora import Lora, adapter_weights, is_lora, plain_weights, save_pretrained, without_lora
from tests.batches import CUTS, TEMPERATURE, ragged_batch
from tests.test_families import CLOSE, LONGEST, as_loaded, distance, eager_model, log_probs
from workers.micro_batches import score
from workers.scoring_model import scoring_model


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-2"])
def test_matrices_of_lora_are_merged_wherever_they_are(name: str, tmp_path: Path):
    """Matrices of LoRA are merged, read again and left out in all layers, also in experts that are one tensor, and in
    layers with their weight the other way round."""
    batch, eager = ragged_batch(), eager_model(name)
    adapted, found = as_loaded(eager, Lora(ModelConfig(lora_rank=4))), []
    adapted.adapter.add(adapted)
    for parameter in (parameter for name, parameter in adapted.named_parameters() if is_lora(name)):
        torch.nn.init.normal_(parameter, std=0.1)
    save_pretrained(adapted, dict(adapter_weights(adapted)), tmp_path)
    again = as_loaded(eager, Lora(ModelConfig(lora_adapter_path=str(tmp_path / "lora_adapter"))))
    again.adapter.add(again), again.adapter.start(again)
    for model in (adapted, again):
        scoring_model(model, ModelConfig(), torch.device("cpu"), torch.float32, LONGEST)
        found.append(score(model, batch, CUTS["all rows"], TEMPERATURE).log_probs)
    assert torch.equal(*found) and distance(found[0], log_probs(eager, batch)) > 0.1
    with without_lora(adapted):
        assert distance(score(adapted, batch, CUTS["all rows"], TEMPERATURE).log_probs, log_probs(eager, batch)) < CLOSE
    merged = eager_model(name)
    merged.load_state_dict(dict(plain_weights(adapted)))
    assert distance(found[0], log_probs(merged, batch)) < CLOSE / 10


@pytest.mark.parametrize(
    ("name", "excluded", "said"),
    [
        ("Mixtral, with router noise", None, None),
        ("Jamba", ["dt_proj"], None),
        ("Jamba", None, r"dt_proj of JambaFor.* differ by .*exclude_modules=\[dt_proj\]"),
    ],
)
def test_lora_that_would_be_merged_wrongly_is_refused_by_the_layer(name: str, excluded, said: str | None):
    """Jamba multiplies by the weight of that layer itself. The trial leaves no trace."""
    model = as_loaded(eager_model(name), Lora(ModelConfig(lora_rank=4, exclude_modules=excluded)))
    model.adapter.add(model)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        scoring_model(model, ModelConfig(), torch.device("cpu"), torch.float32, LONGEST)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
