"""The trial of packed forwards: which models take them, and how long its rows are."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from extras.kernels import packed_attention
from tests import test_scoring_model as core
from tests.test_scoring_model import SHAPE, llama, scale_by_company
from workers.scoring_model import padded_scores

ready = partial(core.ready, kernels="auto")


def test_what_the_core_promises_holds_for_packed_forwards(tmp_path: Path, capsys):
    core.test_a_model_whose_rows_depend_on_their_company_is_refused("auto")
    core.test_scores_are_of_what_was_asked("auto")
    core.test_a_copy_scores_by_weights_of_its_own_and_checkpoints_hold_the_weights_alone(tmp_path, "auto")


def test_a_model_without_softcap_is_packed():
    torch.manual_seed(0)
    assert ready(Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=None))).shares_prompts


@pytest.mark.parametrize(("longest", "is_packed"), [(21, True), (22, False), (1000, False)])
def test_the_trial_goes_past_a_window_as_far_as_the_run_does(longest: int, is_packed: bool, monkeypatch, capsys):
    """A packed attention without its window of 20 passes in a run of 21 tokens, which reads 20, and in none longer."""
    torch.manual_seed(0)
    model, right = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=20)), packed_attention.packed_attention
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}  # which hide a token more or less

    def forgetful(*args, sliding_window=None, packed=None, **kwargs):
        window = sliding_window if packed is None else None
        return right(*args, sliding_window=window, packed=packed, **kwargs)

    monkeypatch.setattr(packed_attention, "packed_attention", forgetful)
    assert ready(model, longest).shares_prompts == is_packed
    assert ("log_probs then differ" in capsys.readouterr().err) != is_packed
    monkeypatch.undo()
    assert ready(model, longest).shares_prompts
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_has_a_backward(dtype: torch.dtype, monkeypatch, capsys):
    """The trial refuses a packed attention that computes the right scores, and gives its keys no gradient."""
    right = packed_attention.packed_attention

    def forgetful(module, query, key, *args, packed=None, **kwargs):
        return right(module, query, key if packed is None else key.detach(), *args, packed=packed, **kwargs)

    model = llama()
    assert ready(copy.deepcopy(model), dtype=dtype).shares_prompts
    monkeypatch.setattr(packed_attention, "packed_attention", forgetful)
    assert not ready(model, dtype=dtype).shares_prompts
    assert "gradients then differ by" in capsys.readouterr().err
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_does_otherwise_when_packed_is_scored_padded(capsys):
    model = llama()
    scale_by_company(model, "packed")
    assert not ready(model).shares_prompts
    assert model.token_scores.__func__ is padded_scores
    assert model.config._attn_implementation == "sdpa"
    assert "LlamaForCausalLM takes its batches padded" in capsys.readouterr().err


def test_the_trial_has_the_run_s_precision(capsys):
    model, seen = llama(), []
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    assert ready(model, dtype=torch.bfloat16).shares_prompts
    assert seen.count(torch.bfloat16) > seen.count(torch.float32) > 0
    scale_by_company(model, "packed")
    assert not ready(model, dtype=torch.bfloat16).shares_prompts
