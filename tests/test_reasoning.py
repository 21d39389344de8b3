"""`make reasoning`: its tasks by hand, their demonstrations, and the whole command at toy size."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.seeding import numpy_generator
from examples import long_sum, shell_game
from examples.shell_game import compute_score, demonstrations, make_rows, work_out
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
    changed = shell_game.with_wrong_step(worked)
    assert len(changed) == 53 and changed[:-1] == worked[:52] and changed[-1] != worked[52]
    assert work_out(swaps[52:], cup=int(changed[-1]))[-1] != worked[-1]


def test_a_long_sum_by_hand():
    worked = long_sum.work_out([8, -6, 3])
    assert worked == "A: 8 - 6 = 2\nB: 2 + 3 = 5\nAnswer: 5"
    assert long_sum.question([8, -6, 3])[0]["content"] == "Start with 8.\nA: - 6\nB: + 3"
    right = {"score": 1.0, "acc": 1.0}
    assert long_sum.compute_score("", worked, "5") == {**right, "worked": 1.0}
    assert long_sum.compute_score("", "Answer: 5", "5") == {**right, "worked": 0.0}
    for wrong in ("Answer: 15", "5", "Answer: 5\n", "Answer: 50"):
        assert long_sum.compute_score("", wrong, "5")["score"] == 0


def test_sums_are_demonstrated_right_at_once_and_worked_out_with_slips():
    rng = numpy_generator(0, "test")
    sums = [long_sum.draw(rng) for _ in range(200)]
    assert all(len(terms) == 10 and min(np.cumsum(terms)) >= 0 for terms in sums)
    rows = long_sum.demonstrations(seed=0, count=200, at_once=0.5, slip=0.02)
    at_once = [row for row in rows if row["response"].startswith("Answer:")]
    assert 70 < len(at_once) < 130
    for row in at_once:
        start, *lines = row["prompt"][0]["content"].replace(" ", "").split("\n")
        terms = [int(start[9:-1]), *(int(line[2:]) for line in lines)]
        assert row["response"] == f"Answer: {sum(terms)}"
    slipped = [long_sum.work_out(terms, 0.02, rng) != long_sum.work_out(terms) for terms in sums]
    assert 0.08 < sum(slipped) / 200 < 0.26  # 1 - 0.98 ** 9 = 0.17


def test_a_wrong_total_stands_in_the_middle_of_a_sum():
    worked = long_sum.work_out([6, 6, -7, 1, 9, 4, 5, 8, -9, -3])
    assert long_sum.with_wrong_step(worked).split("\n") == [*worked.split("\n")[:4], "E: 15 + 4 = 22"]


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
