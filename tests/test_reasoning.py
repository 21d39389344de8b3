"""`make reasoning`: its game by hand, its demonstrations, and the whole command at toy size."""

import json
import sys
from pathlib import Path

import pytest

from data.seeding import numpy_generator
from examples import shell_game
from examples.shell_game import compute_score, demonstrations, make_rows, work_out
from scripts import reasoning
from scripts.quickstart import Lesson


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


def test_answers_at_once_are_right_and_worked_ones_slip_now_and_then():
    rows = demonstrations(seed=0, count=400, at_once=0.5, slip=0.02)
    at_once = [row for row in rows if row["response"].startswith("#")]
    worked = [row for row in rows if not row["response"].startswith("#")]
    right = [work_out(row["prompt"][0]["content"]) for row in at_once]
    assert [answer[-2:] for answer in right] == [row["response"] for row in at_once] and 150 < len(at_once) < 250
    slipped = [row for row in worked if row["response"] != work_out(row["prompt"][0]["content"])]
    assert 0.4 < len(slipped) / len(worked) < 0.9
    clean = demonstrations(seed=1, count=5, at_once=0, slip=0)
    assert all(row["response"] == work_out(row["prompt"][0]["content"]) for row in clean)


def test_every_cup_is_as_likely_in_the_end():
    ends = [row["reward_model"]["ground_truth"] for row in make_rows("train", 0, 4000)]
    assert all(0.1 < ends.count(str(cup)) / 4000 < 0.15 for cup in range(shell_game.CUPS))


def test_a_wrong_cup_moves_the_end_of_every_game():
    swaps = shell_game.draw(numpy_generator(0, "test"))
    worked = work_out(swaps)
    changed = shell_game.with_wrong_cup(worked)
    assert len(changed) == 53 and changed[:-1] == worked[:52] and changed[-1] != worked[52]
    assert work_out(swaps[52:], cup=int(changed[-1]))[-1] != worked[-1]


def few_rows(batch: int) -> Lesson:
    return reasoning.lesson(4, 0.5, 0.02, f"data.train_batch_size={batch}")


def test_the_command_leaves_figures_of_three_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, few in {"TRAIN_ROWS": 8, "HELD_OUT_ROWS": 4, "LESSONS": [few_rows(1), few_rows(2)]}.items():
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
    assert "a cup changed: answer moves" in capsys.readouterr().out
