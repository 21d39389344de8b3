"""The command behind `make smollm2`, with the tests' tiny model, and the conversion of its real one."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


def test_what_is_read_of_a_gguf_file_is_saved_as_plain_weights_with_special_tokens(tmp_path, monkeypatch) -> None:
    """Transformers reads the file: weights in blocks' precision, a config without special ids, a tokenizer whose
    digits are not split."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "12"]
    merged = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, [("1", "2")]))
    specials = {"unk_token": tokens[0], "bos_token": tokens[1], "eos_token": tokens[2], "pad_token": tokens[2]}
    read = PreTrainedTokenizerFast(tokenizer_object=merged, chat_template="{{ messages }}", **specials)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    quantised = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), tie_word_embeddings=True, **shape))
    quantised.config.quantization_config = {"quant_method": "gguf"}
    for kind, result in ((AutoModelForCausalLM, quantised), (PreTrainedTokenizerFast, read)):
        monkeypatch.setattr(kind, "from_pretrained", lambda folder, result=result, **_: result)
    smollm2_model.convert_gguf(tmp_path / "package/model.gguf", tmp_path / "model")
    monkeypatch.undo()
    model, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert "quantization_config" not in json.loads((tmp_path / "model/config.json").read_text())
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 2)
    assert model.generation_config.eos_token_id == 2 and tokenizer.chat_template == "{{ messages }}"
    torch.testing.assert_close(dict(model.named_parameters()), dict(quantised.named_parameters()), rtol=0, atol=0)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12", add_special_tokens=False)) == ["1", "2"]
