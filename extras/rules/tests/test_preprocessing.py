"""Public files and seeds become rows in verl's form, and each kind of row has its rule."""

import json

import pytest

from data.rows import read_rows
from extras.rules.countdown import compute_score, evaluate
from extras.rules.default import default_compute_score
from scripts import competition_math, countdown

PROBLEM = {"problem": "What is $1+1$?", "level": "Level 2", "type": "Algebra", "solution": r"$\boxed{\frac{4}{2}}$."}


def test_folders_of_math_become_rows_in_verls_form(tmp_path, capsys):
    for split, count in (("train", 3), ("test", 1)):
        for number in range(count):
            file = tmp_path / split / "algebra" / f"{number}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(PROBLEM, indent=4))
    competition_math.main([str(tmp_path / "train"), str(tmp_path / "test"), "--to", str(tmp_path / "rows")])
    rows = [row for _, row in read_rows(tmp_path / "rows/train.parquet")]
    asked = r"What is $1+1$? Let's think step by step and output the final answer within \boxed{}."
    assert rows[1] == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": asked}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac{4}{2}"},
        "extra_info": {"split": "train", "index": 1, "difficulty": 2},
    }
    assert default_compute_score(rows[1]["data_source"], PROBLEM["solution"], r"\frac{4}{2}") == 1
    assert "3 rows in" in capsys.readouterr().out


def test_countdown_is_made_by_its_seed_without_an_overlap_and_every_row_can_be_solved(tmp_path):
    for folder, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        countdown.main(["--to", str(tmp_path / folder), "--train", "30", "--test", "10", "--seed", seed])
    rows = {folder: [row for _, row in read_rows(f"{tmp_path}/{folder}/*")] for folder in "abc"}
    assert rows["a"] == rows["b"] != rows["c"] and len(rows["a"]) == 40
    prompts = [row["prompt"][0]["content"] for row in rows["a"]]
    assert len(set(prompts)) == 40
    for row, prompt in zip(rows["a"], prompts, strict=True):
        truth = row["reward_model"]["ground_truth"]
        assert all(str(number) in prompt for number in truth["numbers"]) and 1 <= truth["target"] <= 100
        assert row["extra_info"]["difficulty"] == len(truth["numbers"]) in (3, 4)


TRUTH = {"target": 24, "numbers": [2, 3, 4]}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>2 * 3 * 4</answer>", 1),
        ("<answer>1</answer> no: <answer> (4 * 3) * 2 = 24 </answer>", 1),
        ("<answer>4 / (2 / 3) * 4</answer>", 0.1),  # 24, but 4 comes twice
        ("<answer>4 * 3</answer>", 0.1),
        ("<answer>24</answer>", 0.1),
        ("<answer>4 / (3 - 3) * 2</answer>", 0.1),
        ("<answer>2 ** 3 ** 4 ** 9 ** 9</answer>", 0.1),
        ("<answer>__import__('os').system('true')</answer>", 0.1),
        ("<answer>" + "(" * 5000 + "</answer>", 0.1),
        ("<answer>2 * 3 * 4", 0),
        ("", 0),
    ],
)
def test_the_rule_of_countdown_by_hand(response, score):
    assert compute_score(response, TRUTH) == default_compute_score("countdown", response, TRUTH) == score


def test_countdown_counts_exactly():
    assert evaluate("1 / 3 * 3")[0] == 1, "floats would come to 1 here, and to 0.9999 elsewhere"
    assert compute_score("<answer>(1 / 49) * 49</answer>", {"target": 1, "numbers": [1, 49, 49]}) == 1


def test_tasks_of_reasoning_gym_are_rows_that_their_own_scorer_reads(reasoning_gym):
    [row] = [row for _, row in read_rows("reasoning_gym:sums?size=1")]
    for said, score in (("so <answer> 2 </answer>", 1), ("2", 1), ("<answer>3</answer>", 0.25)):
        assert default_compute_score(row["data_source"], said, row["reward_model"]["ground_truth"]) == score
