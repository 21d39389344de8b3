"""Runs on a GPU in float32 and bfloat16, by `make gpu`; without one, on the CPU.

The packed forward is FlexAttention on a GPU and SDPA on a CPU, so here only a GPU shows anything new; that the tests
themselves work is shown everywhere.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.models import numbers_tokenizer
from configs.schema import ModelConfig, OptimConfig, RolloutConfig
from data.protocol import DataProto, object_array
from data.types import SamplingParams
from extras.kernels.token_head import score_tokens
from tests.batches import padded, random_ids, relative_distance
from training.advantage import MAX_MISMATCH_RATIO as MAX_RATIO
from training.advantage import MEAN_MISMATCH as MEAN
from training.advantage import rollout_mismatch
from workers.engine import TrainEngine, gpu_has_bfloat16
from workers.micro_batches import MicroBatchSize, cut, score
from workers.models import load_causal_lm
from workers.rollout import build_rollout, generate_batch, load_rollout_class

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_BFLOAT16 = DEVICE.type == "cuda" and not gpu_has_bfloat16()
BFLOAT16 = pytest.mark.skipif(NO_BFLOAT16, reason="this card has no bfloat16: runs compute in float32")
PRECISIONS = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16", marks=BFLOAT16)]
DTYPES = pytest.mark.parametrize("dtype", PRECISIONS)
VOCABULARY, PROMPT, RESPONSE, SAMPLES, TEMPERATURE = 512, 300, 140, 3, 0.8  # beyond a block of FlexAttention: 128
PACKED, PADDED = ({"use_remove_padding": packed} for packed in (True, False))
PLAIN = {"use_remove_padding": False, "kernels": "off"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with heads of 64, two of which share keys, and larger weights than a new model has: they hide nothing."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=1, **shape))
    with torch.no_grad():
        for weight in (weight for weight in model.model.layers.parameters() if weight.ndim == 2):
            weight.mul_(4)
    model.generation_config.eos_token_id = 7
    saved = tmp_path_factory.mktemp("gpu") / "qwen2"
    model.save_pretrained(saved)
    numbers_tokenizer(VOCABULARY).save_pretrained(saved)
    return saved


def load(folder: Path, dtype: torch.dtype, settings: dict) -> PreTrainedModel:
    return load_causal_lm(ModelConfig(path=str(folder), **settings), DEVICE, dtype)


def precision(dtype: torch.dtype) -> AbstractContextManager:
    return nullcontext() if dtype == torch.float32 else torch.autocast(DEVICE.type, dtype)


@pytest.fixture(scope="module")
def batch() -> DataProto:
    """Prompts of 1 to 300 tokens with three responses of 1 to 140 each."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(1, (140, 1, 7)), (300, (129, 128, 3)), (130, (60, 5, 140)), (17, (2, 33, 90))]
    prompts = [ids for length, _ in lengths for ids in [random_ids(length, generator)] * SAMPLES]
    responses = [random_ids(length, generator) for _, group in lengths for length in group]
    return padded(prompts, responses, PROMPT, RESPONSE, pad_token_id=0)


def scores_and_gradient(model: PreTrainedModel, batch: DataProto, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of all response tokens, and the gradient of a weighted sum of them."""
    model.train().zero_grad(set_to_none=True)
    [micro] = cut(batch, MicroBatchSize(len(batch), 0), [], model)
    with precision(dtype):
        log_probs = model.token_scores(micro, TEMPERATURE).log_probs
    weights = torch.rand(log_probs.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) * micro.is_scored
    torch.where(micro.is_scored, log_probs * weights, 0).sum().backward()
    return log_probs.detach()[micro.is_scored].cpu(), [p.grad.cpu() for p in model.parameters()]


@DTYPES
@pytest.mark.parametrize("settings", [PACKED, PADDED], ids=["packed", "padded"])
def test_forward_and_gradient_are_those_of_plain_transformers(folder, batch, settings, dtype):
    """float32: but for rounding. bfloat16: about as far from the float32 ones as plain transformers' bfloat16."""
    truth, true_gradient = scores_and_gradient(load(folder, torch.float32, PLAIN), batch, torch.float32)
    model = load(folder, dtype, settings)
    assert model.shares_prompts is settings["use_remove_padding"]
    found, gradient = scores_and_gradient(model, batch, dtype)
    if dtype == torch.float32:
        assert (found - truth).abs().max() < 1e-4 and relative_distance(gradient, true_gradient) < 1e-4
        return
    plain, plain_gradient = scores_and_gradient(load(folder, dtype, PLAIN), batch, dtype)
    assert (found - truth).abs().mean() < 1.5 * (plain - truth).abs().mean()
    assert relative_distance(gradient, true_gradient) < 1.5 * relative_distance(plain_gradient, true_gradient)


@DTYPES
def test_the_token_head_is_a_softmax_over_the_vocabulary(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((300, 64), (5000, 64)))
    labels, upstream = torch.randint(5000, (300,), generator=generator), torch.randn(300, generator=generator)

    def run(precise: bool) -> list[Tensor]:
        kind = torch.float64 if precise else torch.float32
        inputs = [(0.3 * tensor).to(DEVICE, kind).requires_grad_() for tensor in (hidden, weight)]
        if precise:
            logits = inputs[0] @ inputs[1].T / TEMPERATURE
            log_pi = logits.log_softmax(-1)
            log_probs, entropy = log_pi.gather(1, labels.to(DEVICE)[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)
        else:
            with precision(dtype):
                options = {"temperature": TEMPERATURE, "with_entropy": True, "tile_bytes": 1 << 20}
                log_probs, entropy, _ = score_tokens(*inputs, labels.to(DEVICE), **options)
        ((log_probs + 0.1 * entropy) * upstream.to(DEVICE)).sum().backward()
        return [x.detach().cpu().double() for x in (log_probs, entropy, *(tensor.grad for tensor in inputs))]

    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for found, true in zip(run(precise=False), run(precise=True), strict=True):
        assert relative_distance([found], [true]) < bound


@DTYPES
def test_a_model_kept_in_main_memory_takes_the_steps_of_one_on_the_device(folder, batch, dtype):
    """A model that waits in main memory leaves neither weights nor moments on the device between its steps."""
    sharding, found = pytest.importorskip("extras.sharding.offload"), []
    for offload in (sharding.Offload(), sharding.Offload(moments=True, module=True)):
        module = load(folder, dtype, PACKED)
        module.parallel = sharding.Offloaded(offload)
        engine = TrainEngine(module, OptimConfig(lr=1e-3), 10, DEVICE, dtype)
        for step in range(3):
            with engine.on_device():
                [micro] = cut(batch, MicroBatchSize(len(batch), 0), [], engine.module)
                with engine.autocast(updates=True):
                    log_probs = engine.module.token_scores(micro, TEMPERATURE).log_probs
                engine.update([-log_probs.sum()], step)
        found.append([weight.detach().cpu() for weight in engine.module.parameters()])
    moments = [value for state in engine.optimizer.state.values() for value in state.values()]
    assert {tensor.device.type for tensor in [*engine.module.parameters(), *moments]} == {"cpu"}
    before = [weight.detach().cpu() for weight in load(folder, dtype, PACKED).parameters()]
    assert relative_distance(*found) < 1e-3 < relative_distance(found[0], before)


@DTYPES
@pytest.mark.parametrize("settings", [PACKED, PLAIN], ids=["kernels", "plain"])
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_the_trainer_gives_rollouts_the_log_probs_that_they_were_drawn_with(folder, settings, temperature, dtype):
    model = load(folder, dtype, settings)
    engine = TrainEngine(model, OptimConfig(), 1, DEVICE, dtype)
    generator = torch.Generator().manual_seed(2)
    prompts = [ids for length in (1, 150, 40) for ids in [random_ids(length, generator)] * 4]
    config = RolloutConfig(prompt_length=150, response_length=40)
    sampling = SamplingParams(do_sample=True, temperature=temperature, top_k=-1, top_p=1.0, max_tokens=40)
    with engine.autocast():
        rollout = build_rollout(load_rollout_class("hf"), config, AutoTokenizer.from_pretrained(folder), model)
    asked = DataProto.from_dict(None, {"raw_prompt_ids": object_array(prompts)})
    with engine.autocast():  # another: the first keeps copies of the weights that the engine was tried with
        sampled = generate_batch(rollout, asked, sampling, 0, 0)
        scored = score(model, sampled, MicroBatchSize(None, 2000), temperature).log_probs
    columns = sampled.batch
    found = rollout_mismatch(scored, columns["rollout_log_probs"], columns["response_mask"])
    assert columns["response_mask"].sum() > 100
    mean, largest = (1e-5, 1.001) if dtype == torch.float32 else (0.03, 2.0)
    assert found[MEAN] < mean and found[MAX_RATIO] < largest
