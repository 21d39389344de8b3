"""The engine: schedules, clipping, what a bad gradient may touch, precision, and checkpoints."""

import copy
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig, PreTrainedModel

from configs.schema import ModelConfig, OptimConfig
from workers.engine import TrainEngine, compute_dtype, learning_rate_multiplier, precision_notice
from workers.models import load_causal_lm, load_value_model

EVERYTHING = ["model", "optimizer", "extra", "hf_model"]
IDS = torch.tensor([[10, 11, 12, 13, 14]])


def make_engine(tiny_model: Path, dtype: torch.dtype = torch.float32, **optim) -> TrainEngine:
    module = load_causal_lm(ModelConfig(path=str(tiny_model)))
    return TrainEngine(module, OptimConfig(**{"lr": 0.01, **optim}), 10, torch.device("cpu"), dtype)


def loss_of(engine: TrainEngine) -> torch.Tensor:
    return engine.module(IDS, labels=IDS).loss


def engine_on(module: PreTrainedModel) -> TrainEngine:
    return TrainEngine(module, OptimConfig(), 10, torch.device("cpu"), torch.float32)


def state_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Weights and moments, by name."""
    moments = engine.optimizer.state_dict()["state"]
    named = {f"{place}.{name}": value for place, state in moments.items() for name, value in state.items()}
    return {**engine.module.state_dict(), **named}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


TO_A_FIFTH = {"lr_warmup_steps": 2, "min_lr_ratio": 0.2}


@pytest.mark.parametrize(
    ("optim", "wanted"),
    [
        ({}, {0: 1, 1: 1, 21: 1}),
        ({"lr_warmup_steps": 4}, {0: 0, 1: 0.25, 2: 0.5, 3: 0.75, 4: 1, 21: 1}),
        ({"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1}, {0: 0, 1: 0.5, 2: 1, 21: 1}),  # int(2.2) = 2 steps
        ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.5}, {0: 1, 1: 1}),  # a number wins, be it 0
        ({"lr_scheduler_type": "cosine", **TO_A_FIFTH},
         {0: 0, 1: 0.5, 2: 1, 7: 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, 12: 0.6, 22: 0.2}),
        ({"lr_scheduler_type": "linear", **TO_A_FIFTH}, {0: 0, 1: 0.5, 2: 1, 7: 0.8, 12: 0.6, 22: 0.2, 30: 0.2}),
        ({"lr_scheduler_type": "wsd", **TO_A_FIFTH},  # 18 of 20 steps stable, 2 of decay
         {0: 0, 1: 0.5, 2: 1, 19: 1, 20: 1, 21: 0.6, 22: 0.2, 30: 0.2}),
    ],
)  # fmt: skip
def test_learning_rate_schedules_by_hand(optim: dict, wanted: dict[int, float]):
    multiplier = learning_rate_multiplier(OptimConfig(**optim), total_steps=22)
    assert {step: multiplier(step) for step in wanted} == pytest.approx(wanted)


# Rates of the first five of ten steps, of which four warm up to 8e-3; a cosine then has 1, (1 + cos(π/6)) / 2 of it.
FALLEN = 8e-3 * (1 + 3**0.5 / 2) / 2


@pytest.mark.parametrize(
    ("kind", "more", "rates"),
    [
        ("constant", {}, [0, 2e-3, 4e-3, 6e-3, 8e-3]),
        ("cosine", {}, [0, 2e-3, 4e-3, 6e-3, 8e-3]),
        ("constant", {"zero_indexed_step": False}, [2e-3, 4e-3, 6e-3, 8e-3, 8e-3]),
        ("cosine", {"zero_indexed_step": False}, [2e-3, 4e-3, 6e-3, 8e-3, FALLEN]),
        ("constant", {"init_lr_ratio": 0.5}, [4e-3, 5e-3, 6e-3, 7e-3, 8e-3]),
        ("cosine", {"init_lr_ratio": 0.5, "zero_indexed_step": False}, [5e-3, 6e-3, 7e-3, 8e-3, FALLEN]),
    ],
)
def test_a_warm_up_begins_where_it_is_told_to(kind: str, more: dict, rates: list[float]):
    optim = OptimConfig(lr=8e-3, lr_warmup_steps=4, lr_scheduler_type=kind, **more)
    multiplier = learning_rate_multiplier(optim, total_steps=10)
    assert [optim.lr * multiplier(step) for step in range(5)] == pytest.approx(rates, rel=1e-12)
    if not optim.zero_indexed_step and kind == "cosine":
        assert multiplier(9) == 0  # the last step's


def test_the_learning_rate_of_a_step_is_reported_and_used(tiny_model: Path):
    engine = make_engine(tiny_model, lr_warmup_steps=2)
    before = state_of(engine)
    assert engine.update([loss_of(engine)], step=0)["lr"] == 0
    assert equal({name: state_of(engine)[name] for name in before}, before)
    assert engine.update([loss_of(engine)], step=1)["lr"] == 0.005
    assert engine.optimizer.param_groups[0]["lr"] == 0.005


@pytest.mark.parametrize(("clip_grad", "scale"), [(1.0, 0.2), (10.0, 1.0)])
def test_gradients_are_clipped_by_their_global_norm(tiny_model: Path, clip_grad: float, scale: float):
    """Two tensors with one entry each, 3 and 4: the norm is 5."""
    engine, applied = make_engine(tiny_model, clip_grad=clip_grad), {}
    parameters = dict(list(engine.module.named_parameters())[:2])
    engine.optimizer.register_step_pre_hook(
        lambda *_: applied.update({name: parameter.grad.sum().item() for name, parameter in parameters.items()})
    )
    loss = sum(size * parameter.flatten()[0] for size, parameter in zip((3, 4), parameters.values(), strict=True))
    assert engine.update([loss], step=0)["grad_norm"] == pytest.approx(5)
    assert list(applied.values()) == pytest.approx([3 * scale, 4 * scale])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_reaches_neither_weights_nor_moments(tiny_model: Path, value: float):
    engine = make_engine(tiny_model)
    engine.update([loss_of(engine)], step=0)
    before = copy.deepcopy(state_of(engine))
    loss_of(engine).backward()
    next(engine.module.parameters()).grad.view(-1)[3] = value
    assert engine.optimizer_step(1)["skipped_updates"] == 1
    assert equal(state_of(engine), before)
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    assert engine.update([loss_of(engine)], step=2)["skipped_updates"] == 0


def test_a_loss_that_is_not_finite_drops_the_gradient_of_those_before_it(tiny_model: Path):
    """An infinite loss can have a finite gradient, so the gradient's check alone would let it pass."""
    engine = make_engine(tiny_model)
    before = copy.deepcopy(state_of(engine))
    assert engine.update([loss_of(engine), loss_of(engine) + math.inf], step=0) == {"skipped_updates": 1}
    assert equal(state_of(engine), before)
    assert all(parameter.grad is None for parameter in engine.module.parameters())


def test_a_checkpoint_restores_weights_optimiser_and_generator_bit_by_bit(tiny_model: Path, tmp_path: Path):
    engine, fresh = make_engine(tiny_model), make_engine(tiny_model)
    engine.update([loss_of(engine)], step=0)
    engine.save(tmp_path, ["model"])
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        "model/shard-00001-model-00001-of-00001.safetensors",
        *("huggingface/config.json", "huggingface/generation_config.json"),
    }
    engine.save(tmp_path, EVERYTHING)
    expected_draw = torch.rand(3)
    fresh.load(tmp_path)
    assert torch.equal(torch.rand(3), expected_draw)
    assert equal(state_of(fresh), state_of(engine))
    for one in (engine, fresh):
        one.update([loss_of(one)], step=1)
    assert equal(state_of(fresh), state_of(engine))


def test_the_huggingface_folder_loads_with_from_pretrained(tiny_model: Path, tmp_path: Path):
    engine = make_engine(tiny_model)
    engine.update([loss_of(engine)], step=0)
    engine.save(tmp_path, ["hf_model"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    assert equal(loaded.state_dict(), engine.module.state_dict())
    torch.testing.assert_close(loaded(IDS).logits, engine.module(IDS).logits)


def test_settings_of_sampling_without_do_sample_are_saved_with_it(tiny_model: Path, tmp_path: Path, capsys):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}')
    module = load_causal_lm(ModelConfig(path=str(tmp_path / "model")))
    assert "settings of sampling without do_sample=true" in capsys.readouterr().err
    engine_on(module).save(tmp_path, ["hf_model"])
    saved = GenerationConfig.from_pretrained(tmp_path / "huggingface")
    assert (saved.do_sample, saved.temperature, saved.top_p, saved.eos_token_id) == (True, 0.6, 0.9, 1)


def test_a_critics_huggingface_folder_keeps_its_value_head(tiny_model: Path, tmp_path: Path):
    module = load_value_model(ModelConfig(path=str(tiny_model)), seed=0)
    engine_on(module).save(tmp_path, ["hf_model"])
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "huggingface")
    assert equal(loaded.state_dict(), module.state_dict())
    torch.testing.assert_close(loaded(IDS).logits, module(IDS).logits)


def test_the_value_head_starts_from_the_seed_alone(tiny_model: Path):
    def head(seed: int) -> torch.Tensor:
        return load_value_model(ModelConfig(path=str(tiny_model)), seed).score.weight

    torch.manual_seed(1)
    expected_draw = torch.rand(3)
    torch.manual_seed(1)
    first = head(0)
    assert torch.equal(torch.rand(3), expected_draw), "loading it must leave the global generator alone"
    assert torch.equal(head(0), first) and not torch.equal(head(1), first)


def test_no_model_drops_out_whatever_its_config_says(tiny_model: Path, tmp_path: Path):
    source = AutoModelForCausalLM.from_pretrained(tiny_model)
    source.config.attention_dropout = 0.5
    source.config.classifier_dropout = 0.5
    source.save_pretrained(tmp_path)

    def is_deterministic(module: PreTrainedModel) -> bool:
        return torch.equal(module.train()(IDS).logits, module(IDS).logits)

    assert not is_deterministic(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert is_deterministic(load_causal_lm(ModelConfig(path=str(tmp_path))))
    assert is_deterministic(load_value_model(ModelConfig(path=str(tmp_path)), seed=0))


@pytest.mark.parametrize(
    ("name", "parameters", "features", "said"),
    [
        ("auto", 135_000_000, {"amx_bf16": True, "avx512_bf16": True}, r"fsdp_config\.dtype=bfloat16"),
        ("auto", 135_000_000, {"avx512_bf16": True}, r"fsdp_config\.dtype=bfloat16"),
        ("auto", 135_000_000, {"avx512_bf16": False}, None),
        ("auto", 1_000_000, {"amx_bf16": True}, None),  # the casts would take what the products gain
        ("bfloat16", 135_000_000, {"amx_bf16": True}, None),
        ("float32", 135_000_000, {"amx_bf16": True}, None),
    ],
)
def test_a_cpu_that_multiplies_bfloat16_is_said_to(name, parameters, features, said, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    found = precision_notice(name, torch.device("cpu"), parameters)
    assert (found is None) if said is None else re.search(said, found)


@pytest.mark.parametrize(("major", "auto"), [(7, torch.float32), (8, torch.bfloat16)])
def test_a_gpu_without_bfloat16_computes_in_float32_and_it_is_said(major: int, auto: torch.dtype, monkeypatch):
    for name, value in (
        ("is_available", True), ("current_device", 0), ("get_device_name", "T4"),
        ("get_device_capability", (major, 5)), ("get_device_properties", SimpleNamespace(major=major)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    cuda = torch.device("cuda")
    assert compute_dtype("auto", cuda) == auto
    said = [precision_notice(name, cuda, 1) for name in ("auto", "bfloat16", "float32")]
    if major == 8:
        assert said == [None] * 3
    else:
        assert "T4 has no bfloat16" in said[0] and "float32" in said[0]
        assert "emulated" in said[1] and "vLLM refuses it" in said[1] and said[2] is None


def test_bfloat16_is_for_computing_and_never_chosen_for_a_cpu(tiny_model: Path):
    assert compute_dtype("auto", torch.device("cpu")) == torch.float32
    engine = make_engine(tiny_model, dtype=torch.bfloat16)
    with engine.autocast():
        assert engine.module(IDS).logits.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in engine.module.parameters()} == {torch.float32}
    with make_engine(tiny_model).autocast():
        assert engine.module(IDS).logits.dtype == torch.float32
