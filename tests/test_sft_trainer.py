"""Supervised training: the loss, which positions it trains, what it learns, and which rows it refuses."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.schema import SFTConfig, SFTDataConfig
from custom.tiny_model import build_tokenizer
from data.padding import Sample
from data.sft_dataset import SFTDataset
from tests.runs import learning_metrics
from training.sft_trainer import SFTTrainer, main, run
from workers.micro_batches import cut

TOKENIZER = build_tokenizer()
END = TOKENIZER.eos_token_id
ROWS = [
    {"prompt": [{"role": "user", "content": "say abc"}], "response": "abc"},
    {"prompt": [{"role": "user", "content": "x"}], "response": "a longer answer"},
    {"prompt": "plain text", "response": ""},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
]


def write(folder: Path, rows: list[dict], name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def compose(folder: Path, model: Path, rows: list[dict], *overrides: str) -> SFTConfig:
    settings = [
        f"data.train_files={write(folder, rows)}",
        f"data.train_batch_size={min(len(rows), 4)}",
        f"model.path={model}",
        f"trainer.default_local_dir={folder}/run",
        "trainer.logger=[]",
        "trainer.n_threads=2",
        *overrides,
    ]
    return load_config(Arguments("sft", CONFIG_DIR, settings, print_config=False), SFTConfig)


def slow_loss(module: torch.nn.Module, rows: list[dict]) -> float:
    """Mean of −log p over all response tokens, one row at a time, without padding, token by token."""
    losses = []
    for row in rows:
        ids = [*row["sample"].prompt_ids, *row["sample"].token_ids]
        logits = module(torch.tensor([ids])).logits[0]
        for place in range(len(row["sample"].prompt_ids), len(ids)):
            losses.append(-logits[place - 1].log_softmax(-1)[ids[place]].item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("micro", ["null", 1, 3])
def test_the_loss_of_a_step_is_the_slow_twins_however_it_is_cut(tmp_path, tiny_model, micro):
    trainer = SFTTrainer(compose(tmp_path, tiny_model, ROWS, f"data.micro_batch_size_per_gpu={micro}"))
    expected = slow_loss(trainer.engine.module, list(trainer.train_loader.dataset))
    metrics = trainer.step(1)
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["train/tokens"] == 3 + 15 + 0 + 2 + 4  # characters, and an end each


def test_validation_weighs_tokens_not_batches(tmp_path, tiny_model):
    val = write(tmp_path, ROWS[:3], "val.jsonl")
    trainer = SFTTrainer(compose(tmp_path, tiny_model, ROWS[:2], f"data.val_files={val}"))  # batches of 2 and 1 rows
    assert trainer.validate() == pytest.approx(
        slow_loss(trainer.engine.module, list(trainer.val_loader.dataset)), rel=1e-5
    )


def test_the_gradient_is_at_the_positions_that_predict_response_tokens_and_nowhere_else(tmp_path, tiny_model):
    trainer = SFTTrainer(compose(tmp_path, tiny_model, ROWS, "model.use_remove_padding=false"))
    batch = trainer.pad(trainer.train_loader.next_batch())
    hidden = []

    def keep(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        output.retain_grad()
        hidden.append(output)

    trainer.engine.module.model.norm.register_forward_hook(keep)  # what logits are made of, position by position
    [micro] = cut(batch, trainer.size, ["response_mask"], trainer.engine.module)
    trainer.negative_log_likelihood(micro).backward()
    [kept] = hidden
    prompt_width = batch.prompts.shape[1]
    start = prompt_width - (micro.columns["input_ids"].shape[1] - micro.response_width)  # the micro-batch is trimmed
    trained = torch.zeros_like(batch.attention_mask)
    trained[micro.rows, start : start + kept.shape[1]] = kept.grad.abs().sum(-1).gt(0).long()
    predicting = torch.zeros_like(trained)
    for row in range(len(batch)):
        for place in range(int(batch.response_mask[row].sum())):
            predicting[row, prompt_width + place - 1] = 1
    assert torch.equal(trained, predicting)
    ends = [int(ids[int(mask.sum()) - 1]) for ids, mask in zip(batch.responses, batch.response_mask, strict=True)]
    assert ends == [END] * len(batch), "the last trained token is the end, so that the model learns to stop"


def test_it_learns_to_copy_and_to_stop_and_the_result_loads(tmp_path, tiny_model):
    letters = "abcdefgh"
    rows = [{"prompt": [{"role": "user", "content": letter}], "response": letter * 2} for letter in letters] * 2
    overrides = ["optim.lr=2e-2", "trainer.total_training_steps=60", "data.train_batch_size=16"]
    config = compose(tmp_path, tiny_model, rows, *overrides, f"data.val_files={write(tmp_path, rows[:8], 'val.jsonl')}")
    folder = run(config)
    metrics = learning_metrics(tmp_path / "run")
    assert metrics[1]["train/loss"] > 3 and metrics[60]["train/loss"] < 0.1 and metrics[60]["val/loss"] < 0.1
    assert "val/loss" not in metrics[59] and metrics[60]["train/skipped_updates"] == 0

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for letter in letters:
        chat = [{"role": "user", "content": letter}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert answer.tolist() == [*tokenizer.encode(letter * 2), END]


def test_the_same_seed_gives_the_same_model(tmp_path, tiny_model):
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        overrides = [f"trainer.seed={seed}", "data.train_batch_size=2", "trainer.total_epochs=3", "optim.lr=1e-2"]
        (tmp_path / name).mkdir()
        folder = run(compose(tmp_path / name, tiny_model, ROWS, *overrides))
        weights.append(AutoModelForCausalLM.from_pretrained(folder).lm_head.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_gradients_that_stay_broken_end_the_run(tmp_path, tiny_model):
    trainer = SFTTrainer(compose(tmp_path, tiny_model, ROWS, "trainer.total_training_steps=9"))
    broken = trainer.engine.module.lm_head.weight
    broken.data[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="not finite in 3 steps in a row"):
        trainer.fit()
    metrics = learning_metrics(tmp_path / "run")
    assert [*metrics] == [1, 2, 3] and all(entry["train/skipped_updates"] == 1 for entry in metrics.values())


def encoded(folder: Path, rows: list[dict], **settings) -> list[Sample]:
    return SFTDataset(write(folder, rows), TOKENIZER, SFTDataConfig(**settings), END).samples


def test_rows_are_a_prompt_to_read_and_a_response_to_learn_that_ends(tmp_path):
    chat, _, plain, messages = encoded(tmp_path, ROWS)
    assert TOKENIZER.decode(chat.prompt_ids) == "<|user|>say abc<|end|><|assistant|>"
    assert chat.token_ids == [*TOKENIZER.encode("abc"), END]
    assert TOKENIZER.decode(plain.prompt_ids) == "plain text" and plain.token_ids == [END]
    assert TOKENIZER.decode(messages.prompt_ids) == "<|user|>hi<|end|><|assistant|>"
    assert TOKENIZER.decode(messages.token_ids) == "yo<|end|>"


def test_truncation_cuts_the_named_side(tmp_path):
    row = {"prompt": "abcdef", "response": "uvw"}  # 6 + 4 tokens with the end
    [left] = encoded(tmp_path, [row], max_length=8, truncation="left")
    assert TOKENIZER.decode(left.prompt_ids) == "cdef" and left.token_ids[-1] == END
    [right] = encoded(tmp_path, [row], max_length=8, truncation="right")
    assert TOKENIZER.decode(right.prompt_ids) == "abcdef"
    assert TOKENIZER.decode(right.token_ids) == "uv", "a cut response has no end: the model is not taught to stop"
    [whole] = encoded(tmp_path, [row], max_length=10, truncation="error")
    assert whole.token_ids[-1] == END


def test_every_answer_of_a_conversation_is_learnt_and_nothing_else(tmp_path):
    said = [("user", "ab"), ("assistant", "c"), ("user", "de"), ("user", "f"), ("assistant", "gh"), ("user", "bye")]
    [sample] = encoded(tmp_path, [{"messages": [{"role": role, "content": text} for role, text in said]}])
    assert TOKENIZER.decode(sample.prompt_ids) == "<|user|>ab<|end|><|assistant|>"
    assert TOKENIZER.decode(sample.token_ids) == "c<|end|><|user|>de<|end|><|user|>f<|end|><|assistant|>gh<|end|>"
    learnt = [token for token, own in zip(sample.token_ids, sample.policy_mask, strict=True) if own]
    assert TOKENIZER.decode(learnt) == "c<|end|>gh<|end|>"
    [cut] = encoded(
        tmp_path,
        [{"messages": [{"role": role, "content": text} for role, text in said]}],
        max_length=8,
        truncation="right",
    )
    assert cut == sample.until(8 - len(sample.prompt_ids))


BAD = [
    ({"messages": [{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "b"}] * 2]}, {}, "one answer"),
    ({"prompt": "a"}, {}, r"the response \(column data\.response_key=response\) is None; it must be a string"),
    ({"prompt": "a", "response": 3}, {}, "is 3; it must be a string"),
    ({"prompt": 7, "response": "b"}, {}, r"prompt is 7.*column prompt"),
    ({"prompt": [{"role": "user"}], "response": "b"}, {}, "needs a 'role' and a 'content'"),
    (
        {"prompt": "abcdef", "response": "uvw"},
        {"max_length": 8},
        r"10 tokens, above data\.max_length=8: raise it, or cut",
    ),
    (
        {"prompt": "ab", "response": "uvwxyz"},
        {"max_length": 4, "truncation": "left"},
        r"would leave nothing of the prompt, which has 2 of the 5 tokens that data\.max_length=4 asks to cut",
    ),
]


@pytest.mark.parametrize(("row", "settings", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_named_by_file_and_number(tmp_path, row, settings, message):
    with pytest.raises(ValueError, match=rf"{tmp_path}/rows\.jsonl, row 1: .*{message}"):
        encoded(tmp_path, [{"prompt": "a", "response": "b"}, row], **settings)


def test_the_command_line_explains_itself(capsys):
    with pytest.raises(SystemExit) as answered:
        main(["--help"])
    shown = capsys.readouterr().out
    assert answered.value.code == 0 and "warm start" in shown and "--config-name" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "data.train_files is not set: give .parquet, .json or .jsonl files"),
        (["data.train_file=x"], "data.train_files"),
        (["data.train_files={folder}/rows.jsonl", "model.path={folder}/nowhere"], "model.path="),
    ],
)
def test_the_command_refuses_in_one_line_what_cannot_work(tmp_path, capsys, arguments, message):
    write(tmp_path, ROWS)
    given = [argument.format(folder=tmp_path) for argument in arguments]
    with pytest.raises(SystemExit) as refused:
        main([*given, f"trainer.default_local_dir={tmp_path}/run"])
    stderr = capsys.readouterr().err
    assert refused.value.code == 2 and stderr.startswith("error: ") and message in stderr
