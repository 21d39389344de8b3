"""`python -m scripts.prime`: its task by hand, and the whole command at toy size."""

import json
import sys
from pathlib import Path

import pytest

from examples import reversal
from scripts import prime


def test_an_answer_is_right_as_a_whole_or_not():
    [row] = reversal.make_rows("train", 0, 1)
    truth = row["reward_model"]["ground_truth"]
    assert row["prompt"][0]["content"] == truth[::-1] and len(truth) == reversal.DIGITS
    assert reversal.compute_score("", truth, truth) == {"score": 1, "digits": 1}
    assert reversal.compute_score("", truth[:-1], truth) == {"score": 0, "digits": 1 - 1 / reversal.DIGITS}


def test_both_recipes_train_from_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(prime, "FOLDER", tmp_path)
    monkeypatch.setattr(prime, "DEMONSTRATIONS", 64)
    steps = ["trainer.total_training_steps=2", "trainer.test_freq=1", "data.train_batch_size=4"]
    monkeypatch.setattr(sys, "argv", ["prime", "--seed", "3", *steps, "data.val_max_samples=4"])
    prime.main()
    curves = json.loads((tmp_path / "3/summary.json").read_text())
    assert [[*curve] for curve in curves.values()] == [["0", "1", "2"]] * 2 and [*curves] == ["grpo", "prime"]
    assert "prime: 0:" in capsys.readouterr().out
