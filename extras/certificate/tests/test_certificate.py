"""The certificate of a sync, of every engine of tests/test_engine_contract.py that holds weights."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from configs.schema import ModelConfig, OptimConfig
from extras.certificate.certificate import Certificate, gathered_checksums
from extras.lora.lora import Lora, is_lora
from tests import test_engine_contract
from tests.engines import CopyOf
from tests.test_engine_contract import CPU, Bench, change_weights
from workers.engine import TrainEngine

tokenizer, built, bench = test_engine_contract.tokenizer, test_engine_contract.built, test_engine_contract.bench

MATRIX = "model.layers.1.mlp.down_proj.weight"
WITHHELD = {
    "the step": "it holds exactly what it held before, and the actor's have changed",
    "a matrix": r"the numbers that it holds are not these\. Unchanged there: [\w.]*\.1\.mlp\.down_proj\.weight\. ",
}


def held_by(module: PreTrainedModel) -> tuple[torch.dtype, dict[str, int]]:
    return module.dtype, gathered_checksums(module, module.dtype).sums


@pytest.mark.parametrize("withheld", WITHHELD)
def test_a_sync_that_withholds_something_is_caught_at_once(bench: Bench, monkeypatch, withheld: str):
    """A sync withholds a whole step of a learning rate of 1e-6, or one matrix of it; log-probs cannot show that."""
    policy, module = bench.policy, bench.engine.module
    engine = bench.engine if bench.engine.own_weights else CopyOf(bench.engine, copy.deepcopy(module), held=held_by)
    sync = Certificate(engine, policy)
    assert sync.update(100)["rollout/sync_max_logprob_diff"] < 1e-5 and sync.is_comparable
    old = {name: tensor.clone() for name, tensor in policy.weights()}
    change_weights(bench.model, 1e-6)
    new = dict(policy.weights())
    sent = {"the step": old, "a matrix": new | {MATRIX: old[MATRIX]}}[withheld]
    monkeypatch.setattr(policy, "weights", lambda merged: iter(sent.items()))
    with pytest.raises(RuntimeError, match=WITHHELD[withheld]):
        sync.update(101)
    bench.engine.module = module


def test_an_adapter_that_does_not_arrive_is_caught(bench: Bench, monkeypatch):
    """The engine has the frozen weights, where LoRA's matrices should have been added."""
    module = bench.engine.module
    engine = bench.engine if bench.engine.own_weights else CopyOf(bench.engine, copy.deepcopy(module), held=held_by)
    model = copy.deepcopy(bench.model)
    model.adapter = Lora(ModelConfig(lora_rank=4))
    model.adapter.add(model)
    for name, weight in model.named_parameters():
        if is_lora(name):
            torch.nn.init.normal_(weight, std=0.1)
    policy = TrainEngine(model, OptimConfig(), 10, CPU, torch.float32)
    Certificate(engine, policy).update(10)
    frozen = dict(policy.weights(merged=False))
    monkeypatch.setattr(policy, "weights", lambda merged: frozen.items())
    with pytest.raises(RuntimeError, match=r"differ from the trainer's by"):
        Certificate(engine, policy).update(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1e-3 if is_lora(name) else 1)
    with pytest.raises(RuntimeError, match=r"'s: LoRA's matrices were not added to what it was handed"):
        Certificate(engine, policy).update(12)
    bench.engine.module = module
