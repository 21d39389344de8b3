"""Loading models: what a folder lacks is said in one line of ours, and in no table of the library's."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from configs.errors import ConfigError
from configs.schema import ModelConfig
from workers.models import WHOLE, _load, load_causal_lm, load_value_model


@pytest.fixture
def said_by_transformers() -> Iterator[list[str]]:
    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said, listener, logger = [], Listener(), logging.getLogger("transformers.modeling_utils")
    logger.addHandler(listener)
    yield said
    logger.removeHandler(listener)


def altered(model: Path, folder: Path, removed: str, added: str) -> Path:
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights[added] = weights.pop(removed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_critics_new_head_is_expected(tiny_model, capsys, said_by_transformers):
    load_value_model(ModelConfig(path=str(tiny_model)), seed=0)
    load_causal_lm(ModelConfig(path=str(tiny_model)))
    assert said_by_transformers == [] and capsys.readouterr().err == ""


def test_weights_that_are_missing_or_have_no_place_are_named(tiny_model, tmp_path, capsys, said_by_transformers):
    folder = altered(tiny_model, tmp_path / "model", "model.norm.weight", "model.extra.weight")
    load_causal_lm(ModelConfig(path=str(folder)))
    missing, unexpected = capsys.readouterr().err.splitlines()
    assert missing == f"notice: {folder} lacks 1 weight of LlamaForCausalLM, at random now: model.norm.weight."
    assert unexpected.endswith("has 1 weight that LlamaForCausalLM has no place for: model.extra.weight.")
    load_value_model(ModelConfig(path=str(folder)), seed=0)
    assert "model.norm.weight" in capsys.readouterr().err, "the critic's body is meant to be there"
    assert said_by_transformers == []


def test_where_loading_fails_the_table_that_the_error_refers_to_is_shown(tiny_model, said_by_transformers):
    with pytest.raises(RuntimeError, match="above report"):
        load_causal_lm(ModelConfig(path=str(tiny_model), override_config={"intermediate_size": 8}))
    assert "MISMATCH" in said_by_transformers[0]


def test_a_model_beside_main_py_is_read_from_every_working_directory(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("configs.paths.ROOT", tiny_model.parent)
    assert load_causal_lm(ModelConfig(path=tiny_model.name)).config.hidden_size


@pytest.mark.parametrize("size", [None, 0, 1000])
def test_weights_that_are_missing_or_cut_short_are_no_traceback(tiny_model, tmp_path, size):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    if size is not None:
        (folder / "model.safetensors").write_bytes(weights[:size])
    with pytest.raises(ConfigError, match=rf"^model.path={folder}: its weights cannot be read"):
        load_causal_lm(ModelConfig(path=str(folder)))


@pytest.mark.parametrize(
    ("asked", "device", "done"), [(None, "cuda", True), (None, "cpu", False), (False, "cuda", False)]
)
def test_activations_are_recomputed_on_a_gpu_unless_it_is_said(tiny_model, asked, device, done):
    settings = ModelConfig(path=str(tiny_model), enable_gradient_checkpointing=asked)
    model = _load(AutoModelForCausalLM, settings, "actor_rollout_ref.model.path", torch.device(device), WHOLE)
    assert model.is_gradient_checkpointing == done
