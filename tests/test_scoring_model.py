"""The model that scores: the trial of its forward, copies, and shares that are cut alike."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForTokenClassification,
    BertLMHeadModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from configs.errors import ConfigError
from configs.schema import ModelConfig
from tests.batches import CUTS, TEMPERATURE, ragged_batch, relative_distance
from tests.shapes import SMALL
from workers import scoring_model as scoring_model_module
from workers.micro_batches import cut, score
from workers.scoring_model import scoring_model, with_hooks

CPU = torch.device("cpu")
SHAPE = {**SMALL, "pad_token_id": 0}
ALL = ("log_probs", "entropy", "sum_pi_squared")


def ready(
    model: PreTrainedModel, longest: int = 64, dtype: torch.dtype = torch.float32, kernels: str = "off", **settings
) -> PreTrainedModel:
    return scoring_model(with_hooks(model), ModelConfig(kernels=kernels, **settings), CPU, dtype, longest)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


# The trial


def scale_by_company(model: PreTrainedModel, argument: str) -> None:
    """Makes hidden states depend on the width of the batch, in forwards that are given `argument`."""

    def hook(_, args, given, output):
        if argument in given:
            output.last_hidden_state = output.last_hidden_state * (1 + output[0].shape[1] / 10)
        return output

    model.base_model.register_forward_hook(hook, with_kwargs=True)


def test_a_model_whose_rows_depend_on_their_company_is_refused(kernels: str = "off"):
    model = llama()
    scale_by_company(model, "attention_mask")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM does not score a row beside others.*Choose another model"):
        ready(model, kernels=kernels)


def test_a_model_whose_forward_fails_is_refused():
    model = llama()
    model.base_model.register_forward_pre_hook(lambda *_: None.missing)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be scored: .*AttributeError.*docs/models.md"):
        ready(model)


@pytest.mark.parametrize("model_class", [BertLMHeadModel, BertForTokenClassification])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_that_looks_ahead_is_refused_as_not_causal(model_class, is_decoder: bool):
    torch.manual_seed(0)
    shape = {name: SHAPE[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = model_class(BertConfig(**shape, **drop, num_hidden_layers=1, is_decoder=is_decoder, num_labels=1))
    with nullcontext() if is_decoder else pytest.raises(ConfigError, match=r"is not causal: .*BERT.*docs/models.md"):
        ready(model)


def phi3(monkeypatch: pytest.MonkeyPatch, fixed: bool) -> Phi3ForCausalLM:
    """Makes a model whose rope is another for rows beyond 8 tokens, and for rows that share a batch with one."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5]}
    shape = {**SHAPE, "max_position_embeddings": 64, "original_max_position_embeddings": 8}
    if not fixed:
        monkeypatch.setattr(scoring_model_module, "fix_rope", lambda model, longest: None)
    model = Phi3ForCausalLM(Phi3Config(**shape, rope_parameters={**rope, "original_max_position_embeddings": 8}))
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            matrix.mul_(8)
    return model


@pytest.mark.parametrize(("longest", "is_long"), [(8, False), (9, True), (40, True)])
def test_a_rope_is_one_for_all_rows_of_a_run(longest: int, is_long: bool, monkeypatch, capsys):
    batch, model = ragged_batch(), phi3(monkeypatch, fixed=True)
    batch = batch[[row for row in range(len(batch)) if int(batch.batch["attention_mask"][row].sum()) <= 8]]
    short = score(ready(copy.deepcopy(model), longest=8), batch, CUTS["1 row"], TEMPERATURE).log_probs
    found = ready(model, longest)
    assert ("turns positions otherwise behind 8 tokens" in capsys.readouterr().err) == is_long
    for cut_size in ("1 row", "all rows"):
        scores = score(found, batch, CUTS[cut_size], TEMPERATURE).log_probs
        assert torch.allclose(scores, short, atol=1e-5) != is_long


@pytest.mark.parametrize(("longest", "is_refused"), [(8, False), (10, True)])
def test_the_trial_goes_past_the_length_at_which_a_rope_changes(longest: int, is_refused: bool, monkeypatch):
    model = phi3(monkeypatch, fixed=False)
    if is_refused:
        with pytest.raises(ValueError, match="Phi3ForCausalLM does not score a row beside others"):
            ready(model, longest)
    else:
        ready(model, longest)


def test_what_sdpa_does_not_do_is_left_to_eager_attention(capsys):
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=2.0)
    assert ready(Gemma2ForCausalLM(config)).config._attn_implementation == "eager"
    knows = not Gemma2ForCausalLM._supports_sdpa  # later versions of transformers choose eager by themselves
    assert ("Gemma2ForCausalLM takes eager attention" in capsys.readouterr().err) != knows
    config = Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=None)
    assert ready(Gemma2ForCausalLM(config)).config._attn_implementation == ("eager" if knows else "sdpa")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_random_in_training(checkpointing: bool):
    """Training goes without a router's noise, and without dropout that a model has by itself."""
    torch.manual_seed(0)
    noise = {"num_local_experts": 4, "router_jitter_noise": 0.5, "attention_dropout": 0.0}
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, **noise))
    model.model.layers[1].mlp.register_module("drop", torch.nn.Dropout(0.5))
    model.model.layers[1].mlp.register_forward_hook(lambda module, _, output: module.drop(output))
    if checkpointing:
        model.gradient_checkpointing_enable()
    passes, batch = [], ragged_batch()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    ready(model).train()
    passes.clear()
    [micro] = cut(batch, CUTS["all rows"], [], model)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        torch.where(micro.is_scored, model.token_scores(micro, TEMPERATURE).log_probs, 0.0).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert relative_distance(*gradients) < 1e-6
    assert (len(passes) > 2) == checkpointing
    assert model.training and not model.model.layers[1].mlp.drop.training


# What is asked, and copies


def test_scores_are_of_what_was_asked(kernels: str = "off"):
    model, batch = ready(llama(), kernels=kernels), ragged_batch()
    everything = score(model, batch, CUTS["3 rows"], TEMPERATURE, ALL)
    assert everything.values is None
    for name in ALL:
        found = score(model, batch, CUTS["all rows"], TEMPERATURE, ["log_probs", name])
        assert {asked for asked, scores in found._asdict().items() if scores is not None} == {"log_probs", name}
        torch.testing.assert_close(found._asdict()[name], everything._asdict()[name], rtol=1e-5, atol=1e-5)


def test_a_copy_scores_by_weights_of_its_own_and_checkpoints_hold_the_weights_alone(tmp_path: Path, kernels="off"):
    plain, batch = llama(), ragged_batch()
    names = list(plain.state_dict())
    model = ready(plain, kernels=kernels)
    before = score(model, batch, CUTS["3 rows"], TEMPERATURE).log_probs
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert twin.token_scores.__self__ is twin
    assert torch.equal(score(twin, batch, CUTS["3 rows"], TEMPERATURE).log_probs, before)
    assert list(twin.state_dict()) == names
    twin.save_pretrained(tmp_path)
    again = ready(LlamaForCausalLM.from_pretrained(tmp_path), kernels=kernels)
    assert torch.equal(score(again, batch, CUTS["3 rows"], TEMPERATURE).log_probs, before)
