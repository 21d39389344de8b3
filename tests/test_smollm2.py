"""The command behind `make smollm2`, with the tests' tiny model, and the conversion of its real one, on a tiny file."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from examples.arithmetic import TASKS
from scripts import smollm2, smollm2_model


@pytest.fixture(autouse=True)
def rows(tmp_path, monkeypatch) -> None:
    """Few rows of every task, in a working directory of this test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smollm2, "TRAIN_ROWS", 16)
    monkeypatch.setattr(smollm2, "HELD_OUT_ROWS", 25)
    for task in TASKS:
        smollm2.write_rows(task, seed=0)


def short(model: Path) -> list[str]:
    sizes = "data.train_batch_size=2 data.max_prompt_length=128 data.max_response_length=4"
    steps = "trainer.total_training_steps=2 trainer.test_freq=1 trainer.save_freq=-1 trainer.logger=[]"
    rest = f"actor_rollout_ref.model.path={model} actor_rollout_ref.rollout.n=2"
    return [*sizes.split(), *steps.split(), *rest.split()]


@pytest.mark.parametrize("task", TASKS)
def test_the_command_leaves_figures_and_answers(tiny_model, tmp_path, monkeypatch, capsys, task) -> None:
    folder = tmp_path / "outputs/smollm2" / task
    (folder / "validation").mkdir(parents=True)
    (folder / "validation/9.jsonl").write_text("an earlier, longer run's\n")
    monkeypatch.setattr(sys, "argv", ["smollm2", "--task", task, "--seed", "3", *short(tiny_model)])
    smollm2.main()
    *_, outcome, report = capsys.readouterr().out.splitlines()
    assert outcome.startswith("success on 25 held-out questions: ")
    summary = json.loads((folder / "summary.json").read_text())
    answers = {step: smollm2.read_validation(smollm2.task_config(task, 3, []), step) for step in (0, 2)}
    success = [sum(row["acc"] for row in answers[step]) / 25 for step in (0, 2)]
    assert [summary["before"], summary["after"], summary["seed"]] == [*success, 3]
    assert (folder / "reward_curve.png").stat().st_size > 1000
    page = (tmp_path / report.rpartition(" ")[2]).read_text()
    [told] = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["metrics"][f"val-core/{task}/acc/mean@1"]
    assert [told["values"][place] for place in (0, -1)] == pytest.approx([summary["before"], summary["after"]])
    lines = (folder / "answers.md").read_text().splitlines()
    assert len(lines) == 2 + 10 and lines[0] == "| question | right | before | after | learnt |"
    assert lines[2].startswith(f"| {answers[0][0]['raw_prompt'][-1]['content']} | {answers[0][0]['gts']} | ")
    assert lines[3].startswith(f"| {answers[0][2]['raw_prompt'][-1]['content']} | ")


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ROPE_THETA = 100_000.0


def small_llama(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        )
    )  # fmt: skip


def by_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order: the two halves of a head alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, model: LlamaForCausalLM, tokens: list[str], merges: list[str]) -> None:
    """`model` and a byte-level tokenizer as llama.cpp's converter writes them, the embeddings in 8-bit blocks."""
    gguf = pytest.importorskip("gguf", reason="not in this environment: make setup")
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    values = {
        "context_length": config.max_position_embeddings, "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps, "rope_dimension_count": config.head_dim,
        "rope_freq_base": ROPE_THETA, "vocab_size": config.vocab_size, "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm", "token_list": tokens, "token_merges": merges, "chat_template": TEMPLATE,
        "token_types": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "unk_token_id": 0,
    }  # fmt: skip
    for name, value in values.items():
        vars(gguf.GGUFWriter)[f"add_{name}"](writer, value)
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    blocks = gguf.quantize(weights.pop("model.embed_tokens.weight"), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, weight in weights.items():
        _, *place, _ = name.split(".")
        if place[0] == "norm":
            writer.add_tensor("output_norm.weight", weight)
            continue
        _, layer, *part = place
        weight = by_llama_cpp(weight, heads[part[-1]]) if part[-1] in heads else weight
        writer.add_tensor(f"blk.{layer}.{parts['.'.join(part)]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """A model, and the folder that its GGUF file was converted to."""
    folder = tmp_path_factory.mktemp("gguf")
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    model = small_llama(len(tokens))
    write_gguf(folder / "model.gguf", model, tokens, ["h e"])
    smollm2_model.convert_gguf(folder / "model.gguf", folder / "model")
    return model, folder / "model"


def test_a_gguf_file_becomes_the_model_it_was_made_of(converted) -> None:
    model, folder = converted
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert {weight.dtype for weight in found.parameters()} == {torch.float32}
    specials = (found.config.bos_token_id, found.config.eos_token_id, found.config.pad_token_id)
    assert specials == (1, 2, 2) and found.generation_config.eos_token_id == 2
    weights = dict(found.named_parameters())
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        is_quantised = name == "model.embed_tokens.weight"  # in blocks of 32 with steps of 1/127 of the largest
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-3 if is_quantised else 0)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(found.model.embed_tokens.weight)
        ids = torch.arange(3, 40)[None]
        torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
