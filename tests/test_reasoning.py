"""`make reasoning`: its tasks by hand, their demonstrations, and the whole command at toy size."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples import long_sum, shell_game
from examples.shell_game import compute_score, work_out
from scripts import reasoning


def test_a_game_by_hand():
    assert work_out("a4b0c7d1") == "0a0b1c1d2#2"  # 4-5, 0-1, 7-0, 1-2
    assert work_out("a7b7c6") == "0a7b0c0#0"  # the ring closes between 7 and 0
    assert work_out("c7d1", cup=1) == "1c1d2#2"  # on from the middle


def test_the_score_and_what_counts_as_worked_out():
    right = {"score": 1.0, "acc": 1.0}
    assert compute_score("", "0a0b1#1", "1") == {**right, "worked": 1.0}
    assert compute_score("", "#1", "1") == {**right, "worked": 0.0}
    for wrong in ("#2", "1", "#12", ""):
        assert compute_score("", wrong, "1")["score"] == 0


def test_a_long_sum_by_hand():
    worked = long_sum.work_out([8, -6, 3])
    assert worked == "A: 8 - 6 = 2\nB: 2 + 3 = 5\nAnswer: 5"
    assert long_sum.question([8, -6, 3])[0]["content"] == "Start with 8.\nA: - 6\nB: + 3"
    right = {"score": 1.0, "acc": 1.0}
    assert long_sum.compute_score("", worked, "5") == {**right, "worked": 1.0}
    assert long_sum.compute_score("", "Answer: 5", "5") == {**right, "worked": 0.0}
    for wrong in ("Answer: 15", "5", "Answer: 5\n", "Answer: 50"):
        assert long_sum.compute_score("", wrong, "5")["score"] == 0


def test_the_command_leaves_figures_of_three_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    lessons = [reasoning.lesson(shell_game, 4, 0.5, 0.02, f"data.train_batch_size={batch}") for batch in (1, 2)]
    short = {"shell_game": replace(reasoning.TASKS["shell_game"], lessons=lessons)}
    for name, few in {"TRAIN_ROWS": 8, "HELD_OUT_ROWS": 4, "TASKS": short}.items():
        monkeypatch.setattr(reasoning, name, few)
    reward = f"reward.custom_reward_function.path={shell_game.__file__}"
    run = "data.max_response_length=8 data.train_batch_size=2 actor_rollout_ref.rollout.n=2"
    steps = "trainer.total_training_steps=1 trainer.test_freq=1 trainer.logger=[]"
    monkeypatch.setattr(sys, "argv", ["reasoning", "--seed", "3", *run.split(), *steps.split(), reward])
    reasoning.main()
    summary = json.loads((tmp_path / "outputs/reasoning/summary.json").read_text())
    assert summary["seed"] == 3
    for name in ("warm start", "after RL", "control"):
        assert summary[name]["parameters"] == 800_128 and 0 <= summary[name]["greedy: accuracy"] <= 1
    assert "a step changed: answer moves" in capsys.readouterr().out
