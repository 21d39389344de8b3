"""A checkpoint's shards, ours and verl's, become a folder for from_pretrained, or are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.schema import ModelConfig, OptimConfig
from extras.merge.__main__ import main as merge
from extras.merge.__main__ import merge as merge_folder
from extras.sharding.fsdp2 import full_tensor
from extras.sharding.tests.test_model_checkpoint import CPU, EVERYTHING, make_engine, saved_engine, train
from tests.ranks import Ranks
from workers.collectives import group_size, rank
from workers.engine import TrainEngine
from workers.models import load_causal_lm


def save_as_verl(model: Path, folder: Path) -> dict[str, Tensor]:
    """Writes what verl's FSDPCheckpointManager writes of a model under FSDP2: each rank its state dicts of DTensors."""
    engine, place, size = make_engine(model), rank(), group_size()
    train(engine, 0)
    folder.mkdir(exist_ok=True)
    extra = {"lr_scheduler": {"last_epoch": 1, "_last_lr": [0.01]}, "rng": {"cpu": torch.get_rng_state()}}
    parts = {"model": engine.module.state_dict(), "optim": engine.optimizer.state_dict(), "extra_state": extra}
    for name, part in parts.items():
        torch.save(part, folder / f"{name}_world_size_{size}_rank_{place}.pt")
    if place == 0:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": size}))
        engine.module.config.save_pretrained(folder / "huggingface")
    return {name: full_tensor(value).clone() for name, value in engine.module.state_dict().items()}


def test_verls_fsdp_folder_is_merged(tiny_model, tmp_path):
    wanted = Ranks(2).run(save_as_verl, tiny_model, tmp_path / "actor")[0]
    merge(f"merge --backend fsdp --local_dir {tmp_path}/actor --target_dir {tmp_path}/merged".split())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.state_dict().items())
    (tmp_path / "actor/model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ValueError, match=r"model_world_size_2_rank_1.pt cannot be loaded \(FileNotFoundError"):
        merge_folder(tmp_path / "actor", tmp_path / "again")


def test_our_shards_are_merged_to_the_bit(tiny_model, tmp_path):
    state, _ = saved_engine(tiny_model, tmp_path / "saved", (-1, 1), False)
    merge(f"merge --backend fsdp --local_dir {tmp_path}/saved --target_dir {tmp_path}/merged".split())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


def test_matrices_of_lora_are_not_merged_without_the_weights(tiny_model, tmp_path, capsys):
    module = load_causal_lm(ModelConfig(path=str(tiny_model), lora_rank=2))
    TrainEngine(module, OptimConfig(lr=0.01), 10, CPU, torch.float32).save(tmp_path, EVERYTHING)
    with pytest.raises(SystemExit):
        merge(f"merge --backend fsdp --local_dir {tmp_path} --target_dir {tmp_path}/merged".split())
    assert "holds LoRA's matrices alone" in capsys.readouterr().err


def test_merging_refuses_what_it_cannot_merge(tiny_model, tmp_path, capsys):
    saved_engine(tiny_model, saved := tmp_path / "saved", (-1, 1), False)

    def refusal(local_dir: Path, target_dir: Path, backend: str = "fsdp") -> str:
        with pytest.raises(SystemExit) as stop:
            merge(["merge", "--backend", backend, "--local_dir", str(local_dir), "--target_dir", str(target_dir)])
        assert stop.value.code == 2
        return capsys.readouterr().err

    target = tmp_path / "target"
    assert "--backend megatron" in refusal(saved, target, "megatron")
    assert f"--local_dir {tmp_path} lacks huggingface/config.json" in refusal(tmp_path, target)
    assert "holds weights already" in refusal(saved, tiny_model)
    (saved / "huggingface/config.json").unlink()
    assert "lacks huggingface/config.json" in refusal(saved, target)
    assert not target.exists()
