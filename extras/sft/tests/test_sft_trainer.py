"""Supervised training: the loss, which positions it trains, what it learns, how it goes on, which rows it refuses."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.loader import Arguments, load_config, yaml_folder
from custom.tiny_model import build_tokenizer, save_tiny_model
from data.files import read_metrics
from data.types import Sample
from extras.sft.__main__ import main
from extras.sft.dataset import SFTDataset
from extras.sft.settings import SFTConfig, SFTDataConfig
from extras.sft.trainer import SFTTrainer, prepare, run, worker_config
from tests.runs import learning_metrics, signalled, state_files
from training.roles import ROLES
from workers.dp_actor import DataParallelPPOActor
from workers.group import LocalGroup, Role
from workers.model_worker import ModelWorker

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
        *(f"data.train_files={write(folder, rows)}", f"data.train_batch_size={min(len(rows), 4)}"),
        *(f"model.path={model}", f"trainer.default_local_dir={folder}/run", "trainer.logger=[]", "trainer.n_threads=2"),
        *overrides,
    ]
    return load_config(Arguments("sft", yaml_folder(SFTConfig), settings, print_config=False), SFTConfig)


def trainer_of(config: SFTConfig) -> tuple[SFTTrainer, DataParallelPPOActor]:
    """Returns a trainer before its first step, and the model that it trains, in this process."""
    parts = prepare(config)
    group = LocalGroup(1, ModelWorker, worker_config(config), parts.total_steps, ["actor"])
    return SFTTrainer(config, parts, Role(group, ROLES["actor"])), group.worker.roles["actor"]


def talk(*said: str) -> dict:
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]}


SEVERAL = [*ROWS, ROWS[0], talk("hi", "yo", "a", "b"), talk("x", "", "long " * 5, "er")]  # a prompt twice in a row
CUTS = {
    "all in one": [],
    "a row each": ["data.micro_batch_size_per_gpu=1"],
    "three rows each": ["data.micro_batch_size_per_gpu=3"],
    "by tokens": ["data.max_token_len_per_gpu=70", "data.max_length=70"],
    "padded": ["model.use_remove_padding=false"],
    "padded, by tokens": ["model.use_remove_padding=false", "data.max_token_len_per_gpu=70", "data.max_length=70"],
}


@pytest.mark.parametrize("name", CUTS)
def test_loss_and_gradient_of_a_step_are_the_slow_twins_however_it_is_cut(tmp_path, tiny_model, name):
    settings = [f"data.train_batch_size={len(SEVERAL)}", *CUTS[name]]
    trainer, model = trainer_of(compose(tmp_path, tiny_model, SEVERAL, *settings))
    module, rows = model.engine.module, list(trainer.train_loader.dataset)
    expected, tokens = slow_loss(module, rows)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in module.parameters()]).item()
    module.zero_grad()
    passes = []
    model.engine.accumulate = lambda losses, accumulate=model.engine.accumulate: accumulate(
        passes.append(loss) or loss for loss in losses
    )
    trainer.global_step = 1
    _, metrics = trainer.step()
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["train/tokens"] == tokens
    wanted = {"all in one": 1, "padded": 1, "a row each": len(SEVERAL), "three rows each": 3}
    assert len(passes) == wanted.get(name, len(passes)) and (len(passes) > 1 or wanted.get(name) == 1)


def slow_loss(module: torch.nn.Module, rows: list[dict]) -> tuple[torch.Tensor, int]:
    """Mean of −log p over all learnt tokens, one row at a time, without padding, token by token; and their number."""
    losses = []
    for row in rows:
        sample = row["sample"]
        ids = [*sample.prompt_ids, *sample.token_ids]
        logits = module(torch.tensor([ids])).logits[0].double()
        for place in range(len(sample.prompt_ids), len(ids)):
            if sample.policy_mask[place - len(sample.prompt_ids)]:
                losses.append(-logits[place - 1].log_softmax(-1)[ids[place]])
    return torch.stack(losses).mean(), len(losses)


def test_validation_weighs_tokens_not_batches(tmp_path, tiny_model, capsys):
    """The loss is a mean over the tokens of all batches; a notice says that validation rows are trained on as well."""
    val = write(tmp_path, SEVERAL[:3], "val.jsonl")
    config = compose(tmp_path, tiny_model, ROWS[:2], f"data.val_files={val}")  # batches of 2 and 1 rows
    trainer, model = trainer_of(config)
    assert "the prompts of 2 rows of 3 in data.val_files are in data.train_files too" in capsys.readouterr().err
    expected, _ = slow_loss(model.engine.module, list(trainer.val_loader.dataset))
    assert trainer.validate()["val/loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_it_memorises_64_conversations_and_the_result_says_them(tmp_path):
    save_tiny_model(tmp_path / "model", seed=0, hidden_size=64, layers=1)
    pairs = [(one, other) for one in "abcdefgh" for other in "ijklmnop"]
    rows = [talk(one + other, other + one, "again", one * 2) for one, other in pairs]
    overrides = ["optim.lr=3e-2", "trainer.total_training_steps=40", "data.train_batch_size=64", "trainer.test_freq=20"]
    val = f"data.val_files={write(tmp_path, rows, 'val.jsonl')}"
    folder = run(compose(tmp_path, tmp_path / "model", rows, *overrides, val, "optim.lr_scheduler_type=cosine"))
    metrics = learning_metrics(tmp_path / "run")
    assert [step for step in metrics if "val/loss" in metrics[step]] == [0, 20, 40]
    assert metrics[0]["val/loss"] > 3 and metrics[40]["val/loss"] < 0.01
    assert metrics[40]["train/skipped_updates"] == 0

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for row in [rows[0], rows[21], rows[63]]:
        for place in (1, 3):
            given = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            prompt = tokenizer.apply_chat_template(row["messages"][:place], **given)
            answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
            assert answer.tolist() == [*tokenizer.encode(row["messages"][place]["content"]), END]


# Stopping and going on: 4 steps of 2 rows, two an epoch, saved at each.


def four_steps(folder: Path, model: Path, *more: str) -> SFTConfig:
    folder.mkdir(exist_ok=True)
    val = write(folder, ROWS[:2], "val.jsonl")
    saving = ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", f"data.val_files={val}", "trainer.test_freq=2"]
    schedule = ["optim.lr=1e-2", "optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps=2", "trainer.total_epochs=2"]
    return compose(folder, model, ROWS, *saving, *schedule, "data.train_batch_size=2", *more)


def test_a_signal_ends_it_after_its_step_which_is_saved_and_it_goes_on_bit_by_bit(tiny_model, tmp_path, capfd):
    """The record, weights, moments, generators and the place in the data are those of a run that was not stopped."""
    stopped, unbroken = tmp_path / "stopped", tmp_path / "unbroken"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SFTTrainer, "step", signalled(SFTTrainer.step, 3, signal.SIGTERM))
        run(four_steps(stopped, tiny_model, "trainer.save_freq=last"))
    assert "after step 3 of 4, which is saved: the same command goes on from it" in capfd.readouterr().out
    for folder in (stopped, unbroken):
        run(four_steps(folder, tiny_model))
        assert [entry["step"] for entry in read_metrics(folder / "run/metrics.jsonl")] == [*range(5)]
        assert sorted(path.name for path in folder.glob("run/global_step_*")) == ["global_step_3", "global_step_4"]
    metrics, files = learning_metrics(unbroken / "run"), state_files(unbroken / "run", 4)
    assert [metrics[step]["train/epoch"] for step in range(1, 5)] == [0, 0, 1, 1]
    assert len({metrics[step]["train/lr"] for step in range(1, 5)}) > 2
    assert learning_metrics(stopped / "run") == metrics
    assert len(files) == 5 and state_files(stopped / "run", 4) == files


def encoded(folder: Path, rows: list[dict], **settings) -> list[Sample]:
    return SFTDataset(write(folder, rows), TOKENIZER, SFTDataConfig(**settings), END).samples


def test_rows_are_a_prompt_to_read_and_a_response_to_learn_that_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("configs.errors.noticed", set())
    chat, _, plain, messages = encoded(tmp_path, ROWS)
    assert "1 row with a text as the prompt (data.prompt_key=prompt), which is read wi" in capsys.readouterr().err
    assert TOKENIZER.decode(chat.prompt_ids) == "<|user|>say abc<|end|><|assistant|>"
    assert chat.token_ids == [*TOKENIZER.encode("abc"), END]
    assert TOKENIZER.decode(plain.prompt_ids) == "plain text" and plain.token_ids == [END]
    assert TOKENIZER.decode(messages.prompt_ids) == "<|user|>hi<|end|><|assistant|>"
    assert TOKENIZER.decode(messages.token_ids) == "yo<|end|>"


def test_rows_of_verls_form_are_found_in_a_column_of_dicts_and_no_more_than_asked_for(tmp_path):
    rows = [{"extra_info": {"question": text, "answer": text[::-1]}} for text in ("say abc", "x", "y")]
    keys = {"prompt_key": "extra_info", "response_key": "extra_info"}
    keys |= {"prompt_dict_keys": ["question"], "response_dict_keys": "answer"}
    found = SFTDataset(write(tmp_path, rows), TOKENIZER, SFTDataConfig(**keys), END, 2).samples
    plain = [{"prompt": [{"role": "user", "content": text}], "response": text[::-1]} for text in ("say abc", "x")]
    assert found == encoded(tmp_path, plain)
    with pytest.raises(ValueError, match="row 0: the prompt is None"):
        encoded(tmp_path, rows, **keys | {"prompt_dict_keys": ["question", "text"]})


def test_truncation_cuts_the_named_side(tmp_path):
    row = {"prompt": "abcdef", "response": "uvw"}  # 6 + 4 tokens with the end
    [left] = encoded(tmp_path, [row], max_length=8, truncation="left")
    assert TOKENIZER.decode(left.prompt_ids) == "cdef" and left.token_ids[-1] == END
    [right] = encoded(tmp_path, [row], max_length=8, truncation="right")
    assert TOKENIZER.decode(right.prompt_ids) == "abcdef"
    assert TOKENIZER.decode(right.token_ids) == "uv", "a cut response has no end: the model is not taught to stop"
    [whole] = encoded(tmp_path, [row], max_length=10, truncation="error")
    assert whole.token_ids[-1] == END


def test_a_conversation_of_two_messages_in_a_row_is_read_and_cut_behind_its_prompt(tmp_path):
    said = [("user", "ab"), ("assistant", "c"), ("user", "de"), ("user", "f"), ("assistant", "gh")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in said]}]
    [sample], [cut] = encoded(tmp_path, rows), encoded(tmp_path, rows, max_length=8, truncation="right")
    assert TOKENIZER.decode(sample.token_ids) == "c<|end|><|user|>de<|end|><|user|>f<|end|><|assistant|>gh<|end|>"
    assert cut == sample.until(8 - len(sample.prompt_ids))


BAD = [
    ({"messages": [{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "b"}] * 2]}, {}, "one answer"),
    ({"prompt": "a"}, {}, r"the response \(column data\.response_key=response\) is None; it must be a string"),
    ({"prompt": "a", "response": 3}, {}, "is 3; it must be a string"),
    ({"prompt": 7, "response": "b"}, {}, r"prompt is 7.*column prompt"),
    ({"prompt": [{"role": "user"}], "response": "b"}, {}, "needs a 'role' and a 'content'"),
    ({"prompt": "abcdef", "response": "uvw"}, {"max_length": 8}, r"10 tokens, above data\.max_length=8: raise it"),
    ({"prompt": "ab", "response": "uvwxyz"}, {"max_length": 4, "truncation": "left"}, "leave nothing of the prompt"),
]


@pytest.mark.parametrize(("row", "settings", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_named_by_file_and_number(tmp_path, row, settings, message):
    with pytest.raises(ValueError, match=rf"{tmp_path}/rows\.jsonl, row 1: .*{message}"):
        encoded(tmp_path, [{"prompt": "a", "response": "b"}, row], **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "data.train_files is not set"),
        (["data.train_files={folder}/none.jsonl"], "none.jsonl: there is no such file (looked in"),
        (["data.train_files={folder}/rows.jsonl", "trainer.test_freq=2"], "set data.val_files"),
        (["data.train_files={folder}/rows.jsonl", "data.max_length=20000"], "is below data.max_length=20000"),
        (["data.train_files={folder}/rows.jsonl", "data.roles_to_train=[]"], "nothing to learn"),
        (["data.train_files={folder}/rows.jsonl", "trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (["data.train_files={folder}/rows.jsonl", "checkpoint.save_contents=[all]"], "checkpoint.save_contents holds"),
        (["data.train_file=x"], "data.train_files"),
        (["data.train_files={folder}/rows.jsonl", "model.path={folder}/nowhere"], "model.path="),
        (["data.train_files={folder}/rows.jsonl", "model.path={folder}", "trainer.logger=[wand]"], "has 'wand'"),
        (["data.train_files={folder}/rows.jsonl", "model.path={folder}", "trainer.n_gpus_per_node=99"], "are there"),
    ],
)
def test_the_command_refuses_in_one_line_what_cannot_work(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "extras.sft.trainer", None)  # nor does it import what takes seconds
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write(tmp_path, ROWS)
    (tmp_path / "config.json").touch()
    given = [argument.format(folder=tmp_path) for argument in arguments]
    with pytest.raises(SystemExit) as refused:
        main([*given, f"trainer.default_local_dir={tmp_path}/run"])
    stderr = capsys.readouterr().err
    assert refused.value.code == 2 and stderr.startswith("error: ") and message in stderr


@pytest.mark.slow
def test_two_workers_imitate_what_one_imitates(cluster: None, tiny_model: Path, tmp_path: Path):
    """Losses to 1e-6 on the same weights, before training and of the first step; with LoRA, whose frozen weights have
    no gradient, and a last batch of validation with a row for one worker alone."""
    losses = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        more = ["model.lora_rank=2", "optim.lr=1e-2", "trainer.total_training_steps=3", "trainer.n_threads=1"]
        rows = folder / "rows.jsonl"
        config = compose(folder, tiny_model, ROWS + ROWS[:1], *more, f"data.val_files={rows}",
                             f"trainer.n_workers_per_node={workers}", "trainer.save_freq=3")  # fmt: skip
        assert run(config).exists()
        metrics = learning_metrics(folder / "run")
        losses.append([metrics[0]["val/loss"], *(metrics[step]["train/loss"] for step in (1, 2, 3)),
                       metrics[3]["val/loss"]])  # fmt: skip
    assert losses[1][:2] == pytest.approx(losses[0][:2], rel=1e-6)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("name", sorted(path.stem for path in yaml_folder(SFTConfig).glob("*.yaml")))
def test_every_shipped_yaml_composes(name):
    load_config(Arguments(name, yaml_folder(SFTConfig), [], print_config=False), SFTConfig)
