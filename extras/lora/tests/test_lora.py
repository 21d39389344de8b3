"""LoRA in reinforcement learning: what is trained, the reference, what engines and checkpoints get."""

import json
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import main
from configs.errors import ConfigError
from configs.schema import ModelConfig, OptimConfig, RolloutConfig
from extras.lora.lora import adapter_weights, save_pretrained
from extras.lora.settings import check_settings
from extras.server.settings import ServerConfig, check_server
from tests.batches import ragged_batch
from tests.runs import compose, learning_metrics, short_run
from training.checkpoint import CONFIG_FILE, LATEST, checkpoint_to_resume, config_yaml
from workers.dp_actor import ReferencePolicy
from workers.engine import TrainEngine
from workers.micro_batches import MicroBatchSize, score
from workers.models import load_causal_lm

CPU, SIZE = torch.device("cpu"), MicroBatchSize(None, 64)
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
LORA = (f"{MODEL}.lora_rank=2", f"{MODEL}.lora_alpha=4")
RATE = tuple(f"{ACTOR}.optim.{one}" for one in ("lr=1e-2", "lr_warmup_steps=0", "lr_scheduler_type=constant"))
SIGNAL = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.entropy_coeff=0.1")  # whatever the rewards


def load(folder: Path, dtype: torch.dtype = torch.float32, **settings) -> PreTrainedModel:
    return load_causal_lm(ModelConfig(path=str(folder), **settings), CPU, dtype)


def adapted(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose adapter has an effect."""
    torch.manual_seed(0)
    module = load(folder, dtype, lora_rank=4)
    for name, weight in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    return module


def log_probs(module: PreTrainedModel) -> torch.Tensor:
    return score(module, ragged_batch(), SIZE, 1.0).log_probs


def test_a_run_trains_the_adapter_alone_from_no_kl_and_goes_on_after_a_stop(tiny_model, tmp_path, capfd):
    """The reference is the actor without its adapter, so the first step's KL is 0 to the last bit."""
    run = ("trainer.save_freq=2", *LORA, *RATE, *SIGNAL)
    main.run(compose(*short_run(tiny_model, tmp_path / "whole", *run)))
    [numbers] = re.findall(r"LoRA: (.*) parameters are trained.", capfd.readouterr().out)
    metrics = learning_metrics(tmp_path / "whole")
    assert metrics[1]["actor/kl_loss"] == 0 and metrics[3]["actor/kl_loss"] > 0
    assert all(metrics[step]["rollout_mismatch/abs_log_prob_diff"] < 1e-5 for step in (1, 2, 3, 4))
    main.run(compose(*short_run(tiny_model, tmp_path / "parts", *run, "trainer.total_training_steps=2")))
    main.run(compose(*short_run(tiny_model, tmp_path / "parts", *run)))
    assert learning_metrics(tmp_path / "parts") == metrics

    folder = tmp_path / "whole/global_step_4/actor"
    settings = json.loads((folder / "lora_adapter/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["inference_mode"]) == (str(tiny_model.resolve()), True)
    modes = {path.name: path.stat().st_mode for path in folder.rglob("*.*")}
    assert modes["model.safetensors"] == modes["adapter_model.safetensors"] == modes["config.json"]
    again = load(tiny_model, lora_adapter_path=str(folder / "lora_adapter"))
    count = sum(weight.numel() for weight in again.parameters() if weight.requires_grad)
    assert numbers == f"{count:,} of {again.num_parameters():,}" and count < again.num_parameters() / 4
    merged = AutoModelForCausalLM.from_pretrained(folder / "huggingface")
    torch.testing.assert_close(log_probs(again), log_probs(load(folder / "huggingface")), atol=1e-5, rtol=0)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), folder / "lora_adapter")
    ids = torch.arange(12).unsqueeze(0)
    torch.testing.assert_close(plain(ids).logits, merged(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("then", "now"),
    [("lora_rank=4", "lora_rank=8"), ("lora_rank=4", "lora_rank=0"), ("lora_rank=0", "lora_rank=4")]
    + [("exclude_modules=null", "exclude_modules=[q_proj]"), ("lora_adapter_path=there", "lora_adapter_path=null")],
)
def test_a_run_goes_on_with_the_matrices_that_it_has_saved_or_is_refused_by_the_key(tmp_path, then, now):
    saved, resumed = (compose(*short_run(tmp_path, tmp_path, *LORA, f"{MODEL}.{one}")) for one in (then, now))
    (tmp_path / LATEST).write_text("1")
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_1" / CONFIG_FILE).write_text(config_yaml(saved))
    assert checkpoint_to_resume(saved)
    with pytest.raises(ConfigError, match=r"trainer\.resume_mode=disable") as refused:
        checkpoint_to_resume(resumed)
    assert refused.value.key == f"{MODEL}.{now.partition('=')[0]}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_base_model_to_the_last_bit_and_the_adapter_is_back_behind_it(tiny_model, dtype):
    module, base = adapted(tiny_model, dtype), load(tiny_model, dtype)
    engine = TrainEngine(module, OptimConfig(lr=1e-2), 10, CPU, dtype)
    reference = ReferencePolicy(module, SIZE, engine.autocast, engine.on_device_without_adapter)
    with engine.autocast():
        before, wanted = log_probs(module), log_probs(base)
    found = reference.compute_log_prob(ragged_batch(), 1.0, ["ref_log_prob"]).batch["ref_log_prob"]
    assert torch.equal(found, wanted) and not torch.allclose(before, wanted, atol=0.1)
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in module.named_parameters() if ".lora_" in name}
    assert len(trained) == sum(len(group["params"]) for group in engine.optimizer.param_groups)
    with engine.autocast():
        assert torch.equal(log_probs(module), before)


def test_an_engine_is_handed_one_merged_weight_at_a_time(tiny_model):
    """A GPU holds no second model while an engine takes up weights: each is merged after the one before is dropped."""
    engine, handed = TrainEngine(adapted(tiny_model, torch.float32), OptimConfig(), 10, CPU, torch.float32), []
    for _, weight in engine.weights():
        handed.append(weakref.ref(weight))
        del weight
        assert sum(one() is not None for one in handed) <= 1
    assert len(handed) > 10


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": ["q_proj", "nowhere"]}, r"target_modules=\['q_proj', 'nowhere'\].*no nowhere.*all-linear"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, r"without model.exclude_modules=\['q_proj'\]"),
        ({"target_modules": ["lm_head"]}, "its embedding is its head, and LoRA beside lm_head would part them"),
        ({"lora_adapter_path": "saved", "lora_rank": 3}, "saved is of rank 4, and model.lora_rank=3: set it to 4"),
        ({"lora_adapter_path": "dora"}, "dora was made with use_dora: merge it into the model"),
        ({"lora_adapter_path": "other"}, r"other does not fit LlamaForCausalLM: only one of the two has model\.layers"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_its_key(tiny_model, tmp_path, monkeypatch, settings, said):
    monkeypatch.chdir(tmp_path)
    model = load(tiny_model, lora_rank=4)
    save_pretrained(model, dict(adapter_weights(model)), tmp_path)
    for name, change in (("saved", {}), ("dora", {"use_dora": True}), ("other", {"target_modules": ["q_proj"]})):
        file = shutil.copytree(tmp_path / "lora_adapter", tmp_path / name) / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=f"^model.*{said}"):
        load(tiny_model, **{"lora_rank": 0 if "lora_adapter_path" in settings else 4, **settings})


def test_transformers_that_refuses_peft_is_said_as_that(tiny_model, monkeypatch):
    monkeypatch.setattr("extras.lora.lora.MIN_PEFT_VERSION", "99.0")
    with pytest.raises(ConfigError, match=r"^model\.lora_rank: transformers \S+ refuses PEFT .*99\.0.*constraints"):
        load(tiny_model, lora_rank=4)


def test_layers_may_be_left_out_of_all_linear(tiny_model):
    module = load(tiny_model, lora_rank=4, exclude_modules=["q_proj", "down_proj"])
    layers = {name.split(".")[-4] for name, _ in module.named_parameters() if ".lora_A." in name}
    assert layers == {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["actor_rollout_ref.rollout.load_lora=adapter", *LORA], "rollout.load_lora=adapter.*name=hf"),
        (["actor_rollout_ref.rollout.load_lora=adapter", "actor_rollout_ref.rollout.name=vllm"], "lora_rank=0"),
    ],
)
def test_an_adapter_is_sent_alone_to_an_engine_that_adds_it(tiny_model, tmp_path, command, said):
    with pytest.raises(ConfigError, match=said):
        compose(*short_run(tiny_model, tmp_path, *command))


def test_a_server_takes_an_adapter_that_is_there_and_no_rank(tmp_path):
    with pytest.raises(ValueError, match=r"^model.lora_adapter_path=.*no adapter_config.json"):
        check_settings(ModelConfig(lora_adapter_path=str(tmp_path)), "model")
    model = ModelConfig(lora_rank=4)
    with pytest.raises(ConfigError, match=r"model.lora_rank=4 is set, which only training reads.*lora_adapter_path"):
        check_server(ServerConfig(model=model))
    config = ServerConfig(model=replace(model, lora_adapter_path="adapter"), rollout=RolloutConfig(name="vllm"))
    with pytest.raises(ConfigError, match=r"lora_adapter_path=adapter: rollout.name=vllm reads a merged model"):
        check_server(config)
