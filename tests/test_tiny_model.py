"""The model that is made here: its tokenizer, its weights, and that everything that takes a model path takes it."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from custom.tiny_model import ALPHABET, build_model, build_tokenizer, main

TOKENIZER = build_tokenizer()


@settings(max_examples=50, deadline=None)
@given(st.text(ALPHABET, max_size=40))
def test_text_survives_the_round_trip_one_token_a_character(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text) and TOKENIZER.decode(ids) == text


def test_what_it_cannot_spell_is_one_unknown_token_each():
    assert TOKENIZER.encode("aéπ") == [TOKENIZER.encode("a")[0], TOKENIZER.unk_token_id, TOKENIZER.unk_token_id]


def test_the_chat_template_opens_and_ends_each_message_with_one_token():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    ids = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert len(ids) == len("s") + len("hi") + 5
    assert TOKENIZER.decode(ids) == "<|system|>s<|end|><|user|>hi<|end|><|assistant|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "shi"


def test_weights_are_fixed_by_the_seed_and_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    first, again, other = (build_model(TOKENIZER, seed, hidden_size=16, layers=1) for seed in (0, 0, 1))
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["taken"], "taken: no folder for the model can be made there: File exists"),
        (["taken/model"], "Not a directory"),
        (["model", "--layers", "0"], "--layers at least 1"),
        (["model", "--hidden-size", "12"], "a multiple of 8"),
    ],
)
def test_the_command_refuses_what_makes_no_model_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, says):
    (tmp_path / "taken").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tiny_model", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and says in capsys.readouterr().err and not (tmp_path / "model").exists()
