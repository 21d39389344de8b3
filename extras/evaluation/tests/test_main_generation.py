"""Batch generation: responses as the model gives them, and the same after a kill as without one."""

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from extras.evaluation import main_generation
from extras.evaluation.main_generation import main

PROMPTS = ["abc", [{"role": "user", "content": "say abc"}], "another one", "z", "yx"]
ROWS = [{"prompt": prompt, "data_source": "mine", "ground_truth": str(n)} for n, prompt in enumerate(PROMPTS, start=1)]


def generate(folder: Path, model: Path, *overrides: str, name: str = "out.jsonl", rows=ROWS) -> list[dict]:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.path={model}", f"data.path={folder}/prompts.jsonl", f"data.output_path={folder}/{name}"]
    lengths = ["data.max_prompt_length=32", "data.max_response_length=6"]
    main([*settings, *lengths, *overrides])
    return read(folder / name)


def read(file: Path) -> list[dict]:
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file).to_pylist()
    return [json.loads(line) for line in file.read_text().splitlines()]


def slow_answers(model: Path, prompts: list[str]) -> list[str]:
    """transformers' own greedy answers, one prompt at a time."""
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        found = loaded.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(found, skip_special_tokens=True))
    return answers


def test_greedy_responses_are_those_of_transformers(tmp_path, tiny_model):
    found = generate(tmp_path, tiny_model, "rollout.do_sample=false", "data.batch_size=2")
    texts = ["abc", "<|user|>say abc<|end|><|assistant|>", "another one", "z", "yx"]
    assert [row["responses"] for row in found] == [[answer] for answer in slow_answers(tiny_model, texts)]
    assert [{name: row[name] for name in ("prompt", "data_source", "ground_truth")} for row in found] == ROWS
    for row in found:
        assert row["end_reasons"][0] in ("terminated", "max_tokens") and 1 <= row["response_lengths"][0] <= 6
        assert row["response_lengths"] == [6] or row["end_reasons"] == ["terminated"]


def test_n_responses_differ_and_a_seed_repeats_them(tmp_path, tiny_model):
    first = generate(tmp_path, tiny_model, "data.n_samples=4", name="a.jsonl")
    assert all(len(row["responses"]) == 4 and len(set(row["responses"])) > 1 for row in first)
    assert generate(tmp_path, tiny_model, "data.n_samples=4", "data.batch_size=3", name="b.jsonl") == first
    assert generate(tmp_path, tiny_model, "data.n_samples=4", "trainer.seed=1", name="c.jsonl") != first


def stopped_after(batches: int, monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """Lets generation end by Ctrl-C after so many batches; the rows that were asked for."""
    asked, answer_rows = [], main_generation.answer_rows

    def interrupted(*arguments):
        if len(asked) == batches:
            raise KeyboardInterrupt
        asked.append(arguments[-1])
        return answer_rows(*arguments)

    monkeypatch.setattr(main_generation, "answer_rows", interrupted)
    return asked


def test_a_stopped_run_goes_on_and_gives_the_same(tmp_path, tiny_model, monkeypatch, capsys):
    settings = ["data.n_samples=2", "data.batch_size=2"]
    whole = generate(tmp_path, tiny_model, *settings, name="whole.jsonl")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stopped_after(1, patched)
        generate(tmp_path, tiny_model, *settings)
    partial = tmp_path / "out.jsonl.partial"
    assert not (tmp_path / "out.jsonl").exists() and len(partial.read_text().splitlines()) == 1 + 2
    with partial.open("a") as file:
        file.write('{"prompt": "torn by a ki')
    asked = stopped_after(99, monkeypatch)
    assert generate(tmp_path, tiny_model, *settings) == whole
    assert asked == [range(2, 4), range(4, 5)], "what was written is not generated again"
    assert not partial.exists() and "5 prompts, 2 of them answered already" in capsys.readouterr().out


def test_a_stopped_run_goes_on_with_its_own_settings_alone(tmp_path, tiny_model, monkeypatch, capsys):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stopped_after(1, patched)
        generate(tmp_path, tiny_model, "data.batch_size=2")
    before = (tmp_path / "out.jsonl.partial").read_bytes()
    for changed, rows, message in (
        (["rollout.temperature=0.7"], ROWS, "rollout.temperature: 1.0 → 0.7"),
        ([], [*ROWS[1:], ROWS[0]], "data.path: "),
        ([], [row | {"level": 1} for row in ROWS], "ground_truth, level"),
        ([], [row | {"ground_truth": "9"} for row in ROWS], "data.path: "),
        (["data.response_key=answers"], ROWS, 'data.response_key: "responses" → "answers"'),
    ):
        with pytest.raises(SystemExit):
            generate(tmp_path, tiny_model, "data.batch_size=2", *changed, rows=rows)
        stderr = capsys.readouterr().err
        assert "was begun with other settings" in stderr and message in stderr
        assert (tmp_path / "out.jsonl.partial").read_bytes() == before
    assert len(generate(tmp_path, tiny_model, "data.batch_size=4")) == 5, "the size of a batch decides nothing"


def test_parquet_goes_in_and_out(tmp_path, tiny_model):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROWS[1]] * 3), tmp_path / "chats.parquet")
    settings = [f"data.path={tmp_path}/chats.parquet", "data.n_samples=2"]
    found = generate(tmp_path, tiny_model, *settings, name="out.parquet")
    assert [row["prompt"] for row in found] == [ROWS[1]["prompt"]] * 3
    assert all(len(row["responses"]) == len(row["end_reasons"]) == len(row["response_lengths"]) == 2 for row in found)


def test_strings_can_be_chat(tmp_path, tiny_model):
    rows = [{"prompt": "say abc"}]
    [raw] = generate(tmp_path, tiny_model, "rollout.do_sample=false", name="raw.jsonl", rows=rows)
    as_chat = ["rollout.do_sample=false", "data.strings_are_chat=true"]
    [chat] = generate(tmp_path, tiny_model, *as_chat, name="chat.jsonl", rows=rows)
    texts = ["say abc", "<|user|>say abc<|end|><|assistant|>"]
    assert [*raw["responses"], *chat["responses"]] == slow_answers(tiny_model, texts)


@pytest.mark.parametrize(
    ("is_early", "overrides", "message"),
    [
        (True, ["data.output_path=null"], "data.output_path is not set"),
        (True, ["data.output_path={folder}/out.csv"], "its ending must be one of .jsonl, .parquet"),
        (True, ["data.output_path={folder}/prompts.jsonl"], "exists already: name another file, or remove it"),
        (True, ["data.n_samples=2", "rollout.do_sample=false"], "asks for 2 greedy responses to a prompt"),
        (True, ["rollout.nnodes=1"], "rollout.nnodes is set, which only training reads"),
        (True, ["rollout.name=nothing"], "rollout.name=nothing is none of hf,"),
        (True, ["data.path={folder}/nowhere.jsonl"], "data.path={folder}/nowhere.jsonl: there is no such file"),
        (True, ["data.path={folder}/out.txt"], "data.path={folder}/out.txt: unknown ending '.txt', not of .parquet, "),
        (True, ["model.path={folder}/nowhere"], "model.path={folder}/nowhere: there is no such folder"),
        (True, ["model.external_lib={folder}/nowhere.py"], "model.external_lib={folder}/nowhere.py: there is no file"),
        (False, ["data.max_prompt_length=4"], "the prompt has 10 tokens, more than data.max_prompt_length=4"),
        (False, ["data.max_prompt_length=2040", "data.max_response_length=9"], "was made for 2048 positions"),
        (False, ["data.response_key=data_source"], "have a column 'data_source' already"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    tmp_path, tiny_model, capsys, monkeypatch, is_early, overrides, message
):
    if is_early:  # nor is imported what takes seconds
        monkeypatch.setitem(sys.modules, "extras.evaluation.main_generation", None)
    (tmp_path / "out.txt").touch()
    with pytest.raises(SystemExit) as refused:
        generate(tmp_path, tiny_model, *(override.format(folder=tmp_path) for override in overrides))
    last = capsys.readouterr().err.splitlines()[-1]
    assert refused.value.code == 2 and last.startswith("error: ") and message.format(folder=tmp_path) in last
