"""The model that scores: the trial of its packed forward, copies, and shares that are cut alike."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from configs.schema import ModelConfig, RolloutConfig
from data.seqlen_balancing import micro_batch_indices
from data.types import Request, SamplingParams
from extras.kernels import packed_attention
from tests.batches import CUTS, TEMPERATURE, ragged_batch, relative_distance
from tests.shapes import SMALL
from workers import micro_batches
from workers import scoring_model as scoring_model_module
from workers.forward_check import check_width
from workers.hf_rollout import HFRollout
from workers.micro_batches import MicroBatchSize, cut, cut_share, score
from workers.scoring_model import padded_scores, scoring_model

CPU = torch.device("cpu")
SHAPE = {**SMALL, "pad_token_id": 0}
ALL = ("log_probs", "entropy", "sum_pi_squared")


def ready(model: PreTrainedModel, longest: int = 64, dtype: torch.dtype = torch.float32, **settings) -> PreTrainedModel:
    return scoring_model(model, ModelConfig(**settings), CPU, dtype, longest)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


# The trial


@pytest.mark.parametrize(("longest", "is_packed"), [(21, True), (22, False), (1000, False)])
def test_the_trial_goes_past_a_window_as_far_as_the_run_does(longest: int, is_packed: bool, monkeypatch, capsys):
    """By a packed attention that forgets the window of 20: a run of 21 tokens puts in 20, and does not see it."""
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


def test_the_trial_is_no_longer_than_it_has_to_be():
    seen = []
    for longest, window in [(1000, None), (1000, 2000), (1000, 30), (33, 30), (4, None)]:
        model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=window))
        model.base_model.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
        ready(model, longest)
        padded = [given["attention_mask"].shape[1] for given in seen if given["attention_mask"].ndim == 2]
        assert max(padded) + 1 == {(1000, 30): 54, (33, 30): 33}.get((longest, window), 9)
        seen.clear()


@pytest.mark.parametrize(
    ("device", "longest", "dtype", "width"),
    [
        ("cpu", 1000, torch.float32, 9),
        ("cpu", 1000, torch.bfloat16, 32),
        ("cpu", 20, torch.bfloat16, 20),
        ("cuda", 1000, torch.bfloat16, 200),
        ("cuda", 1000, torch.float32, 200),
        ("cuda", 20, torch.float32, 20),
    ],
)
def test_the_trial_is_as_long_as_roundings_and_kernels_ask(device, longest, dtype, width):
    """FlexAttention's blocks have 128 tokens; that of a handful of scores says little about rounding."""
    assert check_width(SimpleNamespace(config=llama().config, device=torch.device(device)), longest, dtype) == width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_has_a_backward(dtype: torch.dtype, monkeypatch, capsys):
    """By a packed attention that computes the right scores, and gives its keys no gradient."""
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


def scale_by_company(model: PreTrainedModel, argument: str) -> None:
    """Makes hidden states depend on the width of the batch, in forwards that are given `argument`."""

    def hook(_, args, given, output):
        if argument in given:
            output.last_hidden_state = output.last_hidden_state * (1 + output[0].shape[1] / 10)
        return output

    model.base_model.register_forward_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_a_model_whose_rows_depend_on_their_company_is_refused(kernels: str):
    model = llama()
    scale_by_company(model, "attention_mask")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM does not score a row beside others.*Choose another model"):
        ready(model, kernels=kernels)


def test_a_model_whose_forward_fails_is_refused():
    model = llama()
    model.base_model.register_forward_pre_hook(lambda *_: None.missing)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be scored: .*AttributeError.*docs/models.md"):
        ready(model)


def test_the_trial_has_the_run_s_precision(capsys):
    model, seen = llama(), []
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    assert ready(model, dtype=torch.bfloat16).shares_prompts
    assert seen.count(torch.bfloat16) > seen.count(torch.float32) > 0
    scale_by_company(model, "packed")
    assert not ready(model, dtype=torch.bfloat16).shares_prompts


def gemma3n() -> Gemma3nForCausalLM:
    """Four layers, of which the last two attend to the keys and values of the first two."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    shape = {**SHAPE, "num_hidden_layers": 4, "head_dim": 8, "layer_types": kinds, "num_kv_shared_layers": 2}
    narrow = {"hidden_size_per_layer_input": 8, "laurel_rank": 4, "altup_num_inputs": 2}
    config = Gemma3nTextConfig(
        **shape, **narrow, vocab_size_per_layer_input=102, sliding_window=6, activation_sparsity_pattern=[0.0] * 4
    )
    return Gemma3nForCausalLM(config)


def test_layers_may_share_keys_and_values(tiny_model: Path):
    """Scored, trained and generated from as without kernels."""
    prompts, gradients, completions = [[5, 6, 7], [5, 6, 7], [9], [20, 30, 40, 50, 60]], [], []
    for settings in ({"kernels": "off"}, {}):
        model = ready(gemma3n(), **settings)
        assert model.shares_prompts == (settings == {})
        [micro] = cut(ragged_batch(), CUTS["all rows"], [], model)
        scores = model.token_scores(micro, TEMPERATURE)
        torch.where(micro.is_scored, scores.log_probs, 0.0).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        config = RolloutConfig(prompt_length=5, response_length=12)
        rollout = HFRollout(config, AutoTokenizer.from_pretrained(tiny_model), model)
        sampling = SamplingParams(True, 1.0, -1, 1.0, 12)
        completions.append(rollout.generate([Request(i, ids, sampling, seed=i) for i, ids in enumerate(prompts)]))
    assert relative_distance(*gradients) < 1e-5
    for one, other in zip(*completions, strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def phi3(monkeypatch: pytest.MonkeyPatch, fixed: bool) -> Phi3ForCausalLM:
    """Its rope is another beyond 8 tokens, in rows that share a batch with such a one."""
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
    assert ("turns positions otherwise in batches of more than 8 tokens" in capsys.readouterr().err) == is_long
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
        assert ready(model, longest).shares_prompts


def test_what_sdpa_does_not_do_is_left_to_eager_attention(capsys):
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=2.0)
    assert ready(Gemma2ForCausalLM(config)).config._attn_implementation == "eager"
    assert "Gemma2ForCausalLM takes eager attention" in capsys.readouterr().err
    config.attn_logit_softcapping = None
    assert ready(Gemma2ForCausalLM(config)).shares_prompts


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_random_in_training(checkpointing: bool):
    """A router's noise, and dropout that a model has by itself."""
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


@pytest.mark.parametrize("settings", [{}, {"use_remove_padding": False}, {"kernels": "off"}])
def test_scores_are_of_what_was_asked(settings: dict):
    model, batch = ready(llama(), **settings), ragged_batch()
    everything = score(model, batch, CUTS["3 rows"], TEMPERATURE, ALL)
    assert everything.values is None
    for name in ALL:
        found = score(model, batch, CUTS["all rows"], TEMPERATURE, ["log_probs", name])
        assert {asked for asked, scores in found._asdict().items() if scores is not None} == {"log_probs", name}
        torch.testing.assert_close(found._asdict()[name], everything._asdict()[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"kernels": "off"}])
def test_a_copy_scores_by_weights_of_its_own_and_checkpoints_hold_the_weights_alone(settings: dict, tmp_path: Path):
    plain, batch = llama(), ragged_batch()
    names = list(plain.state_dict())
    model = ready(plain, **settings)
    before = score(model, batch, CUTS["3 rows"], TEMPERATURE).log_probs
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert twin.token_scores.__self__ is twin
    assert torch.equal(score(twin, batch, CUTS["3 rows"], TEMPERATURE).log_probs, before)
    assert list(twin.state_dict()) == names
    twin.save_pretrained(tmp_path)
    again = ready(LlamaForCausalLM.from_pretrained(tmp_path), **settings)
    assert torch.equal(score(again, batch, CUTS["3 rows"], TEMPERATURE).log_probs, before)


def test_an_adapter_goes_below_the_scores():
    model, batch = ready(llama()), ragged_batch()
    before = score(model, batch, CUTS["3 rows"], TEMPERATURE).log_probs
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    base = adapted.get_base_model()
    with_adapter = score(base, batch, CUTS["3 rows"], TEMPERATURE).log_probs
    assert not torch.allclose(with_adapter, before, atol=1e-3)
    with adapted.disable_adapter():
        torch.testing.assert_close(score(base, batch, CUTS["3 rows"], TEMPERATURE).log_probs, before)


def test_a_share_is_cut_once_for_the_count_and_the_micro_batches(monkeypatch: pytest.MonkeyPatch):
    model, batch, calls = ready(llama()), ragged_batch(), []

    def counted(*args, **kwargs):
        calls.append(args)
        return micro_batch_indices(*args, **kwargs)

    monkeypatch.setattr(micro_batches, "micro_batch_indices", counted)
    rows = [row for micro in cut_share(batch, MicroBatchSize(None, 24), [], model) for row in micro.rows]
    assert sorted(map(int, rows)) == list(range(len(batch)))
    assert len(calls) == 1
