"""Runs all stages on a pretended GPU (pretended_gpu.py): nothing that one refuses, and few waits of the host for it.

`python -m extras.kernels.tests.test_pretended_gpu` prints the syncs of each stage by line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.models import numbers_tokenizer
from configs.schema import ActorConfig, CriticConfig, ModelConfig, OptimConfig, PolicyLossConfig, RolloutConfig
from data.protocol import DataProto, object_array
from data.types import Completion, SamplingParams
from extras.kernels.generation import LaidOutRows, SharedPrompts
from tests.batches import close, ragged_batch, random_ids, update_of
from tests.pretended_gpu import CPU, CUDA, MixedDevices, PretendedGPU
from training.core_algos import AGGREGATION_MODES, POLICY_LOSS_REGISTRY
from workers.dp_actor import DataParallelPPOActor, ReferencePolicy
from workers.dp_critic import DataParallelPPOCritic
from workers.engine import TrainEngine
from workers.hf_rollout import RunningBatch
from workers.micro_batches import MicroBatchSize
from workers.models import load_causal_lm, load_value_model
from workers.rollout import build_rollout, generate_batch, load_rollout_class

VOCABULARY, PROMPT, RESPONSE = 256, 20, 20
SIZE = MicroBatchSize(None, 150)
KL_TYPES = ("kl", "abs", "mse", "low_var_kl", "k3+")


# Most syncs of a pass over three micro-batches, and of any step of decoding: numbers that may only fall.
MOST = {"update": 3, "log_probs": 1, "step": 1}


class Setting(NamedTuple):
    packed: bool
    checkpointing: bool
    dtype: torch.dtype


SETTINGS = {
    "packed float32": Setting(True, False, torch.float32),
    "packed bfloat16 checkpointed": Setting(True, True, torch.bfloat16),
    "padded float32 checkpointed": Setting(False, True, torch.float32),
}


@dataclass
class Run:
    """Results of the stages of a GRPO step and of a critic, and what the device counted in each."""

    model: Any = None
    rollout: Any = None
    results: dict[str, Any] = field(default_factory=dict)
    syncs: dict[str, int] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    flex_calls: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("pretended"))


def save_model(folder: Path) -> Path:
    """A Qwen2 of two layers, tied, whose four heads share two of keys."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.generation_config.eos_token_id = 7
    model.save_pretrained(folder)
    numbers_tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


def run_on_gpu(folder: Path, setting: Setting) -> Run:
    with PretendedGPU() as gpu:
        return run_stages(folder, setting, CUDA, gpu)


def run_stages(folder: Path, setting: Setting, device: torch.device, gpu: PretendedGPU) -> Run:
    """Loads, generates, scores, updates the policy and a critic, and hands on and saves the weights."""
    run = Run()

    def stage(name: str, result: Any) -> Any:
        run.results[name], run.syncs[name], run.tables[name] = result, gpu.syncs.total(), gpu.table()
        run.flex_calls += len(gpu.flex_calls)
        gpu.reset()
        return result

    ways = {"use_remove_padding": setting.packed, "enable_gradient_checkpointing": setting.checkpointing}
    settings = ModelConfig(path=str(folder), **ways)
    numbers = (device, setting.dtype, PROMPT + RESPONSE)
    run.model = load_causal_lm(settings, *numbers)
    engine = TrainEngine(run.model, OptimConfig(), 10, *numbers[:2])
    config = ActorConfig(use_kl_loss=True, entropy_coeff=0.01)
    actor = DataParallelPPOActor(config, engine, SIZE, SIZE)
    reference = ReferencePolicy(load_causal_lm(settings, *numbers), SIZE, engine.autocast)
    stage("load", reference.module.device)
    with engine.autocast():
        rollout = RolloutConfig(prompt_length=PROMPT, response_length=RESPONSE)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        run.rollout = build_rollout(load_rollout_class("hf"), rollout, tokenizer, run.model)
        stage("trial", None)
        generator = torch.Generator().manual_seed(1)
        prompts = [ids for length in (5, 20, 11) for ids in [random_ids(length, generator)] * 4]
        asked = DataProto.from_dict(None, {"raw_prompt_ids": object_array(prompts)})
        with counted_steps(gpu, run.rollout.batch_class) as steps:
            batch = generate_batch(run.rollout, asked, SamplingParams(True, 1.0, -1, 1.0, RESPONSE), 0, 0)
    stage("generation", batch)
    run.syncs["step"] = max(steps)
    batch = batch.union(stage("log_probs", actor.compute_log_prob(batch, 1.0, ["old_log_probs", "entropys"])))
    batch = batch.union(stage("reference", reference.compute_log_prob(batch, 1.0, ["ref_log_prob"])))
    shape, mask = batch.batch["response_mask"].shape, batch.batch["response_mask"]
    for name in ("advantages", "returns"):
        batch.batch[name] = torch.randn(shape, generator=generator) * mask
    stage("update", actor.update_policy(batch, update_of(batch, config)))
    stage("weights", [weight.device for _, weight in engine.weights()])
    check_checkpoint(engine, folder / f"checkpoint {id(run)}")
    stage("checkpoint", None)

    value_model = load_value_model(settings, 0, *numbers)
    critic_config = CriticConfig(loss_agg_mode="token-mean")
    critic = DataParallelPPOCritic(critic_config, TrainEngine(value_model, OptimConfig(), 10, *numbers[:2]), SIZE)
    stage("load critic", None)
    batch = batch.union(stage("values", critic.compute_values(batch)))
    stage("update critic", critic.update_critic(batch, update_of(batch, critic_config)))
    return run


@contextmanager
def counted_steps(gpu: PretendedGPU, batch_class: type[RunningBatch]) -> Iterator[list[int]]:
    """Lists the syncs of each step of decoding in the block."""
    syncs, real = [], batch_class.step

    def step(self: RunningBatch) -> list[Completion]:
        before = gpu.syncs.total()
        finished = real(self)
        syncs.append(gpu.syncs.total() - before)
        return finished

    with patch.object(batch_class, "step", step):
        yield syncs


def check_checkpoint(engine: TrainEngine, folder: Path) -> None:
    """Saves, loads, and compares: the device has the same weights as before."""
    before = [parameter.detach().cpu() for parameter in engine.module.parameters()]
    engine.save(folder, ["model", "optimizer", "extra", "hf_model"])
    with torch.no_grad():
        next(engine.module.parameters()).zero_()
    engine.load(folder)
    for old, new in zip(before, engine.module.parameters(), strict=True):
        assert new.device == engine.device and torch.equal(old, new.detach().cpu())


@pytest.fixture(scope="module", params=SETTINGS)
def gpu_run(request: pytest.FixtureRequest, folder: Path) -> tuple[Setting, Run]:
    setting = SETTINGS[request.param]
    return setting, run_on_gpu(folder, setting)


def test_all_stages_run_on_the_device(gpu_run):
    """The trials took the fast ways: a mistake within them is no error, but a notice."""
    setting, run = gpu_run
    assert run.model.shares_prompts == setting.packed
    assert run.rollout.batch_class is (SharedPrompts if setting.packed else LaidOutRows)
    assert (run.flex_calls > 0) == setting.packed
    assert {run.results["load"], *run.results["weights"]} == {CUDA}
    assert run.results["update"]["actor/skipped_updates"] == run.results["update critic"]["critic/skipped_updates"] == 0


def test_the_device_computes_what_the_cpu_does(gpu_run, folder):
    """FlexAttention and its gradient are held against SDPA by it."""
    setting, run = gpu_run
    if setting.dtype != torch.float32:
        pytest.skip("in bfloat16 other tokens are drawn")
    with PretendedGPU() as gpu:  # which nothing here asks for
        on_cpu = run_stages(folder, setting, CPU, gpu)
    assert not any(on_cpu.syncs.values())
    columns = {"generation": "responses", "log_probs": "old_log_probs", "reference": "ref_log_prob", "values": "values"}
    for stage, name in columns.items():
        close(run.results[stage].batch[name], on_cpu.results[stage].batch[name], 1e-5)
    for stage in ("update", "update critic"):
        assert run.results[stage] == pytest.approx(on_cpu.results[stage], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("stage", MOST)
def test_syncs_are_bounded(gpu_run, stage):
    _, run = gpu_run
    assert run.syncs[stage] <= MOST[stage], run.tables.get(stage, run.tables["generation"])


ELSEWHERE = {"flowrl", "gvpo", "pair", "spin", "distillation", "distillation_topk", "bypass_mode"}  # they need stages
MODES = sorted({*POLICY_LOSS_REGISTRY} - ELSEWHERE)
LOSSES = [
    *({"policy_loss": PolicyLossConfig(loss_mode=name, dro_beta=0.05)} for name in MODES),
    *({"loss_agg_mode": mode, "entropy_coeff": 0.1} for mode in AGGREGATION_MODES),
    *({"use_kl_loss": True, "kl_loss_type": kind} for kind in KL_TYPES),
]


def test_every_loss_runs_on_the_device(folder):
    batch = ragged_batch()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].clone()
    with PretendedGPU():
        model = load_causal_lm(ModelConfig(path=str(folder)), CUDA, torch.bfloat16, PROMPT + RESPONSE)
        engine = TrainEngine(model, OptimConfig(), 10, CUDA, torch.bfloat16)
        for settings in LOSSES:
            config = ActorConfig(**settings)
            actor = DataParallelPPOActor(config, engine, MicroBatchSize(None, 60), MicroBatchSize(None, 60))
            assert actor.update_policy(batch, update_of(batch, config))["actor/skipped_updates"] == 0, settings


def test_a_tensor_of_the_host_is_refused_with_its_line():
    with PretendedGPU():
        on_gpu = torch.ones(3, device="cuda")
        with pytest.raises(MixedDevices, match=r"test_pretended_gpu\.py:\d+ test_a_tensor.*shape \(3,\)"):
            on_gpu + torch.ones(3)


def print_tables() -> None:
    import tempfile

    for name, setting in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = run_on_gpu(save_model(Path(folder)), setting)
        print(f"\n=== {name}: a step of decoding {run.syncs['step']}")
        for stage, table in run.tables.items():
            print(f"{stage}\n{table}")


if __name__ == "__main__":
    print_tables()
