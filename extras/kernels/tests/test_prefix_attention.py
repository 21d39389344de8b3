"""The packed forward against the padded one: the same log-probs, values and gradients, for all models and lengths."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch.nn.attention import flex_attention
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from configs.schema import ActorConfig, ModelConfig, OptimConfig
from data.protocol import DataProto
from extras.kernels import packed_attention
from extras.kernels.packed_attention import Packed, is_packed
from extras.kernels.ragged import Ragged, in_a_row
from tests.batches import padded as padded_columns
from tests.batches import random_ids, relative_distance, update_of
from tests.shapes import SMALL
from workers.dp_actor import DataParallelPPOActor
from workers.engine import TrainEngine
from workers.micro_batches import MicroBatch, MicroBatchSize, TokenScores, cut
from workers.scoring_model import scoring_model, with_hooks

SHAPE = {**SMALL, "head_dim": 8, "max_position_embeddings": 512}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CAPS = {"final_logit_softcapping": 0.1, "attn_logit_softcapping": None}  # SDPA cannot do the second
MODELS = {
    "llama, grouped queries": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama, tied head": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "mistral, window of 5": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5)),
    "gemma2, soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=6, **CAPS)),
    "qwen2, lora": lambda: with_lora(Qwen2ForCausalLM(Qwen2Config(**SHAPE)), "all-linear"),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=102, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT)),
}


def with_lora(module: PreTrainedModel, targets: str | list[str]) -> PreTrainedModel:
    """Adds low-rank adapters that change what the model computes, as peft's start at 0; returns the model."""
    module.add_adapter(LoraConfig(r=4, target_modules=targets))
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return module


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]()
    model.config.pad_token_id = 0
    return model


def packed(model: PreTrainedModel, dtype: torch.dtype = torch.float32, is_packed: bool = True) -> PreTrainedModel:
    settings = ModelConfig(use_remove_padding=is_packed)
    return scoring_model(with_hooks(model), settings, torch.device("cpu"), dtype, longest=1000)


padded = partial(packed, is_packed=False)


def log_probs(model: PreTrainedModel, micro: MicroBatch) -> torch.Tensor:
    return model.token_scores(micro, temperature=1.0).log_probs


def groups(prompt_lengths: list[int], response_lengths: list[list[int]], seed: int = 0) -> DataProto:
    """Rows of prompts in a row, each with the responses of these lengths; a row without a response has failed."""
    generator = torch.Generator().manual_seed(seed)
    prompts, answers = [], []
    for length, responses in zip(prompt_lengths, response_lengths, strict=True):
        prompts += [random_ids(length, generator)] * len(responses)
        answers += [random_ids(size, generator) for size in responses]
    widths = max(map(len, prompts)) + 2, max(map(len, answers)) + 1
    columns = padded_columns(prompts, answers, *widths, pad_token_id=0).tensors
    real = columns["response_mask"].bool()
    for name, mean, spread in [("old_log_probs", -4.6, 0.3), ("ref_log_prob", -4.6, 0.3), ("advantages", 0.0, 1.0)]:
        columns[name] = torch.where(real, mean + spread * torch.randn(real.shape, generator=generator), 1e3)
    return DataProto.from_dict(columns)


LENGTHS = {
    "ragged groups": ([3, 9, 1], [[4, 1, 6, 2], [5, 5], [1, 3, 3]]),
    "one width": ([5, 5], [[4, 4, 4], [4, 4, 4]]),
    "alone": ([2, 7, 4], [[3], [1], [6]]),
    "one token each": ([2, 7], [[1] * 8, [1] * 8]),
    "padding at the end": ([6], [[8, 3]]),
    "failed rows": ([4, 3], [[0, 5, 2], [0, 0]]),
    "long prompts": ([211, 150], [[7, 30], [1, 2, 3, 4, 5, 6, 7, 8]]),
    "long responses": ([70, 3], [[140, 0, 66], [64, 65, 130]]),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_scores_and_gradients_are_those_of_padded_rows(name):
    """tests/test_families.py has the scores of all families."""
    models = padded(make(name)).train(), packed(make(name)).train()
    assert [is_packed(model) for model in models] == [False, True]
    for kind, lengths in LENGTHS.items():
        batch = groups(*lengths)
        (wanted, gradient), (found, packed_gradient) = (scores_and_gradient(model, batch) for model in models)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5, msg=kind)
        assert relative_distance(packed_gradient, gradient) < 1e-5, kind


def scores_and_gradient(module: PreTrainedModel, batch: DataProto) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Scores [B, R], 0 where there is no token, and the gradient of a weighted sum of log-probs and entropies."""
    module.zero_grad(set_to_none=True)
    [micro] = cut(batch, MicroBatchSize(len(batch), 0), [], module)
    scores = module.token_scores(micro, 0.8, ["log_probs", "entropy", "sum_pi_squared"])
    weights = torch.randn(scores.log_probs.shape, generator=torch.Generator().manual_seed(1)) * micro.is_scored
    (torch.where(micro.is_scored, scores.log_probs + scores.entropy, 0.0) * weights).sum().backward()
    gradient = [weight.grad for weight in module.parameters() if weight.requires_grad]
    return [torch.where(micro.is_scored, one, 0.0) for one in scores[:3]], gradient


class Flex:
    """FlexAttention as a GPU has it, compiled on the CPU: the masks, gradients and graphs are the real ones, and the
    arithmetic is dense, so that of rows of over 600 tokens is left out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs, self.is_on, compiled = 0, False, torch.compile
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch, "compile", lambda *args, **given: compiled(*args, backend=self.backend, **given))
            attend = packed_attention.compiled_flex.__wrapped__()
        patch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # it has no backward on a CPU
        patch.setattr(packed_attention, "compiled_flex", lambda: attend)
        patch.setattr(packed_attention, "takes_flex", lambda query, value: self.is_on)

    def backend(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.graphs += 1
        place = next(i for i, one in enumerate(inputs) if isinstance(one, torch.Tensor) and one.ndim == 4)  # the query
        assert not inputs[place].shape[2] < 128  # Inductor asks so, and takes another kernel
        return lambda *given: graph(*given) if given[place].shape[2] <= 600 else (given[place] * 1,)


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Flex:
    return Flex(monkeypatch)


def scored(model: PreTrainedModel, batch: DataProto, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probs [B, R], 0 where there is no token, and the gradients of a weighted sum of them."""
    [micro] = cut(batch, MicroBatchSize(len(batch), 0), [], model)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        found = torch.where(micro.is_scored, log_probs(model, micro), 0.0)
    (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found.detach(), gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama, grouped queries", "mistral, window of 5", "gpt2"])
def test_attention_of_a_gpu_is_that_of_a_cpu(name, dtype, flex):
    """Log-probs and gradients; bfloat16 as autocast brings it."""
    model = packed(make(name))
    for lengths in LENGTHS.values():
        batch = groups(*lengths)
        flex.is_on = False
        wanted, gradients = scored(model, batch, dtype)
        flex.is_on = True
        found, others = scored(model, batch, dtype)
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        assert relative_distance(others, gradients) < 10 * tolerance
    assert flex.graphs == 1  # of 3 to 470 tokens


def qwen2(heads: int, key_heads: int) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 16 * heads, "head_dim": 16, "num_attention_heads": heads}
    return Qwen2ForCausalLM(Qwen2Config(**{**shape, "num_key_value_heads": key_heads, "pad_token_id": 0}))


def test_flex_attention_is_compiled_for_no_other_length(flex):
    """A run in bfloat16 compiles no graph for a length of its own: in the trial, in log-probs of both precisions, in
    updates of 2 to 4,000 tokens; with the number of heads of a policy, and of a critic."""
    flex.is_on, generator = True, torch.Generator().manual_seed(0)
    for heads, key_heads in ((14, 2), (3, 1)):
        before = flex.graphs
        model = packed(qwen2(heads, key_heads), dtype=torch.bfloat16)
        assert model.shares_prompts and flex.graphs - before == 2
        for rows, longest in ((1, 7), (3, 90), (5, 280), (1, 1)):
            answers = torch.randint(1, longest + 1, (rows, 4), generator=generator).tolist()
            batch = groups([longest] * rows, answers)
            [micro] = cut(batch, MicroBatchSize(len(batch), 0), [], model)
            for dtype in (torch.float32, torch.bfloat16):
                with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                    log_probs(model, micro)
            scored(model, batch, torch.bfloat16)
        assert flex.graphs - before == 3  # in two precisions; a run has one


def test_flex_attention_takes_no_narrow_heads():
    tensors = {width: SimpleNamespace(is_cuda=True, shape=(1, 2, 300, width)) for width in (8, 16)}
    taken = [(q, v) for q in tensors for v in tensors if packed_attention.takes_flex(tensors[q], tensors[v])]
    assert taken == [(16, 16)]


def test_flex_attention_raises_where_it_would_be_dense(monkeypatch):
    monkeypatch.setattr(packed_attention, "MOST_GRAPHS", 1)
    flex, model = Flex(monkeypatch), packed(make("llama, grouped queries"))
    flex.is_on = True
    with pytest.raises(RuntimeError, match=r"compiled 1 times .*use_remove_padding=false"):
        for dtype in (torch.float32, torch.bfloat16):
            scored(model, groups([5], [[4, 2]]), dtype)


@pytest.mark.parametrize("pairs", [1, 2**17, 2**26])
@pytest.mark.parametrize("window", [None, 50])
def test_a_block_mask_made_by_parts_is_torch_s(window, pairs, monkeypatch):
    monkeypatch.setattr(packed_attention, "PAIRS", pairs)
    batch, model = groups([3, 190, 40], [[120, 60], [120, 0, 120, 9], [100]]), packed(make("qwen2"))
    [micro] = cut(batch, MicroBatchSize(99, 0), [], model)
    mask = Packed.of(micro, model.device).block_mask(window)
    wanted = flex_attention.create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, "cpu")
    assert mask.seq_lengths == (756, 756)
    for found, one in zip(mask.as_tuple(), wanted.as_tuple(), strict=True):
        assert torch.equal(found, one) if isinstance(found, torch.Tensor) else found == one


def test_a_block_has_the_sequences_that_reach_it_and_each_token_once():
    ragged = Ragged([3, 130, 64, 0, 70], torch.device("cpu"))
    assert ragged.order.tolist() == [1, 4, 2, 0, 3]
    assert ragged.blocks == [(4, 0, 64), (2, 64, 128), (1, 128, 130)]
    padded = ragged.pad(torch.arange(1.0, 268).view(1, -1, 1))
    assert padded.shape == (5, 1, 130, 1)
    blocks = in_a_row([padded[:rows, :, start:end] for rows, start, end in ragged.blocks])
    assert blocks.shape == (1, 4 * 64 + 2 * 64 + 2, 1)
    assert blocks[0, ragged.places, 0].tolist() == list(range(1, 268))


def test_checkpointing_computes_each_layer_again_once():
    """A layer is computed once more, not once for each block of its attention: 2 of the prompts, 3 of the responses."""
    batch, gradients = groups(*LENGTHS["long responses"]), []
    for checkpointing in (False, True):
        module, calls = packed(make("llama, tied head")), []
        if checkpointing:
            module.gradient_checkpointing_enable()
        module.train()
        for layer in module.base_model.layers:
            layer.mlp.register_forward_pre_hook(lambda *call, calls=calls: calls.append(call))
        [micro] = cut(batch, MicroBatchSize(99, 0), [], module)
        log_probs(module, micro).sum().backward()
        gradients.append([p.grad for p in module.parameters()])
        assert len(calls) == (2 * SHAPE["num_hidden_layers"] if checkpointing else SHAPE["num_hidden_layers"])
    assert relative_distance(*gradients) < 1e-6


def test_values_too():
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_labels=1, classifier_dropout=0.0, pad_token_id=0)
    value_model = LlamaForTokenClassification(config)
    models, gradients = (padded(copy.deepcopy(value_model)), packed(value_model)), []
    assert [is_packed(model) for model in models] == [False, True]
    for module in models:
        [micro] = cut(groups(*LENGTHS["ragged groups"]), MicroBatchSize(99, 0), [], module)
        scores = module.token_scores(micro, temperature=1.0, ask=["values"])
        assert scores == TokenScores(values=scores.values)
        torch.where(micro.is_scored, scores.values, 0.0).square().sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert relative_distance(*gradients) < 1e-5


@pytest.mark.parametrize("size", [MicroBatchSize(1, 0), MicroBatchSize(3, 0), MicroBatchSize(None, 16)])
def test_the_actor_makes_the_same_step_packed_and_padded_in_any_cut(size):
    batch, config = groups(*LENGTHS["ragged groups"]), ActorConfig(entropy_coeff=0.1, use_kl_loss=True)

    def gradient(module: PreTrainedModel) -> list[torch.Tensor]:
        engine, seen = TrainEngine(module, OptimConfig(), 10, torch.device("cpu"), torch.float32), []
        engine.optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in module.parameters()))
        DataParallelPPOActor(config, engine, size, size).update_policy(batch, update_of(batch, config))
        return seen

    assert relative_distance(gradient(packed(make("qwen2"))), gradient(padded(make("qwen2")))) < 1e-5


def test_a_prompt_is_computed_once_for_all_samples_that_fit_the_budget():
    module, seen = packed(make("llama, tied head")), []
    module.base_model.register_forward_pre_hook(lambda *c: seen.append(c[2]["input_ids"].numel()), with_kwargs=True)
    batch = groups([10, 6], [[5, 5, 5, 5], [5, 5]])
    [micro] = cut(batch, MicroBatchSize(None, 1000), [], module)
    log_probs(module, micro)
    assert seen == [10 + 4 * 4 + 6 + 2 * 4]  # a response's last token is not forwarded
    micros = list(cut(batch, MicroBatchSize(None, 20), [], module))  # a prompt of 10 and two responses fill a pass
    assert sorted(len(micro.rows) for micro in micros) == [2, 2, 2]
    assert sorted(row for micro in micros for row in micro.rows.tolist()) == list(range(6))


def test_a_head_with_an_adapter_is_not_mistaken_for_its_weight(capsys):
    module = with_lora(make("qwen2"), ["q_proj", "lm_head"])
    assert not is_packed(packed(module))
    assert "not a linear layer" in capsys.readouterr().err
